"""The grid: where actions stand, what their colours say, and arrows."""

from dataclasses import replace

import pytest

from pipeproof.core.cause import Cause
from pipeproof.core.measured import Compared, Done, Measured, Ran, Sight
from pipeproof.core.verdict import Verdict
from pipeproof.pipeline.action import Action
from pipeproof.pipeline.schedules import build
from pipeproof.reports.page.grid import Arrow, Grid

WRONG = Sight("input", False, False, error=0.5, limit=1e-6, really="0F1", expected="0F0")


def ran(*rows: str, wrong: dict[str, Sight] | None = None, both: tuple[Sight, ...] = ()) -> Ran:
    """Rows of actions such as ``0F0 0B0``; the last of them took and made ``both``."""
    sights = {name: (sight,) for name, sight in (wrong or {}).items()}
    sights |= {rows[-1].split()[-1]: both} if both else {}
    actions = [[Action.parse(name) for name in row.split()] for row in rows]
    done = tuple(tuple(Done(*one, sights.get(str(one), ())) for one in row) for row in actions)
    return Ran(1, 2, tuple(range(len(rows))), done)


def grid(found: Ran, *causes: Cause, compared: tuple[Compared, ...] = ()) -> Grid:
    return Grid(Verdict("c", "fail", "none", (), causes=causes, measured=Measured(compared, found)), found)


def columns(found: Grid) -> list[list[int]]:
    return [[one.column for one in row] for row in found.rows]


def states(found: Grid) -> dict[str, str]:
    return {one.done.action: one.state for row in found.rows for one in row}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (ran("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), [[0, 1, 3, 5], [1, 2, 3, 4]]),
        (ran("0B0 0F0", "1B0 1F0"), [[0, 1], [0, 2]]),  # what waits for ever stands somewhere
        (ran("0F0 0F1", "1F0 1F1", wrong={"1F0": WRONG}), [[0, 1], [2, 3]]),  # it waits for what came
    ],
)
def test_an_action_stands_after_its_sources(found: Ran, expected: list[list[int]]) -> None:
    assert columns(grid(found)) == expected


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "dualpipev"])
def test_actions_of_a_rank_stand_apart(name: str) -> None:
    schedule = build(name, ranks=4, virtual=2 if name == "dualpipev" else 1, microbatches=8)
    rows = tuple(tuple(Done(*action) for action in row) for row in schedule.ranks)
    found = columns(grid(Ran(1, 8, schedule.placement, rows)))
    assert all(row == sorted(set(row)) for row in found)
    assert [len(row) for row in found] == [len(row) for row in schedule.ranks]


def test_the_fault_its_consequences_and_what_nobody_saw() -> None:
    later, right = replace(WRONG, really="", expected=""), replace(WRONG, agrees=True, error=0.0, really="")
    observed = {"1F0": WRONG, "1B0": later, "0F0": right, "0F1": replace(later, agrees=None)}
    found = grid(ran("0F0 0F1 0B0", "1F0 1F1 1B0", wrong=observed), Cause("wrong-message", 1, 1, (0,), "1F0"))
    assert states(found) == {
        "0F0": "right",
        "0F1": "not compared",
        "0B0": "not recorded",
        "1F0": "culprit",
        "1F1": "not recorded",
        "1B0": "consequence",
    }
    assert found.arrows == (Arrow((0, 1), (1, 2), expected=False), Arrow((0, 0), (1, 2), expected=True))


def test_no_arrow_goes_back_in_time() -> None:
    """What should have come was made after another was taken for it."""
    found = grid(ran("0F1 0F0", "1F0", wrong={"1F0": WRONG}), Cause("wrong-message", 1, 1, (0,), "1F0"))
    assert found.arrows == (Arrow((0, 0), (1, 1), expected=False),)


RIGHT, KEPT = replace(WRONG, agrees=True, error=0.0, really=""), replace(WRONG, really="", expected="")
RETURNED = Sight("input gradient", True, True, error=0.0, limit=1e-6)
FOUR = {"0F0": RETURNED, "0B0": KEPT, "1F0": RETURNED, "1B0": KEPT}
OVERWRITTEN = Cause("overwritten", 1, 1, (0,), "1B0")
HALVES = Compared("gradient", 1, "pass", stage=0, parameter="w")
MADE = Sight("output", True, False, error=0.5, limit=1e-6)
LOSS = Compared("loss", 1, "pass", microbatch=0, observed=1.0, expected=1.0)
WENT_INTO = (
    LOSS,
    replace(LOSS, microbatch=1, outcome="fail", error=0.1, limit=1e-6),
    Compared("gradient", 1, "pass", stage=0, parameter="w", error=1e-8, limit=1e-6),
)
STATES: dict[str, tuple[Grid, str]] = {
    "dropped": (
        grid(ran("0F0 0F1 0B0 0B1", wrong={"0F0": RIGHT, "0B0": RIGHT}), Cause("dropped", microbatches=(0,))),
        "right, not recorded, culprit, not recorded",
    ),
    "no action in a scale": (grid(ran("0F0 0B0"), Cause("scale", factor=2.0)), "not recorded, not recorded"),
    "nor in a report": (grid(ran("0F0 0B0"), Cause("report", microbatches=(0,))), "not recorded, not recorded"),
    "nor in a norm": (grid(ran("0F0 0B0"), Cause("norm", rank=0)), "not recorded, not recorded"),
    "first wrong": (
        grid(ran("0F0 0F1 0B0", wrong={"0F0": MADE, "0B0": MADE}), Cause("computation", 0, 0, (0,))),
        "culprit, not recorded, consequence",
    ),
    "what it went into": (grid(ran("0F0 0F1 0B0"), compared=WENT_INTO), "through, not recorded, through"),
    "of another operation": (grid(ran("0F0"), compared=(replace(LOSS, operation=2),)), "not recorded"),
    "an output not compared": (grid(ran("0F0", both=(RIGHT, replace(MADE, agrees=None)))), "not compared"),
    "from a wrong source": (
        grid(ran("0F0 0B0", "1F0 1B0", wrong=FOUR), OVERWRITTEN),
        "right, consequence, right, culprit",
    ),
    "from a right source": (
        grid(ran("0F0 0B0", "1F0 1B0", wrong=FOUR, both=(KEPT, RETURNED)), OVERWRITTEN),
        "right, wrong, right, culprit",
    ),
    "halves of a backward": (
        grid(ran("0F0 0I0 0W0", "1F0 1I0 1W0"), compared=(HALVES,)),
        "not recorded, not recorded, through, not recorded, through, not recorded",
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_states_follow_from_causes_and_comparisons(name: str) -> None:
    found, expected = STATES[name]
    assert ", ".join(states(found).values()) == expected

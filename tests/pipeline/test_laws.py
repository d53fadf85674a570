"""The laws: each has schedules that break it and no other, and together they are exactly what a correct step needs."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.laws import LAWS, check, report, violations
from pipeproof.pipeline.schedule import Schedule, ScheduleError, schedule_from_csv
from pipeproof.pipeline.schedules import build
from tests.support.golden import golden

# Two stages on two ranks, two microbatches: what the specimens below are changes of.
GOOD = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


def schedule(*rows: str, microbatches: int = 1, placement: tuple[int, ...] = (0, 1)) -> Schedule:
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Schedule("specimen", microbatches, placement, actions)


def sharded(*rows: str) -> Schedule:
    """Cells with what is done with parameters among them."""
    return schedule_from_csv("\n".join(row.replace(" ", ",") for row in rows), name="specimen")


SPECIMENS = {
    "a message": schedule("0F0 0SEND_F0 0B0", "1F0 1B0"),
    "a stage on another rank than it says": schedule("0F0 1F0 1B0 0B0", ""),
    "a stage beyond the last": schedule("0F0 0B0", "1F0 1B0 2F0"),
    "a stage before the first": Schedule(
        "specimen", 1, (0,), ((*map(Action.parse, ("0F0", "0B0")), Action(-1, Kind.FORWARD, 0)),)
    ),
    "a microbatch beyond the last": schedule("0F0 0B0 0F7", "1F0 1B0"),
    "a rank without a stage": schedule("0F0 0B0", "", placement=(0,)),
    "a stage on a rank that is not there": schedule("0F0 0B0", "1F0 1B0", placement=(0, -1)),
    "nothing to do": schedule("", placement=(0,), microbatches=0),
    "a forward twice": schedule("0F0 0B0", "1F0 1F0 1B0"),
    "a backward twice": schedule("0F0 0B0 0B0", "1F0 1B0"),
    "a full backward and a split one": schedule("0F0 0B0 0I0 0W0", "1F0 1B0"),
    "half a backward": schedule("0F0 0I0", "1F0 1B0"),
    "no forward": schedule("0F0 0B0", "1B0"),
    "a backward before its forward": schedule("0F0 0B0", "1B0 1F0"),
    "an input backward before its forward": schedule("0F0 0B0", "1I0 1F0 1W0"),
    "a weight backward before its input backward": schedule("0F0 0W0 0I0", "1F0 1B0"),
    "orders that contradict": schedule("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0", microbatches=2),
    "gradients reduced on another rank than the stage's, and of no stage": sharded(
        "0F0 0B0 0REDUCE_GRAD 1REDUCE_GRAD", "1F0 1B0 1REDUCE_GRAD 7REDUCE_GRAD"
    ),
    "a reduction before the last weight gradient": sharded("0F0 0I0 0REDUCE_GRAD 0W0", "1F0 1B0 1REDUCE_GRAD"),
    "two reductions of a stage, and none of another": sharded("0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD", "1F0 1B0"),
    "a wait for a reduction before it, and one that is missing": sharded(
        "0F0 0B0 0WAIT_REDUCE_GRAD 0REDUCE_GRAD", "1F0 1B0 1REDUCE_GRAD"
    ),
    "a stage that computes in shards": sharded("0UNSHARD 0F0 0RESHARD 0B0", "1UNSHARD 1F0 1B0 1RESHARD"),
    "a stage that nobody gathers, beside one that is gathered twice and stays so": sharded(
        "0F0 0B0", "1UNSHARD 1F0 1UNSHARD 1B0"
    ),
    "a stage that is left twice": sharded("0UNSHARD 0F0 0B0 0RESHARD 0RESHARD"),
}


@pytest.mark.parametrize("name", SPECIMENS)
def test_a_specimen_is_refused_with_the_reason(name: str) -> None:
    found = violations(SPECIMENS[name])
    golden("\n".join(map(str, found)))
    assert len({violation.law for violation in found}) == 1
    with pytest.raises(ScheduleError, match=r"^specimen breaks 1 law:"):
        check(SPECIMENS[name])


def test_every_law_has_a_specimen_that_breaks_it_alone() -> None:
    broken = {violations(specimen)[0].law for specimen in SPECIMENS.values()}
    assert broken == {law.__name__.replace("_", "-") for law in LAWS}


def test_check_returns_a_good_schedule() -> None:
    good = schedule(*GOOD, microbatches=2)
    assert violations(good) == ()
    assert check(good) is good


def test_a_split_and_a_full_backward_may_live_in_one_schedule() -> None:
    mixed = schedule("0F0 0F1 0I0 0W0 0B1", "1F0 1B0 1F1 1I1 1W1", microbatches=2)
    assert violations(mixed) == ()


def test_all_violations_are_collected_then_raised_once() -> None:
    """Microbatches {0, 7} of two, a message, a backward first: five laws in one message, grouped."""
    bad = schedule("0F0 0F7 0B0 0B7 0SEND_F0", "1B0 1F0 1F1 1B1", microbatches=2)
    with pytest.raises(ScheduleError) as caught:
        check(bad)
    golden(str(caught.value))


def test_a_long_list_is_cut_and_counted() -> None:
    with pytest.raises(ScheduleError) as caught:
        check(schedule("0F0 0B0", placement=(0,), microbatches=100))
    assert str(caught.value).count("\n") == 9
    golden(str(caught.value))


def test_what_torch_accepts_is_refused() -> None:
    """A microbatch with B and I, W beside one with none: torch counts b + (i + w) / 2 over all microbatches."""
    found = violations(schedule_from_csv("0F0,0F1,0B0,0I0,0W0"))
    assert [violation.law for violation in found] == ["completeness"] * 2


def test_an_order_of_torch_s_that_lost_a_forward_is_refused() -> None:
    """1F1B as 2.13 and 2.15 put it: the last rank begins at microbatch 1 and ends at one that is not there."""
    rows = "0F0 0F1 0B0 0B1", "1F1 1B0 1F2 1B1"
    golden("\n".join(map(str, violations(schedule(*rows, microbatches=2)))))
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    made = torch.Schedule1F1B.__new__(torch.Schedule1F1B)
    made._num_stages, made._n_microbatches = 2, 2
    order = made._get_pipeline_order()
    text = "\n".join(",".join(str(cell or "") for cell in row) for row in order.values())
    lost = "1F0" not in text
    assert bool(violations(schedule_from_csv(text))) == lost


def test_a_long_row_is_cut_around_what_is_wrong() -> None:
    rows = " ".join(f"0F{m} 0B{m}" for m in range(20)), "1F0 1B0"
    found = violations(schedule(rows[0].replace("0F9 0B9", "0B9 0F9"), rows[1], microbatches=20))
    text = report(
        "specimen",
        [violation for violation in found if violation.law == "local-order"],
        ([Action.parse(cell) for cell in rows[0].replace("0F9 0B9", "0B9 0F9").split()],),
    )
    golden(text)


def runs(schedule: Schedule) -> bool:
    """The laws again, by another road: run the schedule with a set of what is done, and count what ran."""
    done: set[tuple[int, str, int]] = set()
    todo = [list(actions) for actions in schedule.ranks]
    last = schedule.n_stages - 1

    def may_run(rank: int, action: Action) -> bool:
        stage, kind, m = action
        if not 0 <= stage <= last or schedule.placement[stage] != rank or not 0 <= m < schedule.microbatches:
            return False
        if kind is Kind.FORWARD:
            return stage == 0 or (stage - 1, "F", m) in done
        if kind is Kind.BACKWARD_WEIGHT:
            return (stage, "I", m) in done
        is_backward = kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
        return is_backward and (stage, "F", m) in done and (stage == last or (stage + 1, "gradient", m) in done)

    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(todo):
            while actions and may_run(rank, actions[0]):
                stage, kind, m = actions.pop(0)
                done |= {(stage, kind.value, m)} | ({(stage, "gradient", m)} if kind.value in "BI" else set())
                progress = True
    each: dict[tuple[int, int], str] = defaultdict(str)
    for stage, kind, m in sorted(action for actions in schedule.ranks for action in actions):
        each[stage, m] += kind.value
    return (
        not any(todo)
        and len(each) == schedule.n_stages * schedule.microbatches > 0
        and set(each.values()) <= {"BF", "FIW"}
        and set(schedule.placement) == set(range(schedule.n_ranks))
    )


@st.composite
def damaged(draw: st.DrawFn) -> Schedule:
    """A good schedule, some of its backwards split, then changed in up to three places."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    virtual = draw(st.integers(1, 2)) if name == "interleaved" else 1
    good = build(name, ranks=draw(st.integers(1, 3)), microbatches=draw(st.integers(1, 3)), virtual=virtual)
    rows = [list(actions) for actions in good.ranks]
    for _ in range(draw(st.integers(0, 3))):
        row = draw(st.sampled_from(rows))
        if not row:
            continue
        slot = draw(st.integers(0, len(row) - 1))
        other = draw(st.integers(0, len(row) - 1))
        action = row[slot]
        match draw(st.sampled_from(["split", "swap", "drop", "double", "move", "kind", "microbatch"])):
            case "split":
                split = [action._replace(kind=Kind.BACKWARD_INPUT), action._replace(kind=Kind.BACKWARD_WEIGHT)]
                row[slot : slot + 1] = split if action.kind is Kind.BACKWARD else [action]
            case "swap":
                row[slot], row[other] = row[other], action
            case "drop":
                del row[slot]
            case "double":
                row.insert(other, action)
            case "move":
                draw(st.sampled_from(rows)).append(row.pop(slot))
            case "kind":
                row[slot] = action._replace(kind=draw(st.sampled_from(Kind)))
            case "microbatch":
                row[slot] = action._replace(microbatch=draw(st.integers(-1, good.microbatches)))
    return Schedule("damaged", good.microbatches, good.placement, tuple(map(tuple, rows)))


@pytest.mark.long
@given(damaged())
def test_the_laws_hold_exactly_where_the_schedule_runs(schedule: Schedule) -> None:
    assert (violations(schedule) == ()) == runs(schedule)


def test_that_comparison_sees_both_sides() -> None:
    """What the comparison above rests on: ``runs`` says yes to a good schedule and no to every specimen.

    It knows nothing of shards.
    """
    assert runs(schedule(*GOOD, microbatches=2))
    assert not any(runs(one) for one in SPECIMENS.values() if not one.shard_actions)

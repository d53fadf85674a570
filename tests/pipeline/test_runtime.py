"""The runtime on programs of one's own: backwards split in two, the weights' half early, late, or at the very end."""

from dataclasses import replace
from itertools import product

import pytest

from pipeproof.own.case import MODELS, Case
from pipeproof.own.judgement import judge
from pipeproof.own.observe import observe
from pipeproof.pipeline import Action, Kind, Schedule, build
from pipeproof.worlds.world import World
from tests.support.sweeps import SWEEP, each_once


def split(schedule: Schedule, lag: int) -> Schedule:
    """``schedule`` with every B as an I, and its W once ``lag`` newer I's have run."""

    def row(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        done: list[Action] = []
        waiting: list[Action] = []
        for action in actions:
            if action.kind is not Kind.BACKWARD:
                done.append(action)
                continue
            done.append(action._replace(kind=Kind.BACKWARD_INPUT))
            waiting.append(action._replace(kind=Kind.BACKWARD_WEIGHT))
            if len(waiting) > lag:
                done.append(waiting.pop(0))
        return (*done, *waiting)

    return replace(schedule, name="split", ranks=tuple(map(row, schedule.ranks)))


LAGS = (0, 2, 99)
SHAPES = {
    **{f"{kind} on {ranks}": (kind, ranks, 1) for kind, ranks in (("1f1b", 4), ("gpipe", 2), ("1f1b", 1))},
    "interleaved on 2": ("interleaved", 2, 2),
}
NAMES, SPLITS = each_once(shape=SHAPES, lag=LAGS, model=["gpt-tied"])
OTHERS = product(["interleaved on 2"], LAGS, [model for model in MODELS if model != "gpt-tied"])


@pytest.mark.parametrize(NAMES, [*SPLITS, *(pytest.param(*one, marks=SWEEP) for one in OTHERS)])
def test_split_backwards_agree_with_the_reference_bit_for_bit(world: World, shape: str, lag: int, model: str) -> None:
    kind, ranks, virtual = SHAPES[shape]
    layers = (2,) + (1,) * (ranks * virtual - 1)
    case = Case(kind, ranks, virtual, 5, layers, model=model, ragged=True, loss="tokens")
    schedule = split(build(kind, ranks=ranks, virtual=virtual, microbatches=5), lag)
    case.__dict__["built"] = schedule  # a case has no name for schedules of one's own yet
    observed = observe(case, world)
    assert any(action.kind is Kind.BACKWARD_WEIGHT for action in observed.ranks[0][0].executed)
    verdict = judge(case, observed)
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), (model, verdict.mismatches[:2])

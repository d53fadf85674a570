"""Recorded evidence of a right run explains itself completely, so that what a fault leaves in it is the fault's."""

from dataclasses import replace

import pytest

from pipeproof.core.judge import one_thread
from pipeproof.core.verdict import Mismatch
from pipeproof.explain.evidence import of_run
from pipeproof.own.case import MODELS, Case
from pipeproof.own.judgement import judge, setup_of
from pipeproof.own.observe import observe
from pipeproof.wings.specimens import SPECIMENS
from pipeproof.wings.specimens.trial import case_for, try_out
from pipeproof.worlds.world import World
from tests.support.sweeps import each_once

SEVERAL_STREAMS = ("carry", "fresh", "prompt")
MORE = [model for model in MODELS if model not in SEVERAL_STREAMS]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(*each_once(model=MORE, shape=[("1f1b", 1), ("zb-v", 2)]))
def test_what_is_recorded_of_one_stream_is_what_it_should_be(world: World, model: str, shape: tuple[str, int]) -> None:
    assert_recorded(world, model, *shape)


@pytest.mark.sweep
@pytest.mark.parametrize(
    *each_once(model=SEVERAL_STREAMS, shape=[("1f1b", 1), ("zb-v", 2), ("interleaved", 2), ("zb-h1", 1)])
)
def test_what_is_recorded_of_several_is_too(world: World, model: str, shape: tuple[str, int]) -> None:
    assert_recorded(world, model, *shape)


BESIDE = ["microbatch-dropped", "backward-of-another", "gradients-crossed", "stage-negated", "input-poisoned"]


def assert_recorded(world: World, model: str, schedule: str, virtual: int) -> None:
    """The recording of a right run is what the reference says of every message, call and sum."""
    case = Case(schedule, 2, virtual, 2, (1,) * (2 * virtual), model=model)
    observed = observe(case, world, record=True)
    verdict = judge(case, observed)
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), verdict
    for operation, name in enumerate(case.plan):
        asked = replace(verdict, mismatches=(Mismatch("gradient", operation + 1, "", ""),))
        with one_thread():
            evidence = of_run(setup_of(case), observed, asked)
            assert evidence.divergences == [], name


@pytest.mark.sweep
@pytest.mark.parametrize(*each_once(model=SEVERAL_STREAMS, name=BESIDE))
def test_a_fault_beside_several_streams_is_named(world: World, model: str, name: str) -> None:
    specimen = SPECIMENS[name]
    case = replace(case_for(specimen, "1f1b", ranks=2, microbatches=4), model=model)
    trial = try_out(case, world)
    assert trial.caught, trial
    assert trial.recorded is not None
    assert trial.recorded.right, trial

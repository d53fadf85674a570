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
SHAPES = [("1f1b", 1), ("zb-v", 2), ("interleaved", 2), ("zb-h1", 1)]
BESIDE = ["microbatch-dropped", "backward-of-another", "gradients-crossed", "stage-negated", "input-poisoned"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        *each_once(model=MORE, shape=SHAPES[:2])[1],
        *(pytest.param(model, shape, marks=pytest.mark.sweep) for model in SEVERAL_STREAMS for shape in SHAPES),
    ],
)
def test_the_recording_of_a_right_run_is_what_the_reference_says(
    world: World, model: str, shape: tuple[str, int]
) -> None:
    """Of every message, call and sum."""
    schedule, virtual = shape
    case = Case(schedule, 2, virtual, 2, (1,) * (2 * virtual), model=model)
    observed = observe(case, world, record=True)
    verdict = judge(case, observed)
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), verdict
    for operation, name in enumerate(case.plan):
        asked = replace(verdict, mismatches=(Mismatch("gradient", operation + 1, "", ""),))
        with one_thread():
            assert of_run(setup_of(case), observed, asked).divergences == [], name


@pytest.mark.sweep
@pytest.mark.parametrize(*each_once(model=SEVERAL_STREAMS, name=BESIDE))
def test_a_fault_beside_several_streams_is_named(world: World, model: str, name: str) -> None:
    specimen = SPECIMENS[name]
    case = replace(case_for(specimen, "1f1b", ranks=2, microbatches=4), model=model)
    trial = try_out(case, world)
    assert trial.caught, trial
    assert trial.recorded.right, trial

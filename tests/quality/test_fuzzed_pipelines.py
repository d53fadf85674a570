"""Campaigns on the pipelines of the examples: faults that few cases show are found, right ones give no alarm."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pipeproof.whitebox import WhiteBox
from pipeproof.worlds.world import World
from tests.support.fuzzed_pipelines import PIPELINES, Fuzzed, build, draw, loss_fn
from tests.support.sweeps import SWEEP
from tests.support.warm_start import Ended

Launch = Callable[..., Ended]

FAULTS = [pytest.param(one, fault, id=f"{one.step.__name__}-{fault}") for one in PIPELINES for fault in one.faults]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("one", "fault"), FAULTS)
def test_a_fault_that_few_cases_show_is_found_and_shrinks_to_the_smallest(
    world: World, one: Fuzzed, fault: str
) -> None:
    box, step = WhiteBox(world), partial(one.step, fault=fault)
    found = box.fuzz(step, reference=build, data=draw, loss_fn=loss_fn, **one.words)
    assert str(found.smallest) == one.faults[fault], str(found)
    assert (bool(found), found.repeats, found.cases <= 50) == (False, True, True)
    again = box.fuzz(step, reference=build, data=draw, loss_fn=loss_fn, case=str(found.smallest), **one.words)
    assert (again.smallest, again.cases) == (found.smallest, 1)
    assert [cause.kind for cause in again.verdict.causes] == [cause.kind for cause in found.verdict.causes]


@pytest.mark.parametrize(("cases", "seed"), [(6, 0), pytest.param(170, 1, marks=SWEEP)])
@pytest.mark.parametrize("one", [*PIPELINES], ids=[one.step.__name__ for one in PIPELINES])
def test_a_right_pipeline_gives_no_alarm(world: World, one: Fuzzed, cases: int, seed: int) -> None:
    result = WhiteBox(world).fuzz(
        one.step, reference=build, data=draw, loss_fn=loss_fn, cases=cases, seed=seed, **one.words
    )
    assert result, str(result)
    assert (result.outcomes, result.ended) == ({"pass": cases}, "")
    assert result.planted


TESTS = """
import torch, torch.distributed as dist
from torch import nn
from tests.support.fuzzed_pipelines import build, by_hand, draw, loss_fn

def faulty(model, microbatches, split):
    return by_hand(model, microbatches, split, fault="" if len(microbatches) < 2 else "start-by-own-size")

def test_it(whitebox):
    result = whitebox.fuzz(faulty, reference=build, data=draw, loss_fn=loss_fn, ranks=2, cases=20, ragged=False)
    print("cases", result.cases, result.smallest)
    result.raise_if_failed()
"""
REPLAY = """pytest "test_it.py::test_it" --pipeproof-case='ranks=2 microbatches=2 rows=1 split=1,7 seed=0'"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", ["plain", "workers", "torchrun"])
def test_the_replay_line_runs_that_case_alone(python: Launch, torchrun: Launch, tmp_path: Path, way: str) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "tests").symlink_to(Path(__file__).parents[1])
    pytests = ("-m", "pytest", "-p", "no:cacheprovider", *(["-n2"] if way == "workers" else []), "test_it.py")

    def launch(*more: str) -> str:
        run = torchrun(tmp_path, *pytests, *more, ranks=2) if way == "torchrun" else python(tmp_path, *pytests, *more)
        assert "1 failed" in run.stdout, run.stdout
        return run.stdout

    assert REPLAY in launch()
    (option,) = re.findall(r"--pipeproof-case='(.*)'", REPLAY)
    again = launch(f"--pipeproof-case={option}")
    assert REPLAY in again
    assert f"cases 1 {option}" in again

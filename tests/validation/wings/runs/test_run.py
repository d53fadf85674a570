"""Runs whose ranks have parts of parameters, held against one that has them whole, and against each other."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeproof.core.verdict import Verdict
from pipeproof.wings.runs import compare_runs
from pipeproof.worlds.world import World
from tests.support.long_runs import Loop
from tests.support.sharded_runs import in_shards

pytestmark = [pytest.mark.long, pytest.mark.pipeproof_ranks]
STEPS = 4


@pytest.fixture(scope="module")
def folder(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("layouts")
    Loop().train(made / "whole", range(STEPS))
    Loop([2, 0, 3, 1]).train(made / "third", range(STEPS))
    world.run(lambda context: [job(made / name, range(STEPS)) for name, job in JOBS.items()], ranks=2)
    return made


def rolled(model: nn.Module) -> None:
    """Load the rows of this rank in another order."""
    with torch.no_grad():
        rows = model.get_parameter("0.0.weight").to_local()  # type: ignore[operator]  # a DTensor
        rows.copy_(rows.roll(1, 0))


def not_reduced(model: nn.Module) -> None:
    """Take part of a gradient for all of it, as where a sum over ranks was forgotten."""

    def halve(one: torch.Tensor) -> None:
        one.grad.mul_(0.5)

    model.get_parameter("1.1.weight").register_post_accumulate_grad_hook(halve)


JOBS = {
    "cut": partial(in_shards, cut=True),
    "shards": partial(in_shards, cut=False),
    "evaluated": partial(in_shards, cut=False, evaluated=True),
    "rolled": partial(in_shards, cut=True, fault=rolled),
    "not reduced": partial(in_shards, cut=True, fault=not_reduced),
}


def judged(folder: Path, observed: str, *, good: str = "whole") -> Verdict:
    return compare_runs(folder / good, folder / observed, third=folder / "third")


@pytest.mark.parametrize("name", ["shards", "cut", "evaluated"])
def test_parts_are_held_against_the_whole(name: str, folder: Path) -> None:
    verdict = judged(folder, name)
    assert verdict.outcome == "pass", str(verdict)
    assert verdict.law("initial-weights").exact >= 10, "the same bits, whoever has them"
    assert verdict.law("gradient").checked == 10 * STEPS
    assert verdict.law("loss").checked == 4 * STEPS
    assert judged(folder, name, good="cut").outcome == "pass"


@pytest.mark.sweep
def test_a_wrong_part_is_a_fault_of_its_parameter_and_of_its_rank_where_that_can_be_told(folder: Path) -> None:
    for good, rank in (("whole", None), ("cut", 1)):
        one = judged(folder, "rolled", good=good).mismatches[0]
        assert (one.law, one.step, one.parameter, one.rank) == ("initial-weights", 0, "0.0.weight", rank)
        verdict = judged(folder, "not reduced", good=good)
        assert (verdict.outcome, verdict.mismatches[0].law) == ("fail", "replicas")
        assert [getattr(verdict.mismatches[0], one) for one in ("rank", "parameter")] == [1, "1.1.weight"]
    alone = compare_runs(folder / "whole", folder / "rolled")
    assert (alone.outcome, alone.mismatches[0].law) == ("fail", "initial-weights"), "nothing was computed yet"

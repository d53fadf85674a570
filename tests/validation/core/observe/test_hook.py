"""A stage that is watched may be copied and saved in the step: the copy is a module like any other."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from pipeproof.core.observe.computed_in import ComputedIn
from pipeproof.core.observe.watching import Watcher
from pipeproof.records.step_check import check_step
from pipeproof.wings.composed import StageByStage
from tests.support.pipeline_here import DATA, MSE, Job, Layer, checked, layers


def saved(stage: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(stage, file)
    assert b"pipeproof.core.observe" not in file.getvalue(), "whoever reads it may not have pipeproof"
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("made", [copy.deepcopy, saved])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_copy_of_a_watched_stage_is_not_watched(made: Any, hooked: bool) -> None:
    stage, x = Layer(), torch.ones(2, 8, requires_grad=True)
    if hooked:
        stage.register_full_backward_pre_hook(nothing)
    watcher = Watcher(keep=torch.clone)
    watcher.watch(stage)
    another = made(stage)
    another(x).sum().backward()
    assert not watcher.calls(stage)
    stage(x).sum().backward()
    assert len(watcher.calls(stage) or []) == 1
    watcher.close()
    assert torch.equal(stage.layer.weight.grad, another.layer.weight.grad)


def nothing(*given: Any) -> None:
    """A hook of the job's own."""


def test_a_step_may_be_checked_twice_at_once() -> None:
    stages = layers(torch.tanh, torch.tanh)
    by = StageByStage(MSE)
    with check_step(dict(enumerate(stages)), DATA, against=by, rename="{}.{}".format) as outer:
        inner = checked(Job(stages))
        outer.gradients()
    assert [inner.outcome, outer.verdict.outcome] == ["pass", "pass"], f"{inner}\n{outer.verdict}"


def test_a_module_whose_types_are_noted_may_be_saved() -> None:
    module = Layer()
    with ComputedIn([module]) as computed:
        for made in (copy.deepcopy, saved):
            made(module)(torch.ones(2, 8))
        assert computed.narrowest == ""
        module(torch.ones(2, 8))
    assert computed.narrowest == "float32"


def test_when_it_counts_is_the_users_own_to_say() -> None:
    stage, x, says = Layer(), torch.ones(2, 8), [True, True, False, False]
    watcher = Watcher()
    watcher.watch(stage, lambda: says.pop(0))
    stage(x), stage(x)
    assert len(watcher.calls(stage) or []) == 1
    with pytest.raises(IndexError):
        stage(x)
    assert not watcher.unseen(stage)

"""What a step's gradients were added to is no part of it, and is known where it was there."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.func import functional_call, vjp
from torch.nn.modules import module
from torch.optim import optimizer

from pipeproof import watch
from pipeproof.core.observe.initial_weights import FirstUse
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden
from tests.support.steps import backward, blocks, loss_fn, pairs


def left(model: Any, microbatches: list[Any], *, ranks: tuple[int, ...]) -> Any:
    """A step of replicas whose gradients, on these ``ranks``, are added to what was there before."""
    if dist.get_rank() in ranks:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
    losses = backward(watch(model), microbatches)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return model, losses


@pytest.mark.parametrize(("replicas", "rank"), [([0], 0), ([0, 1], 1)], ids=["everywhere", "on one replica alone"])
def test_what_was_there_before_the_step_is_known(whitebox: WhiteBox, replicas: list[int], rank: int) -> None:
    data, build, step = pairs(4, rows=6), partial(blocks, seed=3), partial(left, ranks=(rank,))
    verdict = whitebox.validate(step, reference=build, microbatches=data, ranks=replicas, loss_fn=loss_fn)
    assert [(cause.kind, cause.rank) for cause in verdict.causes] == [("stale-gradient", rank)], str(verdict)
    golden(verdict.causes[0].detail)


def test_weights_are_those_that_a_module_was_called_with() -> None:
    """Others than its own, where somebody calls it by them; and in a transformation as outside of it."""
    module = torch.nn.Linear(2, 2, bias=False)
    others = {"weight": torch.full((2, 2), 3.0)}
    for call in (
        functional_call,
        lambda *given: vjp(lambda weights: functional_call(module, weights, given[2]), others),
    ):
        with FirstUse(()) as first_use:
            for _ in range(2):
                call(module, others, (torch.ones(1, 2),))
        observed = first_use.of(module.weight, module, "weight")
        assert observed.value is not None
        assert torch.equal(observed.value, others["weight"])
        assert not first_use.weights.broken


def test_no_hook_is_left_behind() -> None:
    hooks = module._global_forward_pre_hooks, module._global_forward_hooks, optimizer._global_optimizer_post_hooks
    before = [*map(len, hooks)]
    with FirstUse(()):
        assert all(len(now) > then for now, then in zip(hooks, before, strict=True))
    assert [*map(len, hooks)] == before

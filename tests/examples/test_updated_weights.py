"""What the optimizer made of the weights, where the step has one and says how it is made."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pipeproof import Contract, StepResult
from pipeproof.core.observe.initial_weights import step_begins
from pipeproof.whitebox import WhiteBox
from pipeproof.whitebox.task import WhiteBoxError
from tests.support.golden import golden
from tests.support.steps import WIDTH, backward, pairs, sgd

loss_fn = nn.functional.mse_loss
RATE, BOUND = 1e-2, 1e-2


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))


def adam(model: nn.Module, rate: float = RATE) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate)


plain = partial(sgd, rate=RATE)
trained = partial(backward, by=loss_fn)


def sharing(model: nn.Module, microbatches: Any, *, fault: Callable[[nn.Module], None] = lambda model: None) -> Any:
    """Replicas, whose optimizer is in shards."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of what torch itself has deprecated

    losses = trained(DistributedDataParallel(model), microbatches)
    ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=RATE).step()
    fault(model)
    return StepResult(model, losses)


def in_shards(model: nn.Module, microbatches: Any) -> Any:
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    losses = trained(model, microbatches)
    adam(model).step()
    return StepResult(model, losses)


def alone(model: nn.Module, microbatches: Any, *, rate: float = RATE, steps: int = 1) -> Any:
    losses = trained(model, microbatches)
    optimizer = adam(model, rate)
    for _ in range(steps):
        optimizer.step()
    return StepResult(model, losses)


def clipping(model: nn.Module, microbatches: Any, *, times: int = 1, by: Any = plain) -> Any:
    losses = trained(model, microbatches)
    gradients = {one: None if one.grad is None else one.grad.clone() for one in model.parameters()}
    norm = nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
    assert norm > BOUND
    for _ in range(times):
        nn.utils.clip_grads_with_norm_(model.parameters(), BOUND, norm)
    by(model).step()
    return StepResult(model, losses, gradients=gradients, max_norm=BOUND)


judged = partial(WhiteBox.validate, reference=build, microbatches=pairs(4), ranks=1, loss_fn=loss_fn, optimizer=adam)


@pytest.mark.parametrize(("step", "ranks"), [(alone, 1), (sharing, {"dp": 2}), (in_shards, {"fsdp": 2})])
def test_a_right_update_passes(whitebox: WhiteBox, step: Any, ranks: Any) -> None:
    verdict = judged(whitebox, step, ranks=ranks)
    assert verdict.outcome == "pass", verdict
    assert verdict.law("updated-parameters").checked >= 4


def test_without_an_optimizer_no_law_is_about_it(whitebox_here: WhiteBox) -> None:
    verdict = judged(whitebox_here, alone, optimizer=None)
    assert verdict.outcome == "pass"
    assert "updated-parameters" not in {law.name for law in verdict.laws}


@pytest.mark.parametrize("wrong", [{"rate": 2 * RATE}, {"steps": 2}, {"steps": 0}])
def test_another_update_fails(whitebox_here: WhiteBox, wrong: dict[str, Any]) -> None:
    verdict = judged(whitebox_here, partial(alone, **wrong))
    assert verdict.outcome == "fail"
    assert {one.law for one in verdict.mismatches} == {"updated-parameters"}
    assert [one.kind for one in verdict.causes] == ["update"]


@pytest.mark.sweep
def test_a_rank_that_does_not_get_the_others_weights_is_named(whitebox: WhiteBox) -> None:
    def kept(model: nn.Module) -> None:
        if dist.get_rank() == 1:
            model.load_state_dict({**model.state_dict(), "0.bias": build().state_dict()["0.bias"]})

    verdict = judged(whitebox, partial(sharing, fault=kept), ranks={"dp": 2})
    assert verdict.outcome == "fail"
    (first,) = verdict.mismatches
    assert (first.law, first.rank, first.parameter) == ("updated-parameters", 1, "0.bias")
    golden(verdict.details, lines="^  (where|observed|expected) ")


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(("at", "times"), [(0, 0.0), (1, 0.0), (0, 2.0)])
def test_of_replicas_that_are_apart_the_one_that_did_not_move_is_named(
    whitebox: WhiteBox, at: int, times: float, told: bool
) -> None:
    """Without an optimizer of the reference nothing tells which of two that moved otherwise is right."""

    def moved(model: nn.Module) -> None:
        if dist.get_rank() == at:
            for one, begun in zip(model.parameters(), build().parameters(), strict=True):
                one.data.copy_(begun + times * (one - begun))

    def through(model: nn.Module, operations: Any) -> Any:
        for _, microbatches in operations:
            yield sharing(model, microbatches, fault=moved)

    declared, optimizer = Contract(operations=["train"]), adam if told else None
    (cause,) = judged(whitebox, through, ranks={"dp": 2}, optimizer=optimizer, contract=declared).causes
    assert cause.kind == "update"
    assert cause.rank == (None if times else at)
    assert cause.ranks == ((0, 1) if times and not told else ())


def test_what_nobody_hands_back_is_not_passed(whitebox_here: WhiteBox) -> None:
    def step(model: nn.Module, microbatches: Any) -> Any:
        handed = alone(model, microbatches)
        gradients: dict[str, Tensor | None] = {name: one.grad for name, one in model.named_parameters()}
        return StepResult(gradients, handed.losses)

    verdict = judged(whitebox_here, step)
    assert verdict.law("updated-parameters").outcome != "pass"
    assert verdict.outcome != "fail"
    golden(verdict.law("updated-parameters").note)


def test_an_optimizer_that_cannot_be_made_is_said(whitebox_here: WhiteBox) -> None:
    def broken(model: nn.Module) -> torch.optim.Optimizer:
        raise RuntimeError("no such optimizer")

    golden(judged(whitebox_here, alone, optimizer=broken).details.splitlines()[0])
    with pytest.raises(WhiteBoxError, match="expected a function that makes one of the model"):
        judged(whitebox_here, alone, optimizer=adam(build()))


@pytest.mark.parametrize(("rate", "named"), [(RATE, False), (2 * RATE, True)])
def test_gradients_that_were_cleared_after_a_right_update_are_told_so(
    whitebox_here: WhiteBox, rate: float, named: bool
) -> None:
    """A wrong update is no proof that gradients were there."""

    def step(model: nn.Module, microbatches: Any) -> Any:
        handed = alone(model, microbatches, rate=rate)
        model.zero_grad()
        return handed

    verdict = judged(whitebox_here, step)
    assert verdict.outcome == "fail"
    assert bool(verdict.causes) is named
    golden("\n".join([*(one.detail for one in verdict.causes), *verdict.undecided]), numbers=False)


def test_gradients_that_were_clipped_before_they_were_handed_back_are_told_so(whitebox_here: WhiteBox) -> None:
    def step(model: nn.Module, microbatches: Any) -> Any:
        return replace(clipping(model, microbatches), gradients=None)

    verdict = judged(whitebox_here, step, optimizer=plain)
    assert verdict.outcome == "fail"
    assert not verdict.causes, verdict
    golden("\n".join(verdict.undecided), numbers=False)


@pytest.mark.parametrize("by", [adam, plain], ids=["AdamW", "SGD"])
def test_a_right_update_of_clipped_gradients_passes(whitebox_here: WhiteBox, by: Any) -> None:
    verdict = judged(whitebox_here, partial(clipping, by=by), optimizer=by)
    assert verdict.outcome == "pass", verdict
    assert verdict.law("updated-parameters").checked == 4


def test_gradients_that_were_not_clipped_or_clipped_otherwise_are_told(whitebox_here: WhiteBox) -> None:
    def unclipped(model: nn.Module, microbatches: Any) -> Any:
        losses = trained(model, microbatches)
        plain(model).step()
        return StepResult(model, losses, max_norm=BOUND)

    for step, told in ((unclipped, "not clipped"), (partial(clipping, times=2), "clipped twice")):
        verdict = judged(whitebox_here, step, optimizer=plain)
        assert {one.law for one in verdict.mismatches} == {"updated-parameters"}
        assert [one.kind for one in verdict.causes] == ["clip"], verdict
        assert told in verdict.causes[0].detail


def test_updates_of_copies_in_a_wider_type_are_not_compared_and_that_is_said(whitebox_here: WhiteBox) -> None:
    def step(model: nn.Module, microbatches: Any) -> Any:
        return replace(alone(model, microbatches, rate=2 * RATE), masters=True)

    verdict = judged(whitebox_here, step)
    assert verdict.outcome == "pass", verdict
    law = verdict.law("updated-parameters")
    assert law.outcome == "not observed"
    golden(law.note)


@pytest.mark.parametrize(("momentum", "outcome"), [(0.0, "pass"), (0.9, "not observed")])
def test_an_optimizer_that_stepped_before_the_step_that_is_judged_is_not_compared(
    whitebox_here: WhiteBox, momentum: float, outcome: str
) -> None:
    def step(model: nn.Module, microbatches: Any) -> Any:
        optimizer = fresh(model)
        for one in model.parameters():
            nn.init.ones_(one)
        trained(model, microbatches)
        optimizer.step()
        optimizer.zero_grad()
        model.load_state_dict(build().state_dict())
        step_begins()
        losses = trained(model, microbatches)
        optimizer.step()
        return StepResult(model, losses)

    fresh = partial(sgd, rate=RATE, momentum=momentum)
    verdict = judged(whitebox_here, step, optimizer=fresh)
    assert verdict.outcome == "pass", verdict
    assert verdict.law("initial-weights").outcome == "pass"
    assert verdict.law("updated-parameters").outcome == outcome


@pytest.mark.sweep
def test_a_bound_of_clipping_that_is_no_number_is_said(whitebox: WhiteBox) -> None:
    def step(model: nn.Module, microbatches: Any) -> Any:
        return replace(alone(model, microbatches), max_norm="1.0")

    golden(judged(whitebox, step).details.splitlines()[0])

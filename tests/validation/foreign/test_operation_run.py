"""Right runs of several operations on other runtimes, and what is not compared where little is handed back."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pipeproof.core.contract import Contract
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import Verdict
from pipeproof.foreign import HandedBack, WhiteBox, watch
from tests.support.golden import golden
from tests.support.steps import WIDTH, loss_fn, pairs

STEPS = ["train", "train", "accumulate", "train", "eval", "train"]
Operations = Iterator[tuple[str, list[Any]]]


class ByMode(nn.Module):
    """As dropout, evaluation is another function; unlike it, training is the same each time."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(min=0) * 2 if self.training else x


def build() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(WIDTH, 12), ByMode(), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, WIDTH))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def run(
    model: nn.Module,
    operations: Operations,
    *,
    module: nn.Module | None = None,
    first: int = 1,
    watched: bool = False,
    clear_first: bool = False,
    made: Callable[[nn.Module, list[float]], Any] = lambda model, losses: (model, losses),
) -> Iterator[Any]:
    """Trains ``model`` on one rank, called as ``module``; ``first``: -1 for the last microbatch first.

    One that is ``watched`` is evaluated in inference mode.
    """
    evaluating = torch.inference_mode if watched else torch.no_grad
    module, optimizer, updated = (watch(model) if watched else module or model), adam(model), False
    for operation, microbatches in operations:
        module.train(operation != "eval")
        if clear_first and operation != "eval" and updated:
            optimizer.zero_grad()
        updated = operation == "train" or (updated and operation == "eval")
        apart = isinstance(module, DistributedDataParallel) and operation == "accumulate"
        losses = []
        for x, target in microbatches[::first]:
            with module.no_sync() if apart else nullcontext(), evaluating() if operation == "eval" else nullcontext():
                loss = loss_fn(module(x), target)
                if operation != "eval":
                    (loss / len(microbatches)).backward()
            losses.append(loss.item())
        if operation == "train":
            optimizer.step()
        yield made(model, losses[::first])
        if operation == "train" and not clear_first:
            optimizer.zero_grad()


def sharded(model: nn.Sequential, operations: Operations) -> Iterator[Any]:
    for layer in (model[0], model[4], model):
        fully_shard(layer)
    return run(model, operations)


def replicated(model: nn.Sequential, operations: Operations) -> Iterator[Any]:
    return run(model, operations, module=DistributedDataParallel(model))


def in_a_copy(model: nn.Sequential, operations: Operations, *, cut: int = 2) -> Iterator[Any]:
    """The modules are copies whose names say something else."""
    stages = [nn.Sequential(*copy.deepcopy(model[:cut])), nn.Sequential(*copy.deepcopy(model[cut:]))]
    whole = nn.Sequential(*map(watch, stages))
    return run(whole, operations, made=lambda model, losses: (list(model), losses))


def judged(whitebox: WhiteBox, step: Any, ranks: Any = 1, *, steps: Any = STEPS, **more: Any) -> Verdict:
    wanted = {"reference": build, "loss_fn": loss_fn, "optimizer": adam} | more
    return whitebox.validate(
        step, microbatches=pairs(4 * len(steps)), ranks=ranks, contract=Contract(operations=steps), **wanted
    )


RIGHT: dict[str, tuple[Any, Any]] = {
    "plain": (run, 1),
    "last microbatch first": (partial(run, first=-1), 1),
    "cleared before": (partial(run, clear_first=True), 1),
    "evaluated in inference mode, watched": (partial(run, watched=True), 1),
    "in a copy": (in_a_copy, 1),
    "replicated": (replicated, {"dp": 2}),
    "sharded": (sharded, {"fsdp": 2}),
}


@pytest.mark.parametrize("which", RIGHT)
def test_a_right_run_passes(whitebox: WhiteBox, which: str) -> None:
    step, ranks = RIGHT[which]
    verdict = judged(whitebox, step, ranks)
    assert verdict.verdict == "pass", verdict
    for law in ("second-step", "accumulation", "eval", "updated-parameters"):
        assert verdict.law(law).outcome == "pass", verdict


def test_without_an_optimizer_updates_are_not_compared_and_later_steps_are(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, run, optimizer=None, steps=["train", "train"])
    assert verdict.verdict == "pass", verdict
    assert verdict.law("second-step").outcome == "pass"
    law = verdict.law("updated-parameters")
    assert (law.outcome, law.reasons) == ("not seen", (Reason.OPTIMIZER,))


def without_losses_of_evaluations(model: nn.Module, operations: Operations, *, watched: bool) -> Iterator[Any]:
    names = []

    def noted() -> Operations:
        for name, microbatches in operations:
            names.append(name)
            yield name, microbatches

    for module, losses in run(model, noted(), watched=watched):
        yield module, None if names[-1] == "eval" else losses


@pytest.mark.parametrize("watched", [False, True])
def test_an_evaluation_that_reports_no_losses_is_not_known(whitebox: WhiteBox, watched: bool) -> None:
    """What it computed may be anything, though it left weights and gradients alone."""
    silent = partial(without_losses_of_evaluations, watched=watched)
    verdict = judged(whitebox, silent)
    assert verdict.verdict == "unknown", verdict
    law = verdict.law("eval")
    assert law.outcome == "unknown"
    assert law.reasons == (Reason.UNREPORTED,)


def named(model: nn.Module, losses: list[float]) -> Any:
    return {name: one.grad for name, one in model.named_parameters()}, losses


def test_with_gradients_alone_nothing_after_an_update_is_compared(whitebox: WhiteBox) -> None:
    steps = ["accumulate", "train", "train"]
    verdict = judged(whitebox, partial(run, made=named), optimizer=None, steps=steps)
    assert verdict.verdict == "pass", verdict
    assert verdict.law("accumulation").outcome == "pass"
    law = verdict.law("second-step")
    assert (law.outcome, law.reasons) == ("not seen", (Reason.UNREPORTED,))
    golden(law.note)


class Counting(nn.Module):
    """Goes by how often it was trained, which it keeps outside of its buffers."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x * (1 + self.calls / 8)


def counting() -> nn.Module:
    return nn.Sequential(build(), Counting())


def test_what_a_model_keeps_outside_of_buffers_goes_on(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, run, reference=counting)
    assert verdict.verdict == "pass", verdict


def test_modules_are_handed_back_once(whitebox: WhiteBox) -> None:
    def once(model: nn.Module, operations: Operations) -> Iterator[Any]:
        for number, (module, losses) in enumerate(run(model, operations)):
            yield HandedBack(() if number else module, losses)

    assert judged(whitebox, once).verdict == "pass"


def test_a_master_copy_of_the_weights_is_no_obstacle_to_a_second_step(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, partial(run, made=lambda model, losses: HandedBack(model, losses, masters=True)))
    assert verdict.verdict == "pass", verdict
    assert verdict.law("second-step").outcome == "pass"
    golden(verdict.law("updated-parameters").note)


def normed() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.Linear(12, WIDTH))


def apart(model: nn.Sequential, operations: Operations) -> Iterator[Any]:
    return run(model, operations, module=DistributedDataParallel(model, broadcast_buffers=False))


def test_replicas_with_running_statistics_of_their_own_are_no_fault(whitebox: WhiteBox) -> None:
    steps = ["eval", "train", "train", "eval"]
    verdict = judged(whitebox, apart, {"dp": 2}, reference=normed, steps=steps)
    assert verdict.verdict == "pass", verdict
    assert verdict.law("buffers").outcome == "not seen"
    assert verdict.law("second-step").outcome == "pass"
    assert verdict.law("eval").outcome == "pass", "the first was before any training"


def test_buffers_of_other_orders_and_of_unwatched_stages_are_not_compared(whitebox: WhiteBox) -> None:
    for step in (run, partial(run, first=-1, watched=True)):
        verdict = judged(whitebox, step, reference=normed, steps=["train", "train"])
        assert verdict.verdict == "pass", verdict
        law = verdict.law("buffers")
        assert law.outcome == "not seen"
        assert law.reasons == (Reason.UNREPORTED,)
    evaluated = judged(whitebox, partial(run, first=-1), reference=normed, steps=["train", "eval", "train"])
    assert evaluated.law("eval").outcome == "pass", "it begins with the averages that the rank has"
    verdict = judged(whitebox, partial(run, watched=True), reference=normed, steps=["train", "train"])
    assert (verdict.law("buffers").outcome, verdict.law("buffers").checked) == ("pass", 6)


class Bounded(nn.Module):
    """Refuses to run with a large weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.scale > 1e3:
            raise ValueError("the weight is too large")
        return x * self.scale


def bounded() -> nn.Module:
    return nn.Sequential(Bounded(), build())


def test_buffers_are_known_by_the_weights_beside_them(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, partial(in_a_copy, cut=1), reference=normed, steps=["train", "train"])
    assert verdict.verdict == "pass", verdict
    assert (verdict.law("buffers").outcome, verdict.law("buffers").checked) == ("pass", 6)


def test_what_the_reference_raises_after_a_fault_does_not_hide_it(whitebox: WhiteBox) -> None:
    def explodes(model: nn.Sequential, operations: Operations) -> Iterator[Any]:
        for made in run(model, operations):
            with torch.no_grad():
                model[0].scale.fill_(1e6)  # type: ignore[operator,union-attr]
            yield made
            with torch.no_grad():
                model[0].scale.fill_(1.0)  # type: ignore[operator,union-attr]

    verdict = judged(whitebox, explodes, reference=bounded, steps=["train", "train"])
    assert verdict.law("updated-parameters").outcome == "fail"
    assert [one.kind for one in verdict.cause] == ["update"]
    golden(judged(whitebox, explodes, reference=bounded, optimizer=None).details.splitlines()[0])

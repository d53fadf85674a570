"""Optimizers of all kinds in a step that is held against itself: none of them is blamed for what a copy cannot do."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipeproof.core.contract import Contract
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import Verdict
from pipeproof.records.step_check import check_step
from pipeproof.wings.composed.composed_step import Composed
from tests.support.pipeline_here import DATA, MSE, Job, Layer, layers

COUNT = 4  # parameters


class Boosted(SGD):
    """It has attributes of its own."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.boost, self.made = 2.0, self._boosted

    def _boosted(self, group: dict[str, Any], one: nn.Parameter) -> None:
        assert one.grad is not None
        one.data -= self.boost * group["lr"] * one.grad

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it gives no loss
        for group in self.param_groups:
            for one in group["params"]:
                self.made(group, one)


class Around(Optimizer):
    """It has another one inside, and makes no state of its own."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:  # type: ignore[override]  # it has none of its own
        return self.inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it gives no loss
        self.inner.step()


class Elsewhere(SGD):
    """It moves the weights by a function that knows them."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr=lr)

        def move() -> None:
            for one in parameters:
                assert one.grad is not None
                one.data -= lr * one.grad

        self.move = move

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it gives no loss
        self.move()


def scheduled(own: list[nn.Parameter]) -> Optimizer:
    found = Adam(own, lr=0.1)
    torch.optim.lr_scheduler.StepLR(found, 1)
    return found


def halved(optimizer: Optimizer, *_: object) -> None:
    for one in (one for group in optimizer.param_groups for one in group["params"]):
        one.grad.mul_(0.5)


def hooked(own: list[nn.Parameter]) -> Optimizer:
    found = SGD(own, lr=0.1)
    found.register_step_pre_hook(halved)
    return found


def clamped(optimizer: Optimizer, *_: object) -> None:
    for one in (one for group in optimizer.param_groups for one in group["params"]):
        one.data.clamp_(-0.1, 0.1)


def hooked_after(own: list[nn.Parameter]) -> Optimizer:
    found = SGD(own, lr=0.1)
    found.register_step_post_hook(clamped)
    return found


def hooked_inside(own: list[nn.Parameter]) -> Optimizer:
    return Around(hooked(own))


def replaced(own: list[nn.Parameter]) -> Optimizer:
    found = SGD(own, lr=0.1)
    step = found.step

    def twice() -> None:
        step()
        step()

    found.step = twice  # type: ignore[assignment, method-assign]  # as users do
    return found


def step_of(
    make: Callable[[list[nn.Parameter]], Optimizer],
    *,
    stages: list[nn.Module] | None = None,
    fault: float = 1.0,
    max_norm: float = math.inf,
    **more: Any,
) -> tuple[Verdict, list[Tensor]]:
    """The verdict on a step with an optimizer; and the weights before it, as they are when it begins."""
    stages = layers(torch.tanh, torch.sin) if stages is None else stages
    own = [one for stage in stages for one in stage.parameters()]
    optimizer = make(own)
    against = Composed(MSE, optimizer=optimizer, contract=Contract(max_norm=max_norm))
    with check_step(dict(enumerate(stages)), DATA, against=against, rename=lambda s, n: f"{s}.{n}") as check:
        Job(stages).step()
        check.gradients()
        kept = [one.detach().clone() for one in own]
        optimizer.step(**more)
        own[0].data *= fault
    return check.verdict, kept


KNOWN: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "attributes of its own": lambda own: Boosted(own, lr=0.1),
    "another one inside": lambda own: Around(Boosted(own, lr=0.1)),
    "a schedule of its learning rate": scheduled,
}


@pytest.mark.parametrize("case", KNOWN)
def test_what_an_optimizer_makes_of_gradients_is_known(case: str) -> None:
    verdict, _ = step_of(KNOWN[case])
    assert (verdict.verdict, verdict.law("updated-parameters").checked) == ("pass", COUNT), str(verdict)
    verdict, _ = step_of(KNOWN[case], fault=2.0)
    assert [law.name for law in verdict.laws if law.outcome == "fail"] == ["updated-parameters"], str(verdict)


UNKNOWN: dict[str, tuple[Callable[[list[nn.Parameter]], Optimizer], str]] = {
    "hooks before": (hooked, "what SGD makes of gradients is not known: it has hooks around its step"),
    "hooks after": (hooked_after, "what SGD makes of gradients is not known: it has hooks around its step"),
    "hooks inside": (hooked_inside, "what Around makes of gradients is not known: it has hooks around its step"),
    "another step": (replaced, "its step was replaced by another function"),
    "weights that it knows": (lambda own: Elsewhere(own, 0.1), "a copy of Elsewhere moved the weights themselves"),
}


def assert_said_of_the_update_alone(verdict: Verdict, sentence: str) -> None:
    laws = {law.name: law for law in verdict.laws}
    assert verdict.verdict == "unknown", str(verdict)
    assert [name for name, law in laws.items() if law.outcome == "unknown"] == ["updated-parameters"], str(verdict)
    assert sentence in laws["updated-parameters"].note
    assert laws["gradient"].checked == COUNT


@pytest.mark.parametrize("case", UNKNOWN)
def test_an_optimizer_that_no_copy_stands_for_is_not_blamed(case: str) -> None:
    make, sentence = UNKNOWN[case]
    (verdict, kept), (_, plain) = step_of(make), step_of(lambda own: SGD(own, lr=0.1))
    assert_said_of_the_update_alone(verdict, sentence)
    assert all(torch.equal(*pair) for pair in zip(kept, plain, strict=True)), "the check moves no weights"


def test_a_step_that_wants_a_closure_loses_no_other_link() -> None:
    verdict, _ = step_of(lambda own: torch.optim.LBFGS(own, lr=0.1), closure=lambda: torch.zeros(()))
    assert_said_of_the_update_alone(verdict, "a copy of LBFGS cannot take its step: it raised TypeError")


def test_hooks_of_all_optimizers_are_hooks_too() -> None:
    hook = register_optimizer_step_pre_hook(halved)
    try:
        verdict, _ = step_of(lambda own: SGD(own, lr=0.1))
    finally:
        hook.remove()
    assert_said_of_the_update_alone(verdict, "it has hooks around its step")


class Counted(Layer):
    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Any:
        return super().forward(x) * self.calls


def test_an_optimizer_that_was_given_is_not_asked_for() -> None:
    stages = [*layers(torch.tanh), Counted()]
    verdict, _ = step_of(lambda own: SGD(own, lr=0.1), stages=stages, max_norm=0.1)
    law = verdict.law("updated-parameters")
    assert (law.outcome, law.reasons) == ("unknown", (Reason.LINK,)), str(verdict)

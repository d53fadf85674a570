"""What optimizers of all kinds make of weights and master copies: none is blamed for what a copy cannot do."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipeproof.core.cause import Cause
from pipeproof.core.contract import Contract
from pipeproof.core.ledger import Ledger
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import Verdict
from pipeproof.records.rank_part import RankStages
from pipeproof.wings.composed.update import WeightsAfter
from tests.support.pipeline_here import Counted, Job, checked, layers

COUNT = 4  # parameters
HOOKED = "makes of gradients is not known: its step has hooks, or was replaced by another function"


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


def hooked(own: list[nn.Parameter], *, after: bool = False) -> Optimizer:
    found = SGD(own, lr=0.1)
    (found.register_step_post_hook if after else found.register_step_pre_hook)(halved)
    return found


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
    stages, kept = layers(torch.tanh, torch.sin) if stages is None else stages, list[Tensor]()
    own = [one for stage in stages for one in stage.parameters()]
    optimizer = make(own)

    def then() -> None:
        kept.extend(one.detach().clone() for one in own)
        optimizer.step(**more)
        own[0].data *= fault

    return checked(Job(stages), then=then, optimizer=optimizer, contract=Contract(max_norm=max_norm)), kept


KNOWN: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "attributes of its own": lambda own: Boosted(own, lr=0.1),
    "another one inside": lambda own: Around(Boosted(own, lr=0.1)),
    "a schedule of its learning rate": scheduled,
}


@pytest.mark.parametrize("case", KNOWN)
def test_what_an_optimizer_makes_of_gradients_is_known(case: str) -> None:
    verdict, _ = step_of(KNOWN[case])
    assert (verdict.outcome, verdict.law("updated-parameters").checked) == ("pass", COUNT), str(verdict)
    verdict, _ = step_of(KNOWN[case], fault=2.0)
    assert [law.name for law in verdict.laws if law.outcome == "fail"] == ["updated-parameters"], str(verdict)


UNKNOWN: dict[str, tuple[Callable[[list[nn.Parameter]], Optimizer], str]] = {
    "hooks before": (hooked, f"what SGD {HOOKED}"),
    "hooks after": (partial(hooked, after=True), f"what SGD {HOOKED}"),
    "hooks inside": (lambda own: Around(hooked(own)), f"what Around {HOOKED}"),
    "hooks of all": (lambda own: SGD(own, lr=0.1), HOOKED),
    "another step": (replaced, f"what SGD {HOOKED}"),
    "weights that it knows": (lambda own: Elsewhere(own, 0.1), "its copy moved the weights themselves"),
    "a closure": (
        lambda own: torch.optim.LBFGS(own, lr=0.1),
        "a copy of LBFGS cannot take its step: it raised TypeErr",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_an_optimizer_without_a_copy_is_not_blamed(case: str) -> None:
    make, sentence = UNKNOWN[case]
    hook = register_optimizer_step_pre_hook(halved) if case == "hooks of all" else None
    try:
        verdict, kept = step_of(make, **({"closure": lambda: torch.zeros(())} if case == "a closure" else {}))
    finally:
        if hook is not None:
            hook.remove()
    laws = {law.name: law for law in verdict.laws}
    assert [name for name, law in laws.items() if law.outcome == "unknown"] == ["updated-parameters"], str(verdict)
    assert sentence in laws["updated-parameters"].note
    assert (verdict.outcome, laws["gradient"].checked) == ("unknown", COUNT)
    _, plain = step_of(lambda own: SGD(own, lr=0.1))
    assert all(torch.equal(*pair) for pair in zip(kept, plain, strict=True)), "the check moves no weights"


def test_a_given_optimizer_is_not_asked_for() -> None:
    stages = [*layers(torch.tanh), Counted()]
    verdict, _ = step_of(lambda own: SGD(own, lr=0.1), stages=stages, max_norm=0.1)
    law = verdict.law("updated-parameters")
    assert (law.outcome, law.reasons) == ("unknown", (Reason.LINK,)), str(verdict)


def several(told: str, harm: int | None) -> Verdict:
    """One step of two stages of three layers, the last of them frozen; two optimizers take a step.

    ``told``: the optimizers that the check is given; ``harm``: the layer whose weights are changed besides.
    """
    torch.manual_seed(0)
    stages = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))) for _ in range(2)]
    first, second, third = (nn.ModuleList(stage[k] for stage in stages) for k in range(3))
    third.requires_grad_(False)
    both = [SGD(first.parameters(), lr=0.1), torch.optim.AdamW(second.parameters(), lr=0.1)]

    def then() -> None:
        for one in both:
            one.step()
        for stage in stages if harm is not None else ():
            stage[harm].weight.data.mul_(0.5)

    return checked(Job(stages), then=then, optimizer={"both": both, "first": both[0]}[told])


SEVERAL: dict[str, tuple[str, int | None, str, list[str]]] = {  # which are told, what is harmed, outcome, and of what
    "both": ("both", None, "pass", []),
    "one moves otherwise": ("both", 1, "fail", ["0.1.weight", "1.1.weight"]),
    "one is not told": ("first", None, "unknown", ["0.1.bias", "0.1.weight", "1.1.bias", "1.1.weight"]),
    "what is frozen moves": ("both", 2, "unknown", ["0.2.weight", "1.2.weight"]),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_what_several_optimizers_hold_is_compared(name: str) -> None:
    told, harm, outcome, those = SEVERAL[name]
    verdict = several(told, harm)
    law = verdict.law("updated-parameters")
    assert law.outcome == outcome, str(verdict)
    assert sorted({*law.left_out, *(str(one.parameter) for one in verdict.mismatches)}) == those
    assert law.reasons == ((Reason.OPTIMIZER,) if outcome == "unknown" else ())
    assert law.checked == 8 or outcome != "pass"


def masters(change: Callable[[nn.Linear, dict[str, Tensor]], None], *, early: bool) -> tuple[list[Any], list[Cause]]:
    """What is said of a stage and the copies of its weights, after a ``change`` before the step or in it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Linear(3, 3).bfloat16()
    copies = {name: one.detach().float() * (1 + 2**-12) for name, one in module.named_parameters()}
    ledger = Ledger(["updated-parameters"])
    if early:
        change(module, copies)
    weights = dict(module.named_parameters())
    at = WeightsAfter(RankStages({1: module}, "{}.{}".format), ledger, {weights[name]: copies[name] for name in copies})
    with torch.no_grad():
        if early:
            module.bias.copy_(copies["bias"])  # once it is copied back, nobody sees it
        else:
            change(module, copies)
    at.give_up("it steps elsewhere")
    at.enter({}, rank=2)
    return [(one.parameter, one.observed_text) for one in ledger.mismatches], at.causes


def moved(module: nn.Linear, copies: dict[str, Tensor]) -> None:
    for one in copies.values():
        one.mul_(1.5)


def one_copied(module: nn.Linear, copies: dict[str, Tensor]) -> None:
    moved(module, copies)
    module.weight.copy_(copies["weight"])


def one_otherwise(module: nn.Linear, copies: dict[str, Tensor]) -> None:
    one_copied(module, copies)
    module.bias.mul_(3.0)


def bias_off(module: nn.Linear, copies: dict[str, Tensor]) -> None:
    copies["bias"] += 1.0


WEIGHT, BIAS = "1.weight", "1.bias"
STILL = "as before the step, while the master copy moved"
COPIES: dict[str, tuple[Any, bool, list[Any], str | None, str]] = {
    "not copied back": (moved, False, [(WEIGHT, "after the step"), (BIAS, "after the step")], None, STILL),
    "one not copied back": (one_copied, False, [(BIAS, "after the step")], BIAS, STILL),
    "one moved": (one_otherwise, False, [(BIAS, "after the step")], BIAS, "after the step, not the master copy"),
    "of others": (bias_off, True, [(BIAS, "when the step began")], BIAS, "as the step began, not the master copy"),
}


@pytest.mark.parametrize("case", COPIES)
def test_a_weight_is_its_master_copy(case: str) -> None:
    change, early, wrong, parameter, told = COPIES[case]
    mismatches, (cause,) = masters(change, early=early)
    assert mismatches == [(name, f"another {when}") for name, when in wrong]
    assert (cause.kind, cause.rank, cause.stage, cause.parameter) == ("update", 2, 1, parameter)
    assert cause.detail.removeprefix("1.weight, 1.bias: ").startswith(told)


def test_a_copy_may_have_more_digits() -> None:
    assert masters(lambda *_: None, early=False) == ([], [])

"""Runs of several operations that are not ours: right ones pass, and what goes wrong between operations is caught."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import StepResult, watch
from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden
from tests.support.steps import WIDTH, loss_fn, pairs
from tests.support.sweeps import sampled

RATE, BOUND = 0.1, 0.05
STEPS = ["train", "train", "eval", "accumulate", "train", "eval"]
MICROBATCHES = 3


def build() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(4)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def forward(stage: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """What came in, and what goes out, of a microbatch on this rank of two."""
    if dist.get_rank():
        x = torch.empty_like(x)
        dist.recv(x, 0)
        x.requires_grad_()
    return x, stage(x)


class Run:
    """Training on two ranks, microbatch by microbatch; what a test overrides is its fault."""

    steps = STEPS

    def __init__(self, model: nn.Sequential) -> None:
        self.rank = dist.get_rank()
        self.stage = watch(model[2 * self.rank :][:2])
        self.used: nn.Module = self.stage
        self.optimizer = sgd(self.stage)
        self.number = 0

    def train(self, microbatches: list[Any]) -> list[float]:
        losses = []
        self.stage.train()
        for x, target in microbatches:
            x, y = forward(self.used, x)
            if self.rank == 0:
                dist.send(y.detach(), 1)
                gradient = torch.empty_like(y)
                dist.recv(gradient, 1)
                y.backward(gradient)
            else:
                loss = loss_fn(y, target)
                (loss / len(microbatches)).backward()
                dist.send(x.grad, 0)
                losses.append(loss.item())
        return losses

    @torch.no_grad()
    def evaluate(self, microbatches: list[Any]) -> list[float]:
        losses = []
        self.stage.eval()
        for x, target in microbatches:
            _, y = forward(self.used, x)
            if self.rank == 0:
                dist.send(y, 1)
            else:
                losses.append(loss_fn(y, target).item())
        return losses

    def update(self) -> None:
        self.optimizer.step()

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def made(self, losses: list[float]) -> Any:
        return self.stage, losses

    def through(self, operations: Iterator[tuple[str, list[Any]]]) -> Iterator[Any]:
        for operation, microbatches in operations:
            losses = self.evaluate(microbatches) if operation == "eval" else self.train(microbatches)
            if operation == "train":
                self.update()
            yield self.made(losses)
            if operation == "train":
                self.clear()
            self.number += 1


def judged(whitebox: WhiteBox, kind: type[Run], **more: Any) -> Verdict:
    steps = more.pop("steps", kind.steps)
    wanted = {"reference": build, "ranks": 2, "loss_fn": loss_fn, "optimizer": sgd} | more
    wanted["contract"] = Contract(operations=steps)
    step = lambda model, operations: kind(model).through(operations)  # noqa: E731
    return whitebox.validate(step, microbatches=pairs(MICROBATCHES * len(steps)), **wanted)


class EvaluatesUnseen(Run):
    """Evaluation calls no stage as a module, so that nobody sees it."""

    def evaluate(self, microbatches: list[Any]) -> list[float]:
        self.used = self.stage.forward  # type: ignore[assignment]
        losses = super().evaluate(microbatches)
        self.used = self.stage
        return losses


class KeepsOldWeights(Run):
    """The last rank goes on with the weights that it began with."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__(model)
        self.old = {name: one.clone() for name, one in self.stage.state_dict().items()}

    def clear(self) -> None:
        super().clear()
        if self.rank:
            self.stage.load_state_dict(self.old)


class RunsOnACopy(Run):
    """The last rank's forwards run on a copy, which no update reaches."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__(model)
        if self.rank:
            self.used = watch(copy.deepcopy(self.stage))

    def train(self, microbatches: list[Any]) -> list[float]:
        losses = super().train(microbatches)
        if self.rank:
            for own, other in zip(self.stage.parameters(), self.used.parameters(), strict=True):
                own.grad, other.grad = other.grad, None
            for own, other in zip(self.stage.buffers(), self.used.buffers(), strict=True):
                own.copy_(other)
        return losses


class NeverClears(Run):
    def clear(self) -> None:
        if not self.rank:
            super().clear()


class ClearsBetween(Run):
    """Gradients are cleared before every operation, so that an update lacks what was accumulated."""

    def train(self, microbatches: list[Any]) -> list[float]:
        if self.rank:
            self.optimizer.zero_grad()
        return super().train(microbatches)


class EvaluatesInTraining(Run):
    def evaluate(self, microbatches: list[Any]) -> list[float]:
        self.stage.eval()
        if self.rank:
            self.stage.eval = lambda: self.stage  # type: ignore[method-assign]
            self.stage.train()
        return super().evaluate(microbatches)


class EvaluationTrains(Run):
    """An evaluation runs backwards, too."""

    def evaluate(self, microbatches: list[Any]) -> list[float]:
        self.stage.eval()
        self.stage.train = lambda: self.stage  # type: ignore[method-assign,misc,assignment]
        losses = self.train(microbatches)
        del self.stage.train
        return losses


class EvaluationUpdates(Run):
    def evaluate(self, microbatches: list[Any]) -> list[float]:
        losses = super().evaluate(microbatches)
        if self.rank:
            with torch.no_grad():
                next(self.stage.parameters()).mul_(1.01)
        return losses


class AccumulationUpdates(Run):
    """An accumulation updates, too."""

    def train(self, microbatches: list[Any]) -> list[float]:
        losses = super().train(microbatches)
        if self.rank and self.number == 3:
            super().update()
        return losses


class KeepsItsData(Run):
    """The first rank feeds the microbatches that it was given first."""

    def train(self, microbatches: list[Any]) -> list[float]:
        self.given = getattr(self, "given", microbatches)
        return super().train(microbatches if self.rank else self.given)


class LosesBuffers(Run):
    """What forwards leave in buffers of the last rank is left in copies of them."""

    def train(self, microbatches: list[Any]) -> list[float]:
        kept = {name: one.clone() for name, one in self.stage.named_buffers()}
        losses = super().train(microbatches)
        for name, one in self.stage.named_buffers() if self.rank else ():
            one.copy_(kept[name])
        return losses


class UpdatesOthers(Run):
    """The optimizer holds the parameters of before the stage was copied."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__(model)
        if self.rank:
            self.optimizer = sgd(copy.deepcopy(self.stage))

    def clear(self) -> None:
        self.stage.zero_grad()


class ForgetsMomentum(Run):
    def update(self) -> None:
        if self.rank:
            self.optimizer = sgd(self.stage)
        super().update()


class Clips(Run):
    """Gradients are clipped to a bound by their norm on all ranks; ``alone``: by that on each rank."""

    alone = False

    def update(self) -> None:
        self.unclipped = {one: None if one.grad is None else one.grad.clone() for one in self.stage.parameters()}
        squares = torch.stack([one.grad.square().sum() for one in self.stage.parameters() if one.grad is not None])
        size = squares.double().sum()
        if not self.alone:
            dist.all_reduce(size)
        nn.utils.clip_grads_with_norm_(self.stage.parameters(), BOUND, size.sqrt())
        super().update()

    def made(self, losses: list[float]) -> Any:
        return StepResult(self.stage, losses, gradients=self.unclipped, max_norm=BOUND)


class ClipsAlone(Clips):
    alone = True


class LosesTheLast(Run):
    """The last rank does not keep what the last microbatch gives in the operation that is ``lossy``."""

    lossy = 0

    def train(self, microbatches: list[Any]) -> list[float]:
        if self.rank != 1 or self.number != self.lossy:
            return super().train(microbatches)
        left = dict.fromkeys(self.stage.parameters(), len(microbatches))
        kept: dict[nn.Parameter, Tensor | None] = {}

        def added(one: nn.Parameter) -> None:
            left[one] -= 1
            kept.update({one: one.grad.clone()} if left[one] == 1 and one.grad is not None else {})

        hooks = [one.register_post_accumulate_grad_hook(added) for one in self.stage.parameters()]
        losses = super().train(microbatches)
        for hook, one in zip(hooks, self.stage.parameters(), strict=True):
            hook.remove()
            one.grad = kept[one]
        return losses


class LosesTheLastOfAnAccumulation(LosesTheLast):
    lossy = 3


class ChangesBetween(Run):
    """The first rank's weights are changed after an accumulation was handed back."""

    def through(self, operations: Iterator[tuple[str, list[Any]]]) -> Iterator[Any]:
        for made in super().through(operations):
            yield made
            for one in () if self.rank or self.number else self.stage.parameters():
                one.data.mul_(1.01)


class DividesAnAccumulation(Run):
    """An accumulation divides each loss twice as much as it should."""

    def train(self, microbatches: list[Any]) -> list[float]:
        losses = super().train(microbatches)
        for one in self.stage.parameters() if self.number == 3 else ():
            one.grad = None if one.grad is None else one.grad / 2
        return losses


# A right run, its operations if they are others, and a law whose note is golden.
RIGHT: dict[str, tuple[type[Run], list[str], str]] = {
    "all": (Run, STEPS, ""),
    "an evaluation that is not observed": (EvaluatesUnseen, ["train", "eval", "train"], "microbatches"),
    "clipped by the norm of all": (Clips, ["train", "train"], ""),
    "an evaluation first": (Run, ["eval", "train"], ""),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_run_passes(whitebox: WhiteBox, name: str) -> None:
    kind, steps, law = RIGHT[name]
    verdict = judged(whitebox, kind, steps=steps)
    assert verdict.outcome == "pass", verdict
    if name == "all":
        assert verdict.tier == "bitwise"
        laws = ("second-step", "accumulation", "eval", "buffers", "updated-parameters", "microbatches", "boundaries")
        assert {verdict.law(each).outcome for each in laws} == {"pass"}, verdict
    if law:
        golden(verdict.law(law).note)


@dataclass(frozen=True)
class Fault:
    """What goes wrong in a run: the law about its operation, all that are broken, where, and the kind of its cause.

    at: the operation, what it does, rank and stage. told: its text is golden.
    """

    kind: type[Run]
    law: str
    broken: set[str]
    at: tuple[int, str, int, int | None]
    cause: str
    steps: list[str] = field(default_factory=lambda: STEPS)
    told: bool = False


FAULTS = [
    Fault(KeepsOldWeights, "second-step", {"initial-weights"}, (2, "train", 1, 1), "stale-tensor"),
    Fault(RunsOnACopy, "second-step", {"loss", "gradient"}, (2, "train", 1, 1), "stale-tensor"),
    Fault(NeverClears, "second-step", {"gradient"}, (2, "train", 1, 1), "stale-gradient"),
    Fault(ClearsBetween, "accumulation", {"gradient"}, (5, "train", 1, 1), "dropped"),
    Fault(EvaluatesInTraining, "eval", {"microbatches", "loss", "buffers"}, (3, "eval", 1, 1), "mode"),
    Fault(EvaluationTrains, "eval", {"presence"}, (3, "eval", 0, 0), "unexpected"),
    Fault(EvaluationUpdates, "eval", {"updated-parameters"}, (3, "eval", 1, 1), "update"),
    Fault(AccumulationUpdates, "accumulation", {"updated-parameters"}, (4, "accumulate", 1, 1), "update"),
    Fault(KeepsItsData, "second-step", {"loss", "buffers", "gradient"}, (2, "train", 0, 0), "stale-tensor"),
    Fault(LosesBuffers, "buffers", {"buffers"}, (1, "train", 1, 1), "buffers"),
    Fault(UpdatesOthers, "updated-parameters", {"updated-parameters"}, (1, "train", 1, 1), "update"),
    Fault(ForgetsMomentum, "second-step", {"updated-parameters"}, (2, "train", 1, 1), "update"),
    Fault(ClipsAlone, "updated-parameters", {"updated-parameters"}, (1, "train", 0, 0), "clip"),
]
EVAL_FIRST, TWO = ["eval", "train"], ["accumulate", "train"]
# In every change, beside those that are sampled.
ALWAYS = [
    Fault(EvaluatesInTraining, "eval", {"microbatches", "loss", "buffers"}, (1, "eval", 1, 1), "mode", EVAL_FIRST),
    Fault(LosesTheLast, "gradient", {"gradient"}, (1, "train", 1, 1), "dropped"),
    Fault(LosesTheLastOfAnAccumulation, "accumulation", {"gradient"}, (5, "train", 1, 1), "dropped"),
    Fault(ChangesBetween, "accumulation", {"initial-weights"}, (2, "train", 0, 0), "altered", TWO, told=True),
    Fault(DividesAnAccumulation, "accumulation", {"gradient"}, (5, "train", 1, 1), "scale", told=True),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", [*sampled(FAULTS, 2), *ALWAYS], ids=lambda fault: fault.kind.__name__)
def test_what_goes_wrong_is_named_and_placed(whitebox: WhiteBox, fault: Fault) -> None:
    verdict = judged(whitebox, fault.kind, steps=fault.steps)
    first = verdict.mismatches[0]
    assert verdict.outcome == "fail"
    assert verdict.law(fault.law).outcome == "fail"
    assert {one.law for one in verdict.mismatches} == fault.broken, verdict
    assert (first.operation, first.doing, first.rank, first.stage) == fault.at, verdict
    (cause,) = verdict.causes
    assert cause.kind == fault.cause, verdict
    assert ("operation {}, {}".format(*fault.at) in verdict.details) == (first.operation > 1 or first.doing == "eval")
    if issubclass(fault.kind, LosesTheLast):
        assert (cause.rank, cause.microbatches) == (1, (MICROBATCHES - 1,))
        assert not any("zero_grad" in one.line.text for one in cause.lines), "it is cleared once it was used"
        assert cause.earlier == (fault.kind is LosesTheLastOfAnAccumulation)
    if fault.kind is ChangesBetween:
        assert (cause.rank, cause.stage) == (0, 0)
    if fault.kind is DividesAnAccumulation:
        assert (cause.factor, cause.earlier) == (0.5, 1)
    if fault.told:
        golden(cause.detail)

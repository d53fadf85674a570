"""Right runs of several operations on other runtimes, and what is not compared where little is handed back."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pipeproof import StepResult, watch
from pipeproof.core.contract import Contract
from pipeproof.core.reason import Reason
from pipeproof.core.replicas import ReplicasError
from pipeproof.core.verdict import Verdict
from pipeproof.reference.accumulation import Accumulation
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden
from tests.support.steps import WIDTH, adam, blocks, loss_fn, pairs, sgd

STEPS = ["train", "train", "accumulate", "train", "eval", "train"]
Operations = Iterator[tuple[str, list[Any]]]


class ByMode(nn.Module):
    """As dropout, evaluation is another function; unlike it, training is the same each time."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(min=0) * 2 if self.training else x


def build() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(WIDTH, 12), ByMode(), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, WIDTH))


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


def replicated(model: nn.Sequential, operations: Operations, **options: Any) -> Iterator[Any]:
    return run(model, operations, module=DistributedDataParallel(model, **options))


def in_a_copy(model: nn.Sequential, operations: Operations, *, cut: int = 2) -> Iterator[Any]:
    """The modules are copies whose names say something else."""
    stages = [nn.Sequential(*copy.deepcopy(model[:cut])), nn.Sequential(*copy.deepcopy(model[cut:]))]
    whole = nn.Sequential(*map(watch, stages))
    return run(whole, operations, made=lambda model, losses: (list(model), losses))


def once(model: nn.Module, operations: Operations) -> Iterator[Any]:
    """Modules are handed back once."""
    for number, (module, losses) in enumerate(run(model, operations)):
        yield StepResult(() if number else module, losses)


def named(model: nn.Module, losses: list[float]) -> Any:
    return {name: one.grad for name, one in model.named_parameters()}, losses


def with_masters(model: nn.Module, losses: list[float]) -> StepResult:
    return StepResult(model, losses, masters=True)


class Counting(nn.Module):
    """Goes by how often it was trained, which it keeps outside of its buffers."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x * (1 + self.calls / 8)


def counting() -> nn.Module:
    return nn.Sequential(build(), Counting())


def normed() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.Linear(12, WIDTH))


def judged(whitebox: WhiteBox, step: Any, ranks: Any = 1, *, steps: Any = STEPS, **more: Any) -> Verdict:
    wanted = {"reference": build, "loss_fn": loss_fn, "optimizer": adam} | more
    return whitebox.validate(
        step, microbatches=pairs(4 * len(steps)), ranks=ranks, contract=Contract(operations=steps), **wanted
    )


@dataclass(frozen=True)
class Right:
    """A right run, on what ranks, beside what; the outcome of laws that it shows, and a law whose note is golden."""

    step: Any
    ranks: Any = 1
    reference: Any = build
    optimizer: Any = adam
    steps: tuple[str, ...] = tuple(STEPS)
    laws: tuple[tuple[str, str], ...] = tuple((law, "pass") for law in ("second-step", "accumulation", "eval"))
    told: str = ""


TWICE = ("train", "train")
AVERAGED = partial(Right, reference=normed, steps=TWICE)
OWN_BUFFERS = (("buffers", "not observed"), ("second-step", "pass"), ("eval", "pass"))
NAMED = (("accumulation", "pass"), ("second-step", "not observed"))
RIGHT = {
    "plain": Right(run),
    "last microbatch first": Right(partial(run, first=-1)),
    "cleared before": Right(partial(run, clear_first=True)),
    "evaluated in inference mode, watched": Right(partial(run, watched=True)),
    "in a copy": Right(in_a_copy),
    "replicated": Right(replicated, {"dp": 2}),
    "sharded": Right(sharded, {"fsdp": 2}),
    "handed back once": Right(once),
    "counted outside of buffers": Right(run, reference=counting),
    "masters": Right(partial(run, made=with_masters), laws=(("second-step", "pass"),), told="updated-parameters"),
    "no optimizer": Right(run, optimizer=None, steps=TWICE, laws=(("second-step", "pass"),), told="updated-parameters"),
    "gradients by name": Right(
        partial(run, made=named), 1, build, None, ("accumulate", "train", "train"), NAMED, "second-step"
    ),
    "averages of each replica": Right(
        partial(replicated, broadcast_buffers=False),
        {"dp": 2},
        normed,
        steps=("eval", "train", "train", "eval"),
        laws=OWN_BUFFERS,
    ),
    "averages, unwatched": AVERAGED(run, laws=(("buffers", "not observed"),), told="buffers"),
    "averages, last first": AVERAGED(partial(run, first=-1, watched=True), laws=(("buffers", "not observed"),)),
    "averages, evaluated": Right(
        partial(run, first=-1), reference=normed, steps=("train", "eval", "train"), laws=(("eval", "pass"),)
    ),
    "averages, watched": AVERAGED(partial(run, watched=True), laws=(("buffers", "pass"),)),
    "averages in a copy": AVERAGED(partial(in_a_copy, cut=1), laws=(("buffers", "pass"),)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_run_passes(whitebox: WhiteBox, name: str) -> None:
    one = RIGHT[name]
    more = {"reference": one.reference, "optimizer": one.optimizer}
    verdict = judged(whitebox, one.step, one.ranks, steps=[*one.steps], **more)
    assert verdict.outcome == "pass", verdict
    assert [(law, verdict.law(law).outcome) for law, _ in one.laws] == [*one.laws], verdict
    updates = verdict.law("updated-parameters")
    assert updates.outcome == ("not observed" if one.optimizer is None else "pass")
    assert one.optimizer is not None or updates.reasons == (Reason.OPTIMIZER,)
    if ("buffers", "pass") in one.laws:
        assert verdict.law("buffers").checked == 6
    unseen = [law for law, outcome in one.laws if outcome == "not observed" and one.ranks == 1]
    assert {verdict.law(law).reasons for law in unseen} <= {(Reason.UNREPORTED,)}
    if one.told:
        golden(verdict.law(one.told).note)


def without_losses_of_evaluations(model: nn.Module, operations: Operations, *, watched: bool) -> Iterator[Any]:
    names = []

    def noted() -> Operations:
        for name, microbatches in operations:
            names.append(name)
            yield name, microbatches

    for module, losses in run(model, noted(), watched=watched):
        yield module, None if names[-1] == "eval" else losses


@pytest.mark.parametrize("watched", [False, True])
def test_an_evaluation_without_losses_is_not_known(whitebox_here: WhiteBox, watched: bool) -> None:
    """What it computed may be anything, though it left weights and gradients alone."""
    verdict = judged(whitebox_here, partial(without_losses_of_evaluations, watched=watched))
    law = verdict.law("eval")
    assert (verdict.outcome, law.outcome, law.reasons) == ("unknown", "unknown", (Reason.UNREPORTED,)), verdict


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


def explodes(model: nn.Sequential, operations: Operations) -> Iterator[Any]:
    for made in run(model, operations):
        with torch.no_grad():
            model[0].scale.fill_(1e6)  # type: ignore[operator,union-attr]
        yield made
        with torch.no_grad():
            model[0].scale.fill_(1.0)  # type: ignore[operator,union-attr]


def test_what_the_reference_raises_hides_no_fault(whitebox_here: WhiteBox) -> None:
    verdict = judged(whitebox_here, explodes, reference=bounded, steps=["train", "train"])
    assert verdict.law("updated-parameters").outcome == "fail"
    assert [one.kind for one in verdict.causes] == ["update"]
    golden(judged(whitebox_here, explodes, reference=bounded, optimizer=None).details.splitlines()[0])


# Operations with different numbers of microbatches.

UNEVEN = [("train", 4), ("accumulate", 2), ("train", 6), ("eval", 2)]


@dataclass(frozen=True)
class Course:
    """Trains a replica through all operations; ``fault``, in operation ``at``, from 0, is one of those below."""

    fault: str = ""
    at: int = 0
    watched: bool = False
    adds: Accumulation | None = None

    def __call__(self, model: nn.Module, operations: Operations) -> Iterator[Any]:
        stage, optimizer = watch(model) if self.watched else model, sgd(model)
        for number, (name, microbatches) in enumerate(operations):
            fault, losses = self.fault if number == self.at else "", []
            stage.train(name != "eval")
            for m, (x, target) in enumerate(microbatches):
                with torch.set_grad_enabled(name != "eval"):
                    losses.append(loss_fn(stage(x), target))
                if name != "eval" and (fault, m) != ("last left out", len(microbatches) - 1):
                    (losses[-1] / (4 if fault == "divided by 4" else len(microbatches))).backward()
            if name == "train":
                for one in (parameter.grad for parameter in model.parameters()):
                    dist.all_reduce(one)
                    one /= dist.get_world_size()
                optimizer.step()
            yield StepResult(stage, losses, accumulation=self.adds)
            if name == "train" and fault != "not cleared":
                optimizer.zero_grad()


def course(whitebox: WhiteBox, step: Course, ranks: Any = 1) -> Verdict:
    contract, count = Contract(operations=UNEVEN), sum(each for _, each in UNEVEN)
    given = {"reference": partial(blocks, 2), "microbatches": pairs(count), "loss_fn": loss_fn, "optimizer": sgd}
    return whitebox.validate(step, ranks=ranks, contract=contract, **given)


# A course, on how many ranks; operation, kind, microbatches and factor of its cause.
UNEVENLY: list[tuple[Course, Any, tuple[int, str, tuple[int, ...], float | None] | None]] = [
    (Course(), 1, None),
    (Course(watched=True), {"dp": 2}, None),
    (Course(adds=Accumulation(torch.float32)), {"dp": 2}, None),
    (Course("last left out", 0), 1, (1, "dropped", (3,), None)),
    (Course("last left out", 1), 1, (3, "dropped", (1,), None)),
    (Course("last left out", 1, watched=True), 1, (2, "dropped", (1,), None)),
    (Course("last left out", 2), 1, (3, "dropped", (5,), None)),
    (Course("last left out", 2, watched=True), 1, (3, "dropped", (5,), None)),
    (Course("divided by 4", 1), 1, (3, "scale", (), 0.5)),
    (Course("divided by 4", 2), 1, (3, "scale", (), 1.5)),
    (Course("not cleared", 0), 1, (3, "stale-gradient", (), 1.0)),
]


@pytest.mark.parametrize(("step", "ranks", "wrong"), UNEVENLY)
def test_operations_have_microbatches_of_their_own(whitebox: WhiteBox, step: Course, ranks: Any, wrong: Any) -> None:
    verdict = course(whitebox, step, ranks)
    if wrong is None:
        assert verdict.outcome == "pass", verdict
        assert {verdict.law(law).outcome for law in ("updated-parameters", "accumulation", "eval")} == {"pass"}
        assert verdict.law("loss").checked == 14, "of all microbatches of all operations"
        ran = verdict.measured.ran
        assert ran is None or (ran.operation, ran.microbatches) == (3, 6)
        assert (ran is None) == (not step.watched)
        golden(verdict.config)
        return
    operation, kind, microbatches, factor = wrong
    (cause,) = verdict.causes
    assert (verdict.outcome, verdict.mismatches[0].operation) == ("fail", operation), verdict
    assert (cause.kind, cause.microbatches, cause.factor) == (kind, microbatches, factor and pytest.approx(factor))


def test_every_replica_needs_a_microbatch(whitebox_here: WhiteBox) -> None:
    with pytest.raises(ReplicasError, match="2 microbatches for 3 replicas: expected at least one for each"):
        course(whitebox_here, Course(), {"dp": 3})

"""How a user's function goes through several operations, and what is said where it does not."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeproof.core.contract import Contract
from pipeproof.core.replicas import ReplicasError
from pipeproof.core.verdict import Verdict
from pipeproof.foreign import HandedBack, WhiteBox, watch
from pipeproof.foreign.handed_back import HandBackError
from pipeproof.foreign.operations import Operation, Operations
from pipeproof.reference.accumulation import Accumulation
from tests.support.golden import golden
from tests.support.steps import WIDTH, loss_fn, pairs

DUE = [Operation("train", [1]), Operation("eval", [2])]


def through(step: Callable[[Operations], Any]) -> tuple[list[object], list[int]]:
    """What was handed back, and the operations that began."""
    begun: list[int] = []
    operations = Operations(DUE, begun.append, step="step")
    return list(operations.handed_back(step(operations))), begun


def test_each_operation_begins_when_it_is_asked_for() -> None:
    seen: list[Any] = []

    def step(operations: Operations) -> Iterator[Any]:
        seen.append("set up")
        for operation, microbatches in operations:
            seen.append((operation, microbatches))
            yield operation
        seen.append("after")

    assert through(step) == (["train", "eval"], [0, 1])
    assert seen == ["set up", ("train", [1]), ("eval", [2]), "after"]


def plain(operations: Operations) -> Any:
    return "modules", "losses"


def all_at_once(operations: Operations) -> Iterator[Any]:
    yield from list(operations)


def too_few(operations: Operations) -> Iterator[Any]:
    for operation, _ in operations:
        yield operation
        return


def too_many(operations: Operations) -> Iterator[Any]:
    for operation, _ in operations:
        yield operation
        yield operation


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (plain, "step returned a tuple; with operations= it yields what it made of each"),
        (all_at_once, "step asked for another operation before it handed back operation 1: it yields"),
        (too_few, "step handed back 1 of 2 operations"),
        (too_many, "step handed back more than its operations"),
    ],
)
def test_what_goes_through_them_otherwise_is_told_so(step: Callable[[Operations], Any], sentence: str) -> None:
    with pytest.raises(HandBackError, match=sentence):
        through(step)


# Operations with different numbers of microbatches.

UNEVEN = [("train", 4), ("accumulate", 2), ("train", 6), ("eval", 2)]


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


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
                self.reduce(model)
                optimizer.step()
            yield HandedBack(stage, losses, accumulation=self.adds)
            if name == "train" and fault != "not cleared":
                optimizer.zero_grad()

    def reduce(self, model: nn.Module) -> None:
        """Average gradients over replicas."""
        for one in (parameter.grad for parameter in model.parameters()):
            assert one is not None, "all are trained"
            dist.all_reduce(one)
            one /= dist.get_world_size()


def course(whitebox: WhiteBox, step: Course, ranks: Any = 1) -> Verdict:
    contract, count = Contract(operations=UNEVEN), sum(each for _, each in UNEVEN)
    given = {"reference": build, "microbatches": pairs(count), "loss_fn": loss_fn, "optimizer": sgd}
    return whitebox.validate(step, ranks=ranks, contract=contract, **given)


@pytest.mark.parametrize(
    ("step", "ranks"),
    [
        (Course(), 1),
        (Course(watched=True), 1),
        (Course(watched=True), {"dp": 2}),
        (Course(adds=Accumulation(torch.float32)), {"dp": 2}),
    ],
)
def test_operations_may_have_different_numbers_of_microbatches(whitebox: WhiteBox, step: Course, ranks: Any) -> None:
    verdict = course(whitebox, step, ranks)
    assert verdict.verdict == "pass", verdict
    assert {verdict.law(law).outcome for law in ("updated-parameters", "accumulation", "eval")} == {"pass"}
    assert verdict.law("loss").checked == 14, "of all microbatches of all operations"
    golden(verdict.config)


WRONG: dict[Course, tuple[int, str, tuple[int, ...], float | None]] = {
    Course("last left out", 0): (1, "dropped", (3,), None),
    Course("last left out", 1): (3, "dropped", (1,), None),
    Course("last left out", 1, watched=True): (2, "dropped", (1,), None),
    Course("last left out", 2): (3, "dropped", (5,), None),
    Course("last left out", 2, watched=True): (3, "dropped", (5,), None),
    Course("divided by 4", 1): (3, "scale", (), 0.5),
    Course("divided by 4", 2): (3, "scale", (), 1.5),
    Course("not cleared", 0): (3, "stale-gradient", (), 1.0),
}


@pytest.mark.parametrize("step", WRONG)
def test_a_fault_is_found_in_its_operation_with_its_own_microbatches(whitebox: WhiteBox, step: Course) -> None:
    verdict, (operation, kind, microbatches, factor) = course(whitebox, step), WRONG[step]
    (cause,) = verdict.cause
    assert (verdict.verdict, verdict.mismatches[0].operation) == ("fail", operation), verdict
    assert (cause.kind, cause.microbatches, cause.factor) == (kind, microbatches, factor and pytest.approx(factor))


def test_a_watched_operation_shows_its_own_number_of_microbatches(whitebox: WhiteBox) -> None:
    verdict = course(whitebox, Course(watched=True))
    ran = verdict.measured.ran
    assert verdict.verdict == "pass"
    assert ran is not None
    assert (ran.operation, ran.microbatches) == (3, 6)


def test_every_operation_has_a_microbatch_for_each_replica(whitebox: WhiteBox) -> None:
    with pytest.raises(ReplicasError, match="2 microbatches for 3 replicas: expected at least one for each"):
        course(whitebox, Course(), {"dp": 3})

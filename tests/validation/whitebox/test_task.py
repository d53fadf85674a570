"""What is to be validated, and what cannot be."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from pipeproof.whitebox.task import Continued, Task, WhiteBoxError, name_of
from tests.support.golden import golden
from tests.support.steps import blocks, pairs

GOOD: dict[str, Any] = {
    "step": lambda model, microbatches: None,
    "reference": lambda: nn.Linear(2, 2),
    "microbatches": ((torch.ones(1, 2), torch.ones(1, 2)),),
    "loss_fn": nn.functional.mse_loss,
}


@pytest.fixture
def whitebox(whitebox_here: WhiteBox) -> WhiteBox:
    """One rank is enough."""
    return whitebox_here


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"step": 3}, "step is 3: expected a function step"),
        ({"microbatches": ()}, "microbatches is empty"),
        ({"microbatches": (torch.ones(2),)}, "microbatch 0 is a Tensor: expected a pair"),
        ({"microbatches": ((torch.ones(2), "x"),)}, "microbatch 0 has a str in it"),
        ({"contract": {"loss_divisor": 2}}, "contract is {'loss_divisor': 2}: expected a pipeproof.Contract"),
        ({"reference": nn.Linear(2, 2)}, "reference is a Linear: expected a function that builds it"),
    ],
)
def test_what_makes_no_sense_is_refused(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WhiteBoxError, match=sentence):
        Task(**GOOD | more).check()


def test_every_operation_has_its_part_of_the_microbatches() -> None:
    data = tuple((torch.full((1, 2), float(m)), torch.ones(1, 2)) for m in range(6))
    task = Task(**GOOD | {"microbatches": data, "contract": Contract(operations=["train", "eval", "train"])})
    assert task.counts == (2, 2, 2)
    parts = [task.operation(number) for number in range(3)]
    assert [[int(x[0, 0]) for x, _ in part.microbatches] for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert [part.loss.divisor for part in parts] == [2.0, 2.0, 2.0]
    assert [part.build("cpu").training for part in parts] == [True, False, True]
    golden(task.title(2))


def test_a_later_operation_begins_with_what_was_left() -> None:
    left, other = (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2))
    left(torch.randn(4, 2))
    weights = {name: one.detach() for name, one in other.named_parameters()}
    begun = Continued(nn.Sequential, left, weights, {"1.running_mean": torch.ones(2)})
    model = begun().state_dict()
    assert all(torch.equal(model[name], one) for name, one in weights.items())
    assert torch.equal(model["1.running_mean"], torch.ones(2))
    assert torch.equal(model["1.running_var"], left.state_dict()["1.running_var"])
    assert not torch.equal(model["0.weight"], left.state_dict()["0.weight"]), "it is a copy"
    assert name_of(begun) == "Sequential"


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [(lambda: 3, "returned a int: expected a torch.nn.Module"), (nn.Identity, "has no parameter to train")],
)
def test_a_reference_that_is_none_is_refused(reference: Any, sentence: str) -> None:
    with pytest.raises(WhiteBoxError, match=sentence):
        Task(**GOOD | {"reference": reference}).build("cpu")


def test_without_a_loss_function_the_model_gives_it() -> None:
    task = Task(**GOOD | {"loss_fn": None, "microbatches": ((torch.ones(1, 2), torch.ones(1, 2)), torch.ones(3))})
    one, two = task.batches(nn.Linear(2, 2))
    assert (len(one.inputs), len(two.inputs)) == (2, 1)
    assert task.loss.function(torch.tensor(5.0), torch.empty(0)) == 5.0
    assert task.loss.divisor == 2.0
    assert name_of(test_what_makes_no_sense_is_refused) == "test_what_makes_no_sense_is_refused"


# A learning rate that a scheduler sets.


def halved(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, StepLR(optimizer, step_size=2, gamma=0.5)  # so that it has to know the steps before


def warmed_up(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


def from_zero(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """Its first step moves nothing, and so shows nothing; the others do."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimizer, LambdaLR(optimizer, lambda step: step / 4)


def scheduled(model: nn.Module, operations: Iterator[Any], *, made: Any, times: int = 1) -> Iterator[Any]:
    """Trains ``model`` with what is ``made`` of it; the scheduler steps so many ``times`` after each update."""
    optimizer, scheduler = made(model)
    for operation, microbatches in operations:
        model.train(operation != "eval")
        losses = [nn.functional.mse_loss(model(x), target) for x, target in microbatches]
        if operation != "eval":
            (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
        if operation == "train":
            optimizer.step()
            for _ in range(times):
                scheduler.step()
        yield model, [loss.item() for loss in losses]
        if operation == "train":
            optimizer.zero_grad()


def judged(whitebox: WhiteBox, step: Any, optimizer: Any, steps: list[str]) -> Verdict:
    wanted = {"reference": partial(blocks, 2), "ranks": 1, "loss_fn": nn.functional.mse_loss, "optimizer": optimizer}
    return whitebox.validate(step, microbatches=pairs(2 * len(steps)), contract=Contract(operations=steps), **wanted)


SCHEDULED = ["train", "accumulate", "train", "eval", "train", "train"]


@pytest.mark.parametrize(
    ("made", "times", "steps"),
    [(halved, 1, SCHEDULED), (halved, 1, ["train"]), (from_zero, 1, SCHEDULED)]
    + [(warmed_up, times, SCHEDULED) for times in (1, 0, 2)],  # forgotten, or once for each microbatch
)
def test_rates_are_those_of_the_scheduler(whitebox: WhiteBox, made: Any, times: int, steps: list[str]) -> None:
    verdict = judged(whitebox, partial(scheduled, made=made, times=times), made, steps)
    assert verdict.outcome == verdict.law("updated-parameters").outcome == ("pass" if times == 1 else "fail"), verdict
    if times != 1:
        assert [cause.kind for cause in verdict.causes] == ["update"], verdict
        assert {one.law for one in verdict.mismatches} == {"updated-parameters"}
        assert "operation 3" in verdict.details, verdict
        golden(verdict.causes[0].detail.rpartition(" and ")[2])


def no_optimizer(model: nn.Module) -> Any:
    return halved(model)[::-1]


def no_scheduler(model: nn.Module) -> Any:
    return halved(model)[0], None


@pytest.mark.parametrize("made", [no_optimizer, no_scheduler])
def test_what_is_no_optimizer_is_said(whitebox: WhiteBox, made: Any) -> None:
    verdict = judged(whitebox, partial(scheduled, made=halved), made, ["train"])
    assert verdict.outcome == "unknown"
    golden(verdict.stopped.rpartition(" (")[0])

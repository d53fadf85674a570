"""What is given to the check of a step and is of no use is one sentence in the verdict; the training goes on."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeproof.core.verdict import Verdict
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_check import StepCheck, check_step
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.steps import backward, blocks, loss_fn, pairs

DATA = pairs(2)
BESIDE = SingleDevice(blocks, loss_fn)
Comparing = Callable[[StepCheck, nn.Module], object]


def compared(check: StepCheck, model: nn.Module) -> None:
    check.gradients()


def reported(check: StepCheck, model: nn.Module) -> None:
    """Gradients, and losses as the model, which is not yet updated, gives them."""
    check.gradients()
    check.report(losses=[loss_fn(model(inputs), target).item() for inputs, target in DATA])


def judged(comparing: Comparing = compared, **given: Any) -> Verdict:
    """The verdict on a right step of one rank, whose training must end whatever is given."""
    model = blocks()
    usual: dict[str, Any] = {"modules": model, "microbatches": DATA, "against": BESIDE, "timeout_s": 5}
    with check_step(**usual | given) as check:
        backward(model, DATA)
        comparing(check, model)
    assert all(one.grad is not None for one in model.parameters())
    return check.verdict


def refused(stage: int, name: str) -> str:
    raise KeyError(name)


GIVEN: dict[str, dict[str, Any]] = {
    "no modules": {"modules": None},
    "a list of modules": {"modules": [blocks()]},
    "a stage's name": {"modules": {"0": blocks()}},
    "a stage without a module": {"modules": {0: 1}},
    "one microbatch": {"microbatches": 5},
    "drawn data": {"microbatches": iter(DATA)},
    "inputs alone": {"microbatches": [DATA[0][0]]},
    "three": {"microbatches": [(1, 2, 3)]},
    "against nothing": {"against": None},
    "against a function": {"against": blocks},
    "against a model": {"against": blocks()},
    "no time": {"timeout_s": -1},
    "a time as text": {"timeout_s": "9"},
    "another operation": {"operation": 3},
    "the last operation": {"operation": -1},
    "a named operation": {"operation": "train"},
    "no function": {"rename": 5},
    "a name of none": {"rename": lambda stage, name: None},
    "a rename that raises": {"rename": refused},
    "a built model": {"against": SingleDevice(blocks(), loss_fn)},  # type: ignore[arg-type]  # it is the point
    "no loss": {"against": SingleDevice(blocks, None)},  # type: ignore[arg-type]  # it is the point
    "builds nothing": {
        "against": SingleDevice(lambda: None, loss_fn)  # type: ignore[arg-type, return-value]  # it is the point
    },
}
SHOWN: dict[str, Comparing] = {
    "losses as text": lambda check, _: check.report(losses="abc"),  # type: ignore[arg-type]  # it is the point
    "one loss": lambda check, _: check.report(losses=1.0),  # type: ignore[arg-type]  # it is the point
    "losses of none": lambda check, _: check.report(losses=[1.0, None]),  # type: ignore[list-item]  # it is the point
    "a norm as text": lambda check, _: check.report(norm="x"),  # type: ignore[arg-type]  # it is the point
    "three norms": lambda check, _: check.report(norm=torch.ones(3)),  # type: ignore[arg-type]  # it is the point
    "gradients in a list": lambda check, model: check.gradients(list(model.parameters())),  # type: ignore[arg-type]
    "gradients of other names": lambda check, model: check.gradients(
        {f"x{name}": one.grad for name, one in model.named_parameters()}
    ),
    "gradients as text": lambda check, model: check.gradients({name: "g" for name, _ in model.named_parameters()}),  # type: ignore[misc]
}


def test_what_is_as_it_should_be_passes() -> None:
    assert judged(reported).outcome == "pass"
    assert judged(reported, timeout_s=2.5, operation=0, rename=lambda _, name: name).outcome == "pass"


@pytest.mark.parametrize("name", GIVEN)
def test_what_cannot_be_checked_is_said_and_the_training_goes_on(name: str) -> None:
    golden(refusal(judged(**GIVEN[name]).details))


@pytest.mark.parametrize("name", SHOWN)
def test_what_cannot_be_compared_is_said_and_the_training_goes_on(name: str) -> None:
    golden(refusal(judged(SHOWN[name]).details))


def refusal(verdict: str) -> str:
    """The first line of an unknown verdict."""
    said = verdict.splitlines()[0]
    assert said.startswith("UNKNOWN comparable:"), verdict
    return said


def on_one_rank(given: dict[str, Any], _: RankContext) -> str:
    """A step of two stages; rank 1 passes what is ``given``."""
    rank = dist.get_rank()
    stage, usual = blocks()[2 * rank : 2 * rank + 2], {"against": BESIDE, "timeout_s": 20}
    more = given if rank else {}
    with check_step(**{"modules": stage, "microbatches": DATA} | usual | more) as check:
        message = torch.zeros(1)
        dist.broadcast(message, src=1)  # as a stage that waits for another
    return check.verdict.details


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("name", ["no modules", "a rename that raises", "a time as text"])
def test_what_one_rank_gives_holds_up_no_other(name: str, world: World) -> None:
    one, other = world.run(partial(on_one_rank, GIVEN[name]), ranks=2)
    assert one == other
    golden(refusal(one))

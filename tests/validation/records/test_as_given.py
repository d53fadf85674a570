"""What is given to the check of a step and is of no use is one sentence in the verdict; the training goes on."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeproof.judging.verdict import Verdict
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_check import StepCheck, check_step
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.steps import blocks, loss_fn, pairs

DATA = pairs(2)
BESIDE = SingleDevice(blocks, loss_fn)
Comparing = Callable[[StepCheck, nn.Module], object]


def compared(check: StepCheck, model: nn.Module) -> None:
    check.gradients()


def reported(check: StepCheck, model: nn.Module) -> None:
    """Gradients, and losses as the model, which is not yet updated, gives them."""
    check.gradients()
    check.report(losses=[loss_fn(model(inputs), target).item() for inputs, target in DATA])


def train(model: nn.Module) -> None:
    for inputs, target in DATA:
        (loss_fn(model(inputs), target) / len(DATA)).backward()


def judged(comparing: Comparing = compared, **given: Any) -> Verdict:
    """The verdict on a right step of one rank, whose training must end whatever is given."""
    model = blocks()
    usual: dict[str, Any] = {"modules": model, "microbatches": DATA, "against": BESIDE, "timeout_s": 5}
    with check_step(**usual | given) as check:
        train(model)
        comparing(check, model)
    assert all(one.grad is not None for one in model.parameters())
    return check.verdict


def refused(stage: int, name: str) -> str:
    raise KeyError(name)


MODULES = "expected this rank's stage, or its stages as {number: stage}"
AGAINST = "expected a record, the path of its file, SingleDevice(build, loss_fn) or Composed(loss_fn)"
GIVEN: dict[str, tuple[dict[str, Any], str]] = {
    "no modules": ({"modules": None}, f"modules is None: {MODULES}"),
    "a list of modules": ({"modules": [blocks()]}, f"modules is a list: {MODULES}"),
    "a stage's name": ({"modules": {"0": blocks()}}, "modules has the stage '0': expected its number, from 0"),
    "a stage without a module": ({"modules": {0: 1}}, "stage 0 in modules is 1: expected a torch.nn.Module"),
    "one microbatch": ({"microbatches": 5}, "microbatches is 5: expected a list of pairs of inputs and target"),
    "drawn data": ({"microbatches": iter(DATA)}, "microbatches is a list_iterator: expected a list of pairs"),
    "inputs alone": ({"microbatches": [DATA[0][0]]}, "microbatch 0 is a Tensor: expected a pair of inputs and target"),
    "three": ({"microbatches": [(1, 2, 3)]}, "microbatch 0 is a tuple of 3: expected a pair of inputs and target"),
    "against nothing": ({"against": None}, f"against is None: {AGAINST}"),
    "against a function": ({"against": blocks}, f"against is a function: {AGAINST}"),
    "against a model": ({"against": blocks()}, f"against is a Sequential: {AGAINST}"),
    "no time": ({"timeout_s": -1}, "timeout_s is -1: expected seconds above 0"),
    "a time as text": ({"timeout_s": "9"}, "timeout_s is '9': expected seconds above 0"),
    "another operation": ({"operation": 3}, "operation is 3: a SingleDevice makes one step, so leave operation= out"),
    "the last operation": ({"operation": -1}, "operation is -1: a SingleDevice makes one step"),
    "a named operation": ({"operation": "train"}, "operation is 'train': expected the number of one of the record's"),
    "no function": ({"rename": 5}, "rename is 5: expected a function of a stage's number and a name in it"),
    "a name of none": (
        {"rename": lambda stage, name: None},
        "rename gave None for 0.0.weight of stage 0: expected the",
    ),
    "a rename that raises": ({"rename": refused}, "rename raised KeyError: '0.0.weight' (test_as_given.py:"),
    "a built model": (
        {"against": SingleDevice(blocks(), loss_fn)},  # type: ignore[arg-type]  # it is the point
        "build is a Sequential: expected a function that builds it",
    ),
    "no loss": (
        {"against": SingleDevice(blocks, None)},  # type: ignore[arg-type]  # it is the point
        "loss_fn is None: expected a function of output and target",
    ),
    "builds nothing": (
        {"against": SingleDevice(lambda: None, loss_fn)},  # type: ignore[arg-type, return-value]  # it is the point
        "build, <lambda>, returned a NoneType: expected a torch.nn.Module",
    ),
}
SHOWN: dict[str, tuple[Comparing, str]] = {
    "losses as text": (
        lambda check, _: check.report(losses="abc"),  # type: ignore[arg-type]  # it is the point
        "losses is 'abc': expected a list of one number for each microbatch",
    ),
    "one loss": (
        lambda check, _: check.report(losses=1.0),  # type: ignore[arg-type]  # it is the point
        "losses is 1.0: expected a list of one number for each microbatch",
    ),
    "losses of none": (
        lambda check, _: check.report(losses=[1.0, None]),  # type: ignore[list-item]  # it is the point
        "losses[1] is None: expected one number",
    ),
    "a norm as text": (
        lambda check, _: check.report(norm="x"),  # type: ignore[arg-type]  # it is the point
        "norm is 'x': expected one number",
    ),
    "three norms": (
        lambda check, _: check.report(norm=torch.ones(3)),  # type: ignore[arg-type]  # it is the point
        "norm is a tensor of shape [3]: expected one number",
    ),
    "gradients in a list": (
        lambda check, model: check.gradients([one.grad for one in model.parameters()]),  # type: ignore[arg-type]
        "gradients is a list: expected a mapping from names of parameters to gradients",
    ),
    "gradients of other names": (
        lambda check, model: check.gradients({f"x{name}": one.grad for name, one in model.named_parameters()}),
        "gradients is of x0.0.weight, x0.0.bias, x1.0.weight, x1.0.bias and 4 more, which are no parameters: expected",
    ),
    "gradients as text": (
        lambda check, model: check.gradients({name: "g" for name, _ in model.named_parameters()}),  # type: ignore[misc]
        "the gradient of 3.0.bias is a str: expected a tensor, a FlatShard or None",
    ),
}


def test_what_is_as_it_should_be_passes() -> None:
    assert judged(reported).verdict == "pass"
    assert judged(reported, timeout_s=2.5, operation=0, rename=lambda _, name: name).verdict == "pass"


@pytest.mark.parametrize("name", GIVEN)
def test_what_cannot_be_checked_is_said_and_the_training_goes_on(name: str) -> None:
    given, sentence = GIVEN[name]
    check_said(judged(**given), sentence)


@pytest.mark.parametrize("name", SHOWN)
def test_what_cannot_be_compared_is_said_and_the_training_goes_on(name: str) -> None:
    comparing, sentence = SHOWN[name]
    check_said(judged(comparing), sentence)


def check_said(verdict: Verdict, sentence: str) -> None:
    assert verdict.verdict == "unknown", str(verdict)
    assert f"UNKNOWN comparable: rank 0: {sentence}" in str(verdict)


def on_one_rank(given: dict[str, Any], _: RankContext) -> str:
    """A step of two stages; rank 1 passes what is ``given``."""
    rank = dist.get_rank()
    stage, usual = blocks()[2 * rank : 2 * rank + 2], {"against": BESIDE, "timeout_s": 20}
    more = given if rank else {}
    with check_step(**{"modules": stage, "microbatches": DATA} | usual | more) as check:
        message = torch.zeros(1)
        dist.broadcast(message, src=1)  # as a stage that waits for another
    return str(check.verdict)


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("name", ["no modules", "a rename that raises", "a time as text"])
def test_what_one_rank_gives_holds_up_no_other(name: str, world: World) -> None:
    given, sentence = GIVEN[name]
    sentence = sentence.replace("0.0.weight", "2.0.weight")
    one, other = world.run(partial(on_one_rank, given), ranks=2)
    assert one == other
    assert f"UNKNOWN comparable: rank 1: {sentence}" in one

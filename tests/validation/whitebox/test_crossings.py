"""Which microbatch a call was about, from what passed the boundary alone."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import StepResult, watch
from pipeproof.core.contract import Contract
from pipeproof.core.observe.observed import Crossing
from pipeproof.whitebox import WhiteBox
from tests.support.boundary_calls import MICROBATCHES, Calls, batches, calls, drawn, flowing
from tests.support.golden import golden
from tests.support.steps import backward, loss_fn, pairs
from tests.support.two_ranks import all_forward_all_backward, half, model_of, named, plain


def actions(order: list[int]) -> list[str]:
    return [*map(str, flowing(calls(batches(), order))[0].actions)]


def wrong(observed: Calls) -> list[Crossing]:
    return [crossing for flow in flowing(observed).values() for crossing in flow.crossings if not crossing.same]


def test_calls_are_known_in_any_order() -> None:
    order = [2, 0, 3, 1]
    flows = flowing(calls(batches(), order))
    assert [*map(str, flows[1].actions)] == [f"1{kind}{m}" for kind in "FB" for m in order]
    assert [(str(action), training) for action, training in flows[1].called] == [(f"1F{m}", True) for m in order]
    each = [4, 5]  # the first stage hands on no gradient
    assert [len(flow.crossings) for flow in flows.values()] == [MICROBATCHES * tensors for tensors in each]
    assert all(crossing.exact for flow in flows.values() for crossing in flow.crossings)


def test_an_input_that_changed_before_its_backward() -> None:
    def overwritten(m: int, x: Tensor) -> None:
        x.data.copy_(drawn(2) if m == 0 else x)

    (found,) = wrong(calls(batches(), [0, 1, 2, 3], between=overwritten))
    assert (str(found.action), found.observed) == ("0B0", "microbatch 2's")
    golden(found.what)


def test_only_a_first_call_is_a_trial() -> None:
    assert actions([0, 0, 1, 2, 3]) == [f"0{kind}{m}" for kind in "FB" for m in range(MICROBATCHES)]
    assert len(actions([0, 1, 2, 3, 0, 1])) == 12


def test_a_factor_beside_what_is_divided_later() -> None:
    found = wrong(calls(batches(), [0, 1, 2, 3], times=lambda m: 32 if m == 1 else 8))
    assert {(str(one.action), one.really and one.really.factor) for one in found} == {("1B1", 4.0), ("0B1", 4.0)}


class Scored(nn.Module):
    """A layer and its mean: one number for each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


class Near(nn.Module):
    """The same, but the second number is ``last``, but for its last digits."""

    def __init__(self, layer: nn.Module, last: Tensor) -> None:
        super().__init__()
        self.layer, self.last, self.calls = layer, last, 0

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x).square().mean()
        self.calls += 1
        return made * (1.00005 * self.last / made.detach()) if self.calls == 2 else made


def near_another(model: Any, microbatches: list[Any]) -> Any:
    near = watch(Near(model.layer, model(microbatches[3][0]).detach()))
    return near, backward(near, microbatches, by=as_it_is)


def one_not_scaled(model: nn.Sequential, microbatches: list[Any], *, scale: float) -> StepResult:
    """The loss of microbatch 1 is not scaled, and all gradients are divided by the scale."""

    def scaled(stage: nn.Module, m: int, x: Tensor) -> Tensor:
        made: Tensor = stage(x) * 1.0
        if dist.get_rank() and m != 1:
            made.register_hook(lambda gradient: gradient * scale)  # type: ignore[no-untyped-call]  # in torch
        return made

    stage = watch(half(model))
    losses = all_forward_all_backward(stage, microbatches, scaled)
    for parameter in stage.parameters():
        assert parameter.grad is not None
        parameter.grad /= scale
    return StepResult(stage, losses, loss_scale=scale)


class InHalf(nn.Linear):
    """Computes in fp16, where what flows back of small losses is rounded unless they are scaled."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.half(), self.weight.half(), self.bias.half()).float()


def in_half() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(InHalf(4, 4), nn.GELU(), InHalf(4, 4))


def small(output: Tensor, target: Tensor) -> Tensor:
    return 2.0**-5 * loss_fn(output, target)


def normed_while_scaled(model: nn.Module, microbatches: list[Any]) -> StepResult:
    scale = 2.0**10
    losses = backward(model, microbatches, by=small, divisor=len(microbatches) / scale)
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    for one in gradients:
        one /= scale
    return StepResult(model, losses, norm.item(), loss_scale=scale)


def several_while_scaled(model: nn.Module, operations: Any) -> Any:
    """In the second operation, the last microbatch is left out."""
    for number, (_, microbatches) in enumerate(operations):
        model.zero_grad()
        gone = microbatches[-1] if number else None
        losses = [small(model(x), target) for x, target in microbatches]
        kept = [loss for loss, one in zip(losses, microbatches, strict=True) if one is not gone]
        (sum(kept) * 2.0**10 / len(losses)).backward()
        for parameter in model.parameters():
            parameter.grad /= 2.0**10
        yield StepResult(model, losses, loss_scale=2.0**10)


class Little(nn.Module):
    """Adds so little that the gradients of all its inputs and outputs are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.tanh(self.layer(x))


def in_bf16() -> nn.Module:
    return model_of(Little).bfloat16()


def sent_in_fp8(model: nn.Sequential, microbatches: list[Any]) -> Any:
    def narrowed(_: int, gradient: Tensor) -> Tensor:
        return gradient.to(torch.float8_e4m3fn).to(gradient.dtype)

    stage = watch(half(model))
    return stage, all_forward_all_backward(stage, microbatches, passed=narrowed)


def scored() -> list[Any]:
    return [(torch.randn(2, 4, generator=torch.Generator().manual_seed(m)), torch.zeros(())) for m in range(4)]


def flat(times: int = 1) -> list[Any]:
    return pairs(3, rows=2, width=4, seed=1) * times


def wide() -> list[Any]:
    return [tuple(one.bfloat16() for one in pair) for pair in pairs(4, rows=4, width=32)]


def as_it_is(output: Tensor, _: Tensor) -> Tensor:
    return output


UNSCALED = [("scale", 1, 1, (1,))]
SEVERAL = Contract(operations=["train", "train"])
# A step, beside what; what it is called, and which laws' mismatches it has (None: any).
FAULTS: dict[str, tuple[Any, dict[str, Any], list[Any], set[str] | None]] = {
    "a number near another's": (
        near_another,
        {"reference": Scored, "microbatches": scored(), "loss_fn": as_it_is},
        [("computation", 0, 0, (1,))],
        None,
    ),
    "one not scaled": (partial(one_not_scaled, scale=2.0**10), {"ranks": 2}, UNSCALED, None),
    "one not scaled, of which nothing is left": (partial(one_not_scaled, scale=2.0**24), {"ranks": 2}, UNSCALED, None),
    "a norm of what is scaled": (
        normed_while_scaled,
        {"reference": in_half, "microbatches": flat(), "loss_fn": small},
        [("norm", None, None, ())],
        {"grad-norm"},
    ),
    "a later operation, scaled": (
        several_while_scaled,
        {"reference": in_half, "microbatches": flat(2), "loss_fn": small, "contract": SEVERAL},
        [("dropped", 0, 0, (2,))],
        None,
    ),
    "a message in fp8": (
        sent_in_fp8,
        {"reference": in_bf16, "microbatches": wide(), "ranks": 2},
        [("altered", 0, 0, (0, 1, 2, 3))],
        None,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_passed_has_its_own_cause(whitebox: WhiteBox, name: str) -> None:
    step, more, causes, laws = FAULTS[name]
    wanted = {"reference": plain, "microbatches": pairs(), "ranks": 1, "loss_fn": loss_fn} | more
    verdict = whitebox.validate(step, **wanted)
    assert named(verdict) == causes, verdict
    assert laws in (None, {one.law for one in verdict.mismatches})
    if causes == UNSCALED:
        wrong = {one.microbatch for one in verdict.mismatches if one.law == "boundaries"}
        assert wrong == {1}, "what the others send back is scaled, as is expected"
    if "contract" in more:
        assert {one.operation for one in verdict.mismatches} == {2}
    assert "microbatch 3's" not in verdict.details

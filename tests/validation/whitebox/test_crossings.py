"""Which microbatch a call was about, from what passed the boundary alone."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import StepResult, watch
from pipeproof.core.contract import Contract
from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.observed import Crossing, Passed
from pipeproof.core.observe.sketch import sketch
from pipeproof.core.observe.watching import Watcher
from pipeproof.reference.data import Batch
from pipeproof.whitebox import WhiteBox
from pipeproof.whitebox.crossings import find_passages
from pipeproof.whitebox.tensor_index import Places, TensorIndex
from tests.support.golden import golden
from tests.support.steps import loss_fn, pairs
from tests.support.two_ranks import all_forward_all_backward, half, model_of, named, plain

MICROBATCHES = 3


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


def batches() -> list[Batch]:
    draw = torch.Generator().manual_seed(1)
    return [Batch((torch.randn(2, 4, generator=draw),), torch.randn(2, 4, generator=draw), 2) for _ in range(3)]


def places() -> tuple[Places, Places]:
    whole = model()
    survey = TensorIndex(whole)
    for microbatch, batch in enumerate(batches()):

        def train(batch: Batch = batch) -> None:
            (loss_fn(whole(*batch.inputs), batch.target) / MICROBATCHES).backward()

        survey.watch(microbatch, batch, train)
    return survey.places


def calls(order: list[int], *, change: float = 1.0, late: Tensor | None = None) -> list[Call]:
    """The calls of the whole model for these microbatches: ``change`` scales inputs, ``late`` comes into them later."""
    watcher, whole = Watcher(), model()
    watcher.watch(whole)
    for number in order:
        batch = batches()[number]
        x = batch.inputs[0] * change
        loss = loss_fn(whole(x), batch.target) / MICROBATCHES
        if late is not None:
            x.data.copy_(late)
        loss.backward()  # type: ignore[no-untyped-call]
    found = watcher.calls(whole)
    assert found is not None
    return found


def flow(found: list[Call]) -> Passed:
    return find_passages([{0: found}], MICROBATCHES, places())[0][0]


def wrong(found: Passed) -> list[Crossing]:
    return [crossing for crossing in found.crossings if not crossing.same]


def test_calls_are_known_in_any_order() -> None:
    found = flow(calls([2, 0, 1]))
    assert list(map(str, found.actions)) == ["0F2", "0F0", "0F1", "0B2", "0B0", "0B1"]
    assert [(str(action), training) for action, training in found.called] == [
        ("0F2", True),
        ("0F0", True),
        ("0F1", True),
    ]
    assert len(found.crossings) == 4 * MICROBATCHES
    assert all(crossing.exact for crossing in found.crossings)


def test_a_repeated_microbatch_is_not_the_missing_one() -> None:
    assert list(map(str, flow(calls([0, 0, 2])).actions[:3])) == ["0F0", "0F0", "0F2"]


def test_an_input_that_changed_before_its_backward() -> None:
    late = batches()[2].inputs[0]
    found = wrong(flow([*calls([0], late=late), *calls([1, 2])]))
    assert [(str(one.action), one.observed) for one in found] == [("0B0", "microbatch 2's")]
    golden(found[0].what)


def test_only_a_first_call_is_a_trial() -> None:
    assert list(map(str, flow(calls([0, 0, 1, 2])).actions)) == ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]
    assert len(flow(calls([0, 1, 2, 0, 1])).actions) == 10


def test_a_sketch_tells_rounding_from_another_tensor() -> None:
    one = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    near, far = one * (1 + 1e-6), one.roll(1)
    assert sketch(near).is_like(sketch(one))
    assert 1e-7 < sketch(near).distance(sketch(one)) < 1e-5
    assert not sketch(far).is_like(sketch(one))
    assert not sketch(one[:10]).is_like(sketch(one))
    assert not sketch(torch.tensor([1, 2])).is_like(sketch(torch.tensor([2, 1])))


def test_a_factor_beside_what_is_divided_later() -> None:
    watcher, whole = Watcher(), model()
    watcher.watch(whole)
    for number, batch in enumerate(batches()):
        loss = loss_fn(whole(*batch.inputs), batch.target) / MICROBATCHES
        (loss * (32 if number == 1 else 8)).backward()
    found = watcher.calls(whole)
    assert found is not None
    (crossing,) = wrong(flow(found))
    assert crossing.really is not None
    assert (str(crossing.action), crossing.really.factor) == ("0B1", 4.0)


class Scored(nn.Module):
    """A layer and its mean: one number for each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x).square().mean()
        return made


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
    losses = []
    for x, _ in microbatches:
        losses.append(near(x))
        (losses[-1] / len(microbatches)).backward()
    return near, losses


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
    losses, scale = [], 2.0**10
    for x, target in microbatches:
        losses.append(small(model(x), target))
        (losses[-1] * scale / len(microbatches)).backward()
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
    return [(*batch.inputs, batch.target) for batch in batches()] * times


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

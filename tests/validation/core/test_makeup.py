"""A lost microbatch shows in what a sum is made of, also where rounding is larger than it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof import watch
from pipeproof.core.limits import BF16
from pipeproof.core.makeup import Makeup, most_of
from pipeproof.reference.accumulation import PLAIN
from pipeproof.whitebox import WhiteBox

COUNT = 64


@pytest.fixture
def whitebox(whitebox_here: WhiteBox) -> WhiteBox:
    """One rank is enough."""
    return whitebox_here


def parts(length: int, count: int = COUNT, *, alike: float = 0.0) -> list[Tensor]:
    """What microbatches give: noise, and ``alike`` of one direction in all of them."""
    draw = torch.Generator().manual_seed(0)
    common = torch.randn(length, generator=draw)
    return [(torch.randn(length, generator=draw) + alike * common).bfloat16() for _ in range(count)]


def whole(given: Sequence[Tensor]) -> Tensor:
    total = PLAIN.total(given, range(len(given)))
    assert total is not None
    return total


def makeup(given: Sequence[Tensor]) -> tuple[Makeup, Tensor]:
    expected = whole(given)
    others = [whole(given[::-1]), torch.stack([one.double() for one in given]).sum(dim=0)]
    return Makeup.measure(expected, others, given, factor=BF16.factor), expected


@pytest.mark.parametrize("alike", [0.0, 3.0])
def test_a_sum_in_another_order_is_made_of_the_same(alike: float) -> None:
    given = parts(4096, alike=alike)
    made, expected = makeup(given)
    shuffled = whole([given[(7 * k) % COUNT] for k in range(COUNT)])
    assert not torch.equal(shuffled, expected)
    assert made.is_alike(shuffled, expected)


@pytest.mark.parametrize("alike", [0.0, 3.0])
@pytest.mark.parametrize(
    "fault", [lambda g: g[1:], lambda g: [*g, g[9]], lambda g: [g[9], *g[1:]]], ids=["lost", "twice", "another's"]
)
def test_a_microbatch_that_is_lost_or_there_twice_is_seen(
    fault: Callable[[list[Tensor]], list[Tensor]], alike: float
) -> None:
    given = parts(4096, alike=alike)
    made, expected = makeup(given)
    assert not made.is_alike(whole(fault(given)), expected)


def test_what_cannot_be_told_apart_is_not_said_to_be_alike() -> None:
    few = parts(COUNT // 2)  # fewer numbers than microbatches
    made, expected = makeup(few)
    assert not made.is_alike(expected, expected)
    twins = [*parts(4096, 2), parts(4096, 1)[0]]
    made, expected = makeup(twins)
    assert not made.is_alike(expected, expected)
    assert not Makeup.measure(expected, [], twins, factor=4.0).is_alike(expected, expected)


def test_how_much_of_a_part_is_in_a_difference() -> None:
    first, second, third = (one.double() for one in parts(512, 3))
    assert most_of(first + 0.25 * third, first, [first, second, third]) == pytest.approx(0.25)
    assert most_of(first, first, []) == torch.inf


class Biased(nn.Module):
    """A layer whose gradients are nearly the same for every microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(128, 128, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        return made


def build() -> nn.Module:
    torch.manual_seed(0)
    return Biased()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


def added_wide(model: Any, microbatches: list[Any], *, lost: int | None) -> Any:
    """A right step that adds up in fp32, or one that loses a microbatch."""
    stage, losses, totals = watch(model), [], {one: torch.zeros(one.shape) for one in model.parameters()}
    for m, (x, target) in enumerate(microbatches):
        losses.append(loss_fn(stage(x), target))
        (losses[-1] / len(microbatches)).backward()
        for one in totals:
            totals[one] += 0 if m == lost else one.grad
            one.grad = None
    for one, total in totals.items():
        one.grad = total.bfloat16()
    return stage, [loss.item() for loss in losses]


@pytest.mark.parametrize("lost", [None, 3])
def test_a_step_of_many_microbatches_in_bf16_is_decided(whitebox: WhiteBox, lost: int | None) -> None:
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randn(8, 128, generator=draw) + 1 for _ in range(COUNT)]
    data = [(one.bfloat16(), torch.randn(8, 128, generator=draw) + 5) for one in rows]
    step = partial(added_wide, lost=lost)
    verdict = whitebox.validate(step, reference=build, microbatches=data, ranks=1, loss_fn=loss_fn)
    assert verdict.law("gradient").outcome == ("pass" if lost is None else "unknown"), str(verdict)
    assert lost is not None or verdict.outcome == "pass", str(verdict)

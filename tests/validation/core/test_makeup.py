"""A lost microbatch shows in what a sum is made of, also where rounding is larger than it."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from pipeproof.core.limits import BF16
from pipeproof.core.makeup import compare_shares, most_of
from pipeproof.reference.accumulation import add_parts
from pipeproof.whitebox import WhiteBox
from tests.support.steps import loss_fn
from tests.support.summed_wide import summed_wide

COUNT = 64


def parts(length: int, count: int = COUNT, *, alike: float = 0.0) -> list[Tensor]:
    """What microbatches give: noise, and ``alike`` of one direction in all of them."""
    draw = torch.Generator().manual_seed(0)
    common = torch.randn(length, generator=draw)
    return [(torch.randn(length, generator=draw) + alike * common).bfloat16() for _ in range(count)]


def is_alike(observed: Tensor | None, given: Sequence[Tensor]) -> bool:
    """Whether ``observed``, or the expected sum itself, is made of what microbatches gave."""
    expected = add_parts(given)
    others = [add_parts(given[::-1]), torch.stack([one.double() for one in given]).sum(dim=0)]
    return compare_shares(expected, others, given, factor=BF16.factor)(
        expected if observed is None else observed, expected
    )


@pytest.mark.parametrize("alike", [0.0, 3.0])
@pytest.mark.parametrize(
    ("other", "same"),
    [
        (lambda g: [g[(7 * k) % COUNT] for k in range(COUNT)], True),
        (lambda g: g[1:], False),
        (lambda g: [*g, g[9]], False),
        (lambda g: [g[9], *g[1:]], False),
    ],
    ids=["another order", "lost", "twice", "another's"],
)
def test_a_lost_or_doubled_microbatch_shows(
    other: Callable[[list[Tensor]], list[Tensor]], same: bool, alike: float
) -> None:
    given = parts(4096, alike=alike)
    observed = add_parts(other(given))
    assert not torch.equal(observed, add_parts(given))
    assert is_alike(observed, given) == same


def test_microbatches_that_look_alike_prove_nothing() -> None:
    assert not is_alike(None, parts(COUNT // 2)), "fewer numbers than microbatches"
    twins = [*parts(4096, 2), parts(4096, 1)[0]]
    assert not is_alike(None, twins)
    assert not compare_shares(add_parts(twins), [], twins, factor=4.0)(add_parts(twins), add_parts(twins))


def test_how_much_of_a_part_is_in_a_difference() -> None:
    first, second, third = (one.double() for one in parts(512, 3))
    assert most_of(first + 0.25 * third, first, [first, second, third]) == pytest.approx(0.25)
    assert most_of(first, first, []) == torch.inf


def build() -> nn.Module:
    """A layer whose gradients are nearly the same for every microbatch."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 128, bias=False, dtype=torch.bfloat16))


@pytest.mark.parametrize("lost", [None, 3])
def test_a_step_of_many_microbatches_in_bf16_is_decided(whitebox_here: WhiteBox, lost: int | None) -> None:
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randn(8, 128, generator=draw) + 1 for _ in range(COUNT)]
    data = [(one.bfloat16(), torch.randn(8, 128, generator=draw) + 5) for one in rows]
    step = partial(summed_wide, lost=lost, given=torch.bfloat16)
    verdict = whitebox_here.validate(step, reference=build, microbatches=data, ranks=1, loss_fn=loss_fn)
    assert verdict.law("gradient").outcome == ("pass" if lost is None else "unknown"), str(verdict)
    assert lost is not None or verdict.outcome == "pass", str(verdict)

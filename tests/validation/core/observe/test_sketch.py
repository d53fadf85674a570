"""Looking at a tensor recognises it again, and leaves it as it was."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.core.ledger import Ledger
from pipeproof.core.observe.digest import digest
from pipeproof.core.observe.elements import all_finite, any_nonzero, bits
from pipeproof.core.observe.sketch import UNSOUGHT, _signs, brief, sketch
from pipeproof.core.tolerance import Floor, error, same_bits
from pipeproof.core.verdict import Mismatch
from pipeproof.records.record import ContentError, Record, RecordedOperation
from pipeproof.records.record import digest as recorded_digest
from pipeproof.records.record_file import read, write
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_check import check_step
from pipeproof.records.step_record import record_step
from pipeproof.whitebox.validator import WhiteBox
from pipeproof.worlds.output_file import OutputFile
from pipeproof.worlds.shipping import pack, unpack
from tests.support.steps import backward

pytestmark = [
    pytest.mark.filterwarnings("ignore:(ComplexHalf|BComplex32) support is experimental"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions"),
]


def test_what_can_go_wrong_on_a_wire_changes_a_digest() -> None:
    one = torch.tensor([[0.0, 1.5], [2.5, math.nan]])
    flipped = [one.clone().view(torch.int32).bitwise_xor(1 << bit).view(torch.float32) for bit in (0, 22, 31)]
    other_nan, negative_zero = one.clone(), one.clone()
    other_nan.view(torch.int32)[1, 1] += 1
    negative_zero[0, 0] = -0.0
    observed = [one, *flipped, one.flip(0), one.view(4), one.double(), other_nan, negative_zero]
    assert len({digest(tensor) for tensor in observed}) == len(observed)
    assert digest(one) == digest(one.clone())
    assert sketch(negative_zero).digest == sketch(one).digest  # whoever adds up messages loses the sign
    assert len({sketch(tensor).digest for tensor in observed[:-1]}) == len(observed) - 1


def test_of_any_type_and_form_the_elements_are_known_in_another_order() -> None:
    one = torch.arange(1.0, 25.0).view(4, 6)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        observed, other = sketch(one.to(dtype).flip(0)), sketch(one.to(dtype))
        assert observed.is_reordered(other), dtype
        assert not other.is_reordered(other)
        assert not sketch((one + 1).to(dtype)).is_reordered(other)
    assert sketch(one.T).is_reordered(sketch(one))
    for tensor in (torch.tensor(1.0), torch.ones(0), torch.ones(1).expand(20), torch.ones(20, dtype=torch.bool)):
        assert not sketch(tensor).is_reordered(sketch(tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_elements_of_other_signs_are_no_others_in_another_order(dtype: torch.dtype) -> None:
    one = torch.randn(4, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    other = torch.cat([one[:2], -one[2:]]) if not dtype.is_complex else (one * 1j).conj().resolve_conj()
    assert not sketch(other).is_reordered(sketch(one if not dtype.is_complex else one * 1j))


def test_a_tensor_that_was_looked_at_can_still_be_freed() -> None:
    tensor = torch.ones(4)
    digest(tensor)
    sketch(tensor)
    tensor.untyped_storage().resize_(0)  # as fully_shard does after a forward
    assert tensor.untyped_storage().nbytes() == 0


def test_a_sketch_is_used_again_for_an_equal_tensor_alone() -> None:
    tensor = torch.arange(6.0)
    known = sketch(tensor)
    assert sketch(tensor.clone(), known=known) is known
    assert sketch(-tensor, known=known) == sketch(-tensor) != known


def test_what_is_kept_for_sketches_is_small_whatever_was_sketched() -> None:
    for size in (1, 1000, 65_521, 65_522, 500_000):
        sketch(torch.ones(size))
    assert _signs.cache_info().currsize == 1
    assert _signs(torch.device("cpu")).nbytes < 300_000


@pytest.mark.parametrize("size", [100, 65_521, 65_522, 200_000])
def test_projections_tell_how_far_apart_two_tensors_are(size: int) -> None:
    draw = torch.Generator().manual_seed(size)
    one = torch.randn(size, generator=draw)
    far = [sketch(one + 1e-3 * torch.randn(size, generator=draw)).distance(sketch(one)) for _ in range(20)]
    assert 0.8e-3 < sum(far) / len(far) < 1.2e-3
    assert sketch(2 * one).factor(sketch(one)) == pytest.approx(2)


def test_imaginary_parts_are_in_a_sketch() -> None:
    one = torch.tensor([1 + 1j, 2 - 1j])
    assert sketch(one.conj()).distance(sketch(one)) > 0.1
    assert sketch(one.conj().resolve_conj()) == sketch(one.conj())


PARTIAL = {f"torch.{sign}int{width}" for sign in ("", "u") for width in range(1, 8)}  # torch cannot copy these
TYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).startswith("torch.q") and str(value) not in PARTIAL
    },
    key=str,
)


def of(dtype: torch.dtype, *, other: bool = False) -> Tensor:
    """Three elements, or three others; each byte is below 64, so that every type can say it as a finite number."""
    size = torch.empty(1, dtype=dtype).element_size()
    found = (torch.arange(3 * size) % 60 + 1).to(torch.uint8) % (2 if dtype is torch.bool else 255)
    found[-1] = (found[-1] + other) % (2 if dtype is torch.bool else 255)
    return found.view(dtype)


class Block(nn.Module):
    """A layer with a buffer and a frozen parameter of some type."""

    def __init__(self, dtype: torch.dtype, *, other: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mask", of(dtype, other=other))
        self.table = nn.Parameter(of(dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def build(dtype: torch.dtype, *, other: bool = False) -> nn.Module:
    return seeded(lambda: Block(dtype, other=other))


loss_fn = nn.functional.mse_loss
trained = partial(backward, by=loss_fn)
DATA = [(torch.full((1, 2), float(k + 1)), torch.zeros(1, 2)) for k in range(2)]


def compared(observed: Tensor, expected: Tensor) -> tuple[str, int]:
    """The outcome for two buffers without any floor, and how many mismatches there are."""
    book = Ledger(["buffers"])
    book.tensors(Mismatch("buffers", 1), observed, expected, lambda: Floor(0.0, 0.0, 0.0))
    return book.laws()[0].outcome, len(book.mismatches)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_tensor_of_any_type_is_compared_kept_shipped_and_recognised(dtype: torch.dtype, tmp_path: Path) -> None:
    one, two = of(dtype), of(dtype, other=True)
    assert same_bits(one, one.clone())
    assert not same_bits(one, two)
    assert not torch.equal(bits(one), bits(two))
    assert all_finite(one)
    assert any_nonzero(one)
    assert (error(one, one.clone()), error(two, one) >= 0) == (0.0, True)
    assert recorded_digest(one) != recorded_digest(two)
    assert sketch(one).digest != sketch(two).digest
    assert same_bits(unpack(pack(one)), one)
    assert compared(two, one) in {("fail", 1), ("pass", 0)}
    record = Record("expected", {}, (RecordedOperation("train", (), (), buffers={"a": one}),))
    with OutputFile(str(tmp_path / "x")) as file:
        write(record, file)
    assert same_bits(read(tmp_path / "x").operations[0].buffers["a"], one)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_step_of_a_model_with_any_type_is_judged_by_a_record_and_beside_the_model(dtype: torch.dtype) -> None:
    floors = not str(dtype).startswith("torch.float4")  # which torch cannot make fp64 of
    record = record_step(build(dtype), DATA, loss_fn=loss_fn, floors=floors)
    beside = SingleDevice(lambda: build(dtype), loss_fn, floors=floors)
    for against, other in ((record, False), (record, True), (beside, False)):
        model = build(dtype, other=other)
        with check_step(model, DATA, against=against) as check:
            losses = trained(model, DATA)
            check.gradients()
            check.report(losses=losses)
        assert check.verdict.law("gradient").outcome == "pass", str(check.verdict)
        if against is record:
            assert check.verdict.law("buffers").outcome == ("fail" if other else "pass")


def everything() -> nn.Module:
    """A model with a buffer and a frozen parameter of each type."""
    model = build(torch.uint8)
    for number, dtype in enumerate(TYPES):
        model.add_module(f"of{number}", build(dtype))
    return model


def test_a_step_on_ranks_may_have_every_type(whitebox_here: WhiteBox) -> None:
    step = lambda model, microbatches: (model, trained(model, microbatches))  # noqa: E731
    verdict = whitebox_here.validate(step, reference=everything, microbatches=DATA, ranks=1, loss_fn=loss_fn)
    assert verdict.outcome == "pass", str(verdict)


def test_a_count_that_is_one_off_is_no_rounding_however_large_it_is() -> None:
    for dtype, size in ((torch.int64, 10**6), (torch.int64, 2**53), (torch.int32, 10**7), (torch.uint8, 255)):
        expected = torch.tensor([size], dtype=dtype)
        assert compared(expected - torch.ones(1, dtype=dtype), expected)[0] == "fail", dtype


def test_a_quantised_tensor_is_compared_by_its_values_and_has_no_digest() -> None:
    one, two = (torch.quantize_per_tensor(torch.tensor([1.0, x]), 0.5, 0, torch.qint8) for x in (2.0, 3.0))
    assert same_bits(one, one.clone())
    assert not same_bits(one, two)
    with pytest.raises(ContentError, match=r"a quantised tensor has no digest: .*; dequantize\(\) it"):
        recorded_digest(one)


class Turned(nn.Module):
    """A layer with complex weights, and a real loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.5 + 1j, 2 - 0.25j], [1 + 0j, -0.75j]]))
        self.real = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(self.real(x).to(self.weight.dtype) @ self.weight).sum(-1)


turned = partial(seeded, Turned)


def imaginary(model: nn.Module) -> None:
    """Doubles the imaginary part of the gradient."""
    gradient = model.get_parameter("weight").grad
    gradient.imag.mul_(2)


def test_errors_and_norms_count_imaginary_parts() -> None:
    assert error(torch.tensor([1 + 2j]), torch.tensor([1 + 1j])) == pytest.approx(1.0)
    assert error(torch.tensor([2j]), torch.tensor([1j])) == 1.0


@pytest.mark.parametrize(("fault", "outcome"), [(lambda model: None, "pass"), (imaginary, "fail")])
def test_imaginary_parts_are_compared_in_every_way(
    whitebox_here: WhiteBox, fault: Callable[[nn.Module], None], outcome: str
) -> None:
    def step(model: nn.Module, microbatches: list[Any]) -> Any:
        losses = trained(model, microbatches)
        fault(model)
        return model, losses

    verdicts = [whitebox_here.validate(step, reference=turned, microbatches=DATA, ranks=1, loss_fn=loss_fn)]
    record = record_step(turned(), DATA, loss_fn=loss_fn)
    for against in (record, SingleDevice(turned, loss_fn)):
        model = turned()
        with check_step(model, DATA, against=against) as check:
            losses = trained(model, DATA)
            fault(model)
            check.gradients()
            check.report(losses=losses)
        verdicts.append(check.verdict)
    for verdict in verdicts:
        assert verdict.law("gradient").outcome == outcome, str(verdict)
        assert (verdict.undecided == (UNSOUGHT,)) == (outcome == "fail")
        assert not verdict.causes


def test_a_gradient_off_by_rounding_is_judged_by_floors_of_both_parts() -> None:
    record = record_step(turned(), DATA, loss_fn=loss_fn)
    floors = record.operations[0].floors
    assert 0 < floors.gradients["weight"].rounding < 1e-6


@pytest.mark.parametrize("size", [1, 5, 1000, 3 * 65_521 + 2])
def test_a_brief_sketch_tells_how_far_apart_tensors_are_and_by_how_many_elements(size: int) -> None:
    torch.manual_seed(size)
    one = torch.randn(size)
    other = one + 1e-4 * torch.randn(size)
    assert brief(one.clone()).distance(brief(one)) == 0.0
    assert 0.3 <= brief(other).distance(brief(one)) / error_of(other, one) <= 3.0
    assert brief(other).minus(brief(one)).norm == pytest.approx(brief(other).distance(brief(one)) * one.norm().item())
    odd = one.clone()
    odd[size // 2] += 9.0
    assert brief(odd).distance(brief(one)) == pytest.approx(error_of(odd, one), rel=1e-3)
    assert (brief(odd).usual_distance(brief(one)) == 0.0) == (size > 1)
    assert brief(2 * one).usual_distance(brief(one)) > 0.3
    assert brief(one, known=(known := brief(one))) is known


def error_of(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_sums_of_sketches_are_not_equal_for_want_of_a_digest() -> None:
    one, other = brief(torch.ones(9)), brief(torch.arange(9.0))
    assert one.plus(one).distance(other.plus(other)) > 0.1


def test_a_sum_is_as_narrow_as_the_narrower_of_its_addends() -> None:
    narrow, wide = sketch(torch.ones(4)), sketch(torch.full((4,), 0.1))
    assert narrow.narrow
    assert not wide.narrow
    assert narrow.plus(wide).narrow == wide.plus(narrow).narrow == narrow.narrow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("count", [40, 200_000])
def test_a_norm_is_right_where_squares_have_no_room_in_the_type(dtype: torch.dtype, size: float, count: int) -> None:
    found = sketch(torch.full((count,), size, dtype=dtype))
    assert found.norm == pytest.approx(size * count**0.5, rel=4e-3)
    assert found.narrow == ("bf16" if dtype is torch.bfloat16 else "")

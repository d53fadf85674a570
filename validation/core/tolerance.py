"""How far apart two tensors are, and how far apart rounding alone may put them, measured on this very run.

Sources: the metric is TTrace's relative Frobenius error (arXiv 2506.09280) beside the largest difference over the
largest element; elementwise tolerances and ULPs say nothing about gradients, whose elements cancel near zero.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from pipeproof.core.limits import (
    ALONG,
    AS_LONG,
    FP32,
    FP64,
    HARDLY,
    LEAD,
    LED,
    MANY,
    Precision,
    precision_of,
)
from pipeproof.core.observe.elements import any_nonzero, bits, has_fp64, in_fp64, is_rounded

Key = TypeVar("Key")

_PIECE = 1 << 14  # elements that are compared at once
_PIECE_ON_DEVICE = 1 << 26  # of all tensors together

_NARROW = MappingProxyType({"bf16": torch.bfloat16, "fp16": torch.float16})


@dataclass(frozen=True)
class Floor:
    """What rounding alone does to one tensor on this run, as relative errors.

    permutation: contributions added in reverse order. rounding: against fp64, or, in fp64, against weights that are one
    rounding off. fault: the least that dropping one microbatch would change. nudged: with weights one rounding off,
    where fp64 tells nothing. It lets nothing pass; what it explains is merely no proof of a fault. size: the norm of
    what rounding makes, where the tensor is nothing else, or zero, as where a normalisation takes no notice of a bias:
    what is there instead is compared with that. stride: it is an optimizer's step, which may be as large for such a
    gradient as for any other: one that is as long passes, wherever it leads. driven: an optimizer's step, too, of a
    gradient in which some elements are rounding alone; ``size`` is what rounding made of it. sums: where what is added
    up is rounded coarsely and its sum is not, what rounding that sum alone does: a tensor that is as near is right,
    however coarse the rest is. led: how far rounding may lead along the tensor itself, as a factor does, as sums in
    other orders and types show; infinite where nobody measured it. lead: how far what passes may. alike: tells of an
    observed and an expected tensor whether each microbatch is in both as often, where rounding is as large as half of
    one; None: nothing does.
    """

    permutation: float
    rounding: float
    fault: float
    precision: Precision = FP32
    nudged: float = 0.0
    size: float = 0.0
    stride: bool = False
    driven: bool = False
    sums: "Floor | None" = None
    led: float = math.inf
    lead: float = math.inf
    alike: Callable[[Tensor, Tensor], bool] | None = field(default=None, compare=False, repr=False)

    def through(self, dtype: torch.dtype) -> "Floor":
        """That of a tensor which goes through ``dtype`` as well, if that is the narrower type."""
        narrow = precision_of(dtype)
        if narrow.unit <= self.precision.unit:
            return self
        return replace(self, precision=narrow, rounding=max(self.rounding, narrow.unit), led=math.inf)

    def of_sum(self, part: float, *, parts: int, whole: float, every: float | None = None) -> "Floor":
        """That of a sum of so many ``parts``, to each of which rounding does as much; norms: of this part, of the sum,
        and of all parts added up, if these are not alike.

        Each addition rounds once, to either side: orders are apart by the root of their number.
        """
        if not whole:
            return self
        size, grown, precision = self.size * parts, (part * parts if every is None else every) / whole, self.precision
        if self.noise and whole <= precision.factor * size:
            return replace(self, size=size)
        order = precision.unit * math.sqrt(parts) / 2 * (parts > 1)
        least = size / whole if self.noise else precision.least / precision.factor * grown
        return replace(
            self,
            permutation=max(self.permutation * grown, order),
            rounding=max(self.rounding * grown, least),
            nudged=self.nudged * grown,
            led=self.led * grown,
            fault=self.fault * part / whole,
            size=0.0,
            sums=None if self.sums is None else self.sums.of_sum(part, parts=parts, whole=whole, every=every),
        )

    @property
    def largest(self) -> float:
        return max(self.permutation, self.rounding)

    @property
    def noise(self) -> bool:
        """Whether the tensor is zero, or nothing but rounding: then no fault shows in it."""
        return self.size > 0

    @property
    def blind(self) -> bool:
        """Whether rounding is as large as half a lost microbatch."""
        return not self.noise and 0 < self.fault / 2 <= self.limit

    @property
    def moved(self) -> float:
        """How far weights, or gradients, that are off by rounding may move it."""
        return self.precision.factor * self.nudged

    @property
    def limit(self) -> float:
        """The largest error that still counts as rounding."""
        if self.noise:
            return self.precision.factor
        return min(self.precision.most, max(self.precision.least, self.precision.factor * self.largest))

    def compared(
        self, observed: Tensor, expected: Tensor, *, base: Tensor | None = None, rounded: bool = False
    ) -> tuple[float, str]:
        """The error of two tensors, of rounding alone relative to its ``size``, and its outcome."""
        if self.noise:
            size = distance(observed, expected) / self.size
            return size, self.outcome(size)
        size = error(observed, expected, base=base, rounded=rounded)
        outcome = self.outcome(size)
        if outcome == "unknown" and size <= self.limit and self.alike is not None and self.alike(observed, expected):
            outcome = "pass"
        if outcome == "pass" and size > self.lead and lead(observed, expected) > self.lead:
            outcome = "unknown"
        if self.sums is not None:
            passes = self.sums.outcome(size) == "pass"
            narrow = size > self.sums.limit and rounded_to(self.precision, observed, expected)
            return size, "pass" if passes else "fail" if narrow else outcome
        if outcome == "unknown" and self.stride and base is not None:
            far = distance(observed, base) / max(distance(expected, base), 1e-300)
            outcome = "pass" if 1 / AS_LONG <= far <= AS_LONG else outcome
        return size, outcome

    def reached(self, error: float, outcome: str = "pass") -> "Floor":
        """The floor by which such an error has this outcome: that of the ``sums`` alone, where it passes there."""
        narrow = outcome == "fail" and self.outcome(error) != outcome
        if self.sums is not None and (narrow or self.sums.outcome(error) == "pass"):
            return self.sums
        if outcome == "unknown" and self.lead < error <= self.limit:
            return replace(self, alike=None, precision=replace(self.precision, least=self.lead, most=self.lead))
        return replace(self, alike=None)  # which holds on to what microbatches give

    def number(self, error: float) -> str:
        """The outcome of a number's error."""
        return "pass" if self.sums is not None and self.sums.outcome(error) == "pass" else self.outcome(error)

    def outcome(self, error: float) -> str:
        """``pass``, ``fail``, or ``unknown``: no proof of rounding, and no proof of a fault either.

        That is an error that rounding explains and ``most`` does not excuse, or one below ``most`` that is too small
        for half a lost microbatch.
        """
        if self.noise:  # that anything is lost of nothing cannot be
            return "pass" if error <= self.limit else "unknown" if error <= self.limit**2 else "fail"
        if error <= self.limit:
            return "unknown" if self.blind else "pass"
        explained = error <= max(self.precision.factor * self.largest, self.moved)
        return "unknown" if explained or error < min(self.fault / 2, self.precision.most) else "fail"


def rounded_to(precision: Precision, observed: Tensor, expected: Tensor) -> bool:
    """Whether ``observed``, of a wider type, has numbers of this ``precision`` alone, where many due ones are no such.

    Other kernels give other numbers, but never these alone.
    """
    dtype = _NARROW.get(precision.name)
    if dtype is None or observed.dtype != expected.dtype or observed.shape != expected.shape:
        return False
    if not is_rounded(observed.dtype) or torch.finfo(observed.dtype).eps >= torch.finfo(dtype).eps:
        return False
    wide = [one.to(dtype).to(one.dtype) != one for one in (observed, expected)]
    return bool(observed.any()) and not wide[0].any() and int(wide[1].sum()) >= MANY


def same_bits(observed: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, signs of zero and NaNs included."""
    if observed.shape != expected.shape or observed.dtype != expected.dtype:
        return False
    return torch.equal(bits(observed.to(expected.device)), bits(expected))


def agrees(seen: Tensor, due: Tensor, limit: float) -> bool:
    """Whether ``seen`` is ``due``, bit for bit or within ``limit``."""
    if seen.shape != due.shape or seen.dtype != due.dtype:
        return False
    return same_bits(seen, due) or (seen.is_floating_point() and error(seen, due) <= limit)


def stands_for_none(observed: Tensor | None) -> bool:
    """Whether it is as good as no gradient: zeros, as a sum over ranks gives them that all have none."""
    return observed is None or not any_nonzero(observed)


def error(observed: Tensor, expected: Tensor, *, base: Tensor | None = None, rounded: bool = False) -> float:
    """The larger of |o - e| / |e - b| in the Frobenius and in the maximum norm, in fp64; b is ``base``, or zero.

    ``rounded``: a unit in the last place of each element is no difference, for that is what storing it may do.
    Nor is one infinity, or NaN, where both have it. 0 where both are zero; infinite where only the divisor is, where
    shapes differ, or where something is not finite. Real and imaginary parts of complex numbers count each.
    """
    if observed.shape != expected.shape:
        return float("inf")
    unit = torch.finfo(expected.dtype).eps if rounded and is_rounded(expected.dtype) else 0.0
    parts = pieces(observed, expected, *([] if base is None else [base]))
    return relative(difference(one, wanted, unit, *origin) for one, wanted, *origin in parts)


def distance(observed: Tensor, expected: Tensor) -> float:
    """The norm of their difference; infinite where shapes differ, or where something is not finite."""
    if observed.shape != expected.shape:
        return math.inf
    gap = math.sqrt(sum(float((one - other).square().sum()) for one, other in pieces(observed, expected)))
    return gap if gap == gap else math.inf


def lead(observed: Tensor, expected: Tensor) -> float:
    """How far ``observed`` is from ``expected`` along that one itself: 0.01 where it is 1.01 times as large."""
    pairs = [((one - wanted) * wanted).sum() for one, wanted in pieces(observed, expected)]
    size = sum(float(wanted.square().sum()) for _, wanted in pieces(observed, expected))
    return abs(float(sum(pairs))) / size if size else 0.0


def difference(one: Tensor, wanted: Tensor, unit: float, origin: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """How far ``one`` is from ``wanted``, and what that is relative to. ``unit``: so much of each is nothing."""
    apart = ((one - wanted).abs() - unit * wanted.abs()).clamp(min=0)
    size = wanted if origin is None else wanted - origin
    endless = ~wanted.isfinite() & ((one == wanted) | (one.isnan() & wanted.isnan()))
    return apart.masked_fill(endless, 0.0), size.masked_fill(endless, 0.0)


def relative(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The larger of |top| / |bottom| in both norms, of tensors that come piece by piece."""
    squares, largest = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for pair in pairs:
        squares += torch.stack([each.square().sum() for each in pair]).cpu()
        largest = torch.maximum(largest, torch.stack([each.abs().amax() for each in pair]).cpu())
    return max(_ratio(*squares.sqrt()), _ratio(*largest))


def may_be_rounded(gradient: Tensor | None, before: Tensor, after: Tensor) -> bool:
    """Whether storing a parameter may have moved it: not one that stands still, and has no gradient to move it."""
    return (gradient is not None and bool(gradient.any())) or not same_bits(before, after)


def update_floor(gradient: Floor, before: Tensor, after: Tensor, given: Tensor | None = None) -> Floor:
    """The floor of a parameter's update, what storing the parameter does to its last place left aside.

    It is its gradient's, unless the last place is as large as half of the smallest fault: then no agreement proves
    anything. ``given`` is the gradient, for a larger update is no rounding even where that is: Adam makes any gradient
    large, and weight decay needs none.
    """
    if gradient.noise:
        gradient = _of_noise(gradient, before, after, given)
    place = torch.finfo(after.dtype).eps if is_rounded(after.dtype) else 0.0
    blind = relative((place * new, new - old) for new, old in pieces(after, before)) >= gradient.fault / 2
    return replace(gradient, fault=min(gradient.fault, gradient.precision.least)) if blind else gradient


def _of_noise(gradient: Floor, before: Tensor, after: Tensor, given: Tensor | None) -> Floor:
    """The floor of an update by ``given``, a gradient of rounding alone, or zero."""
    moved, size = distance(after, before), 0.0 if given is None else distance(given, torch.zeros_like(given))
    if moved <= size and size:
        return replace(gradient, size=gradient.size * moved / size or gradient.size)
    if not moved:  # what the optimizer makes of any other gradient than zero, nobody knows
        return replace(gradient, size=0.0, nudged=math.inf)
    along = sum(float(((new - old) * old).sum()) for new, old in pieces(after, before))
    decay = abs(along) > ALONG * moved * distance(before, torch.zeros_like(before))
    return replace(gradient, size=0.0, stride=not decay)


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape side by side, flat and in fp64, piece by piece: whole ones would take much memory.

    They come on a device where any of them is on one that has fp64, else on the host. Complex numbers come as their
    real and imaginary parts, and go with real ones that have none.
    """
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    pairs = any(tensor.is_complex() for tensor in flat)
    place = next((one.device for one in flat if not one.is_cpu and has_fp64(one.device)), torch.device("cpu"))
    size = _PIECE if place.type == "cpu" else _PIECE_ON_DEVICE // len(flat)
    for start in range(0, max(1, flat[0].numel()), size):
        parts = (tensor[start : start + size].to(place) for tensor in flat)
        yield tuple(in_fp64(part.to(torch.complex128) if pairs else part) for part in parts)


def in_both(one: Mapping[Key, Tensor | None], other: Mapping[Key, Tensor | None]) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors that are in both under one key."""
    for key, tensor in one.items():
        if tensor is not None and (beside := other.get(key)) is not None:
            yield tensor, beside


def scalar_error(observed: float, expected: float) -> float:
    """|o - e| / |e|."""
    return error(torch.tensor(observed, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64))


def unmeasured(precision: Precision = FP32, *, permutation: float = 0.0, nudged: float = 0.0) -> Floor:
    """The floor of numbers whose rounding nobody measured: little is rounding, much is wrong, between is unknown."""
    return Floor(permutation, 0.0, 4 * precision.most, precision, nudged)


def floor_of(
    expected: Tensor,
    others: Sequence[Tensor],
    apart: Tensor,
    parts: Sequence[Tensor | None],
    *,
    again: Callable[[], Tensor | None] = lambda: None,
    computed: Precision = FP64,
) -> Floor:
    """The floor of a sum: ``others`` are the same sum in other orders, ``apart`` rounded otherwise, ``parts`` its
    summands, which say how coarse it is, as ``computed`` does, ``again`` as of ``rounding_of``.

    Other kernels, which give other tensors, lead farther.
    """
    given = [part for part in parts if part is not None]
    wide = precision_of(expected.dtype)
    coarse = max((*(precision_of(one.dtype) for one in (*given, expected)), computed), key=_unit)
    floor = rounding_of(expected, apart, again=again, precision=coarse)
    permutation = max((floor.compared(other, expected)[0] for other in others), default=0.0)
    size = in_fp64(expected).norm()
    fault = min((_ratio(in_fp64(part).norm(), size) for part in given), default=0.0)
    if floor.noise:
        return replace(floor, permutation=permutation, fault=0.0)
    sums = Floor(permutation, 0.0, fault, wide) if wide.unit < coarse.unit else None
    narrow = coarse.unit > FP32.unit  # wider types leave no room for what leads
    led = max([LEAD * coarse.unit, *(LED * lead(one, expected) for one in (*others, apart))]) if narrow else math.inf
    return replace(floor, permutation=permutation, fault=fault, sums=sums, led=led)


def rounding_of(
    expected: Tensor,
    apart: Tensor,
    *,
    again: Callable[[], Tensor | None] = lambda: None,
    precision: Precision | None = None,
) -> Floor:
    """The floor of a tensor by what it is ``apart``, in fp64. ``again`` makes it with other rounding in its own type.

    It is rounding alone if hardly anything is there in fp64. How much that makes, ``again`` shows, as where the tensor
    itself is zero: so much, but no more than what is left in fp64 says, where that is rounding too.
    """
    precision = precision or precision_of(expected.dtype)
    size, left = in_fp64(expected).norm().item(), in_fp64(apart).norm().item()
    if left <= HARDLY * size or not size:
        other = again()
        more = 0.0 if other is None else in_fp64(other).norm().item()
        size = max(size, min(more, left * precision.unit / FP64.unit))
    floor = Floor(0.0, 0.0, 0.0, precision, size=size if left <= HARDLY * size else 0.0)
    apart_by = floor.compared(apart, expected)[0] if floor.noise else error(expected, apart)
    return replace(floor, rounding=apart_by)


def _unit(precision: Precision) -> float:
    return precision.unit


def _ratio(top: Tensor, bottom: Tensor) -> float:
    if top.item() == 0.0:
        return 0.0
    value = top.item() / bottom.item() if bottom.item() else float("inf")
    return value if value == value else float("inf")

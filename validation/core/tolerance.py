"""Tensor distances, and distances that rounding alone may cause, measured on the actual run.

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

from pipeproof.core.limits import ALONG, AS_LONG, FP32, FP64, HARDLY, LEAD, LED, MANY, Precision, coarsest, precision_of
from pipeproof.core.mismatch import Size
from pipeproof.core.observe.elements import any_nonzero, bits, has_fp64, in_fp64, is_rounded

Key = TypeVar("Key")

_PIECE = 1 << 14  # elements per comparison
_PIECE_ON_DEVICE = 1 << 26  # for all tensors together

_NARROW = MappingProxyType({"bf16": torch.bfloat16, "fp16": torch.float16})


@dataclass(frozen=True)
class Floor:
    """Rounding effects on one tensor, as relative errors.

    permutation: additions in reverse order. rounding: against fp64, or, in fp64, against weights one rounding off.
    fault: smallest change from one dropped microbatch. nudged: with weights one rounding off, where fp64 fails; it
    passes nothing, but prevents a fail. size: norm produced by rounding, if the tensor is zero or pure rounding, such
    as a bias before a normalisation; observed values are compared with it. stride: an optimizer step from such a
    gradient, as long as any other; equal length passes, in any direction. driven: an optimizer step from a gradient
    with some pure-rounding elements; ``size`` is their effect. sums: floor for the sum alone, if summands round more
    coarsely than their sum; a tensor this near is right. led: largest lead along the tensor, as from a factor, under
    sums in other orders and types; infinite if unmeasured. lead: largest lead that may pass. alike: compares microbatch
    shares in observed and expected tensors, if rounding reaches half a share; None without such a test.
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
        """Return the floor after a cast through ``dtype``, if narrower. A sum so cast rounds no less than that."""
        narrow, sums = precision_of(dtype), self.sums
        cast = self if sums is None or narrow.unit <= sums.precision.unit else replace(self, sums=None)
        if narrow.unit <= self.precision.unit:
            return cast
        return replace(cast, precision=narrow, rounding=max(self.rounding, narrow.unit), led=math.inf)

    def of_sum(self, part: float, *, parts: int, whole: float, every: float | None = None) -> "Floor":
        """Return the floor for a sum with ``parts`` equally rounded summands.

        part, whole, every: norms of a summand, the sum, and all summands added up. Each addition rounds once, either
        way: orders differ by the root of their number.
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
        """True for a tensor that is zero or pure rounding: no fault can show in it."""
        return self.size > 0

    @property
    def blind(self) -> bool:
        """True if rounding reaches half a lost microbatch."""
        return not self.noise and 0 < self.fault / 2 <= self.limit

    @property
    def moved(self) -> float:
        """Movement that rounding in weights or gradients may cause."""
        return self.precision.factor * self.nudged

    @property
    def limit(self) -> float:
        """Largest error that counts as rounding."""
        if self.noise:
            return self.precision.factor
        return min(self.precision.most, max(self.precision.least, self.precision.factor * self.largest))

    def compare(
        self, observed: Tensor, expected: Tensor, *, base: Tensor | None = None, rounded: bool = False
    ) -> tuple[float, str, "Floor"]:
        """Return the tensors' error, relative to ``size`` for pure rounding, its outcome, and the floor behind it.

        That floor is ``sums`` alone, if it decides.
        """
        floor = replace(self, alike=None)  # drops the microbatches' contributions
        if self.noise:
            size = distance(observed, expected) / self.size
            return size, self.outcome(size), floor
        size = error(observed, expected, base=base, rounded=rounded)
        outcome = self.outcome(size)
        if outcome == "unknown" and size <= self.limit and self.alike is not None and self.alike(observed, expected):
            outcome = "pass"
        if outcome == "pass" and size > self.lead and lead(observed, expected) > self.lead:
            outcome = "unknown"
        if self.sums is not None and self.sums.outcome(size) == "pass":
            return size, "pass", self.sums
        if self.sums is not None and size > self.sums.limit and is_rounded_to(self.precision, observed, expected):
            return size, "fail", floor if self.outcome(size) == "fail" else self.sums
        if outcome == "unknown" and self.lead < size <= self.limit:
            floor = replace(floor, precision=replace(self.precision, least=self.lead, most=self.lead))
        if outcome == "unknown" and self.stride and base is not None:
            far = distance(observed, base) / max(distance(expected, base), 1e-300)
            outcome = "pass" if 1 / AS_LONG <= far <= AS_LONG else outcome
        return size, outcome, floor

    def number(self, error: float) -> tuple[str, "Floor"]:
        """Return the outcome for a number's error, and the floor behind it."""
        if self.sums is not None and self.sums.outcome(error) == "pass":
            return "pass", self.sums
        return self.outcome(error), self

    def outcome(self, error: float) -> str:
        """Return ``pass``, ``fail``, or ``unknown`` if neither rounding nor a fault is proven.

        Unknown: rounding explains the error but ``most`` does not excuse it, or an error below ``most`` is too small
        for half a lost microbatch.
        """
        if self.noise:  # zero has no parts to lose
            return "pass" if error <= self.limit else "unknown" if error <= self.limit**2 else "fail"
        if error <= self.limit:
            return "unknown" if self.blind else "pass"
        explained = error <= max(self.precision.factor * self.largest, self.moved)
        return "unknown" if explained or error < min(self.fault / 2, self.precision.most) else "fail"


def is_rounded_to(precision: Precision, observed: Tensor, expected: Tensor) -> bool:
    """True if ``observed``, in a wider type, has only values in ``precision``, unlike ``expected``.

    Other kernels change values, but never to narrow ones alone.
    """
    dtype = _NARROW.get(precision.name)
    if dtype is None or observed.dtype != expected.dtype or observed.shape != expected.shape:
        return False
    if not is_rounded(observed.dtype) or torch.finfo(observed.dtype).eps >= torch.finfo(dtype).eps:
        return False
    wide = [one.to(dtype).to(one.dtype) != one for one in (observed, expected)]
    return bool(observed.any()) and not wide[0].any() and int(wide[1].sum()) >= MANY


def same_bits(observed: Tensor, expected: Tensor) -> bool:
    """Compare two tensors bit for bit, including zero signs and NaNs."""
    if observed.shape != expected.shape or observed.dtype != expected.dtype:
        return False
    return torch.equal(bits(observed.to(expected.device)), bits(expected))


def agrees(observed: Tensor, expected: Tensor, limit: float) -> bool:
    """Compare two tensors, bit for bit or within ``limit``."""
    if observed.shape != expected.shape or observed.dtype != expected.dtype:
        return False
    return same_bits(observed, expected) or (observed.is_floating_point() and error(observed, expected) <= limit)


def stands_for_none(observed: Tensor | None) -> bool:
    """True for None or zeros: a sum over ranks turns None into zeros."""
    return observed is None or not any_nonzero(observed)


def error(observed: Tensor, expected: Tensor, *, base: Tensor | None = None, rounded: bool = False) -> float:
    """Return the larger of |o - e| / |e - b| in Frobenius and maximum norm, in fp64; b is ``base`` or zero.

    ``rounded``: ignore one unit in each element's last place, as storing causes. Equal infinities, and NaN beside NaN,
    have no difference. 0 if both are zero; infinite if only the divisor is, if shapes differ, or for non-finite values.
    Real and imaginary parts count separately.
    """
    if observed.shape != expected.shape:
        return float("inf")
    unit = torch.finfo(expected.dtype).eps if rounded and is_rounded(expected.dtype) else 0.0

    def differences() -> Iterator[tuple[Tensor, Tensor]]:
        for one, wanted, *origin in pieces(observed, expected, *([] if base is None else [base])):
            apart = ((one - wanted).abs() - unit * wanted.abs()).clamp(min=0)
            endless = ~wanted.isfinite() & ((one == wanted) | (one.isnan() & wanted.isnan()))
            size = wanted - origin[0] if origin else wanted
            yield apart.masked_fill(endless, 0.0), size.masked_fill(endless, 0.0)

    return relative(differences())


def distance(observed: Tensor, expected: Tensor) -> float:
    """Return the difference's norm; infinite for unequal shapes or non-finite values."""
    if observed.shape != expected.shape:
        return math.inf
    gap = math.sqrt(sum(float((one - other).square().sum()) for one, other in pieces(observed, expected)))
    return gap if gap == gap else math.inf


def lead(observed: Tensor, expected: Tensor) -> float:
    """Return the relative deviation along ``expected``: 0.01 at 1.01 times its size."""
    pairs = [((one - wanted) * wanted).sum() for one, wanted in pieces(observed, expected)]
    size = sum(float(wanted.square().sum()) for _, wanted in pieces(observed, expected))
    return abs(float(sum(pairs))) / size if size else 0.0


def relative(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the larger ratio |top| / |bottom| over both norms, for tensors in pieces."""
    squares, largest = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for pair in pairs:
        squares += torch.stack([each.square().sum() for each in pair]).cpu()
        largest = torch.maximum(largest, torch.stack([each.abs().amax() for each in pair]).cpu())
    return max(_ratio(*squares.sqrt()), _ratio(*largest))


def update_floor(gradient: Floor, before: Tensor, after: Tensor, given: Tensor | None = None) -> Floor:
    """Return the floor for a parameter's update, storage rounding excluded.

    It equals the gradient's floor, unless the last place reaches half the smallest fault: then agreement proves
    nothing. ``given``: the gradient, since pure rounding still excuses no longer update: Adam enlarges any gradient,
    and weight decay needs none.
    """
    if gradient.noise:
        moved, size = distance(after, before), 0.0 if given is None else distance(given, torch.zeros_like(given))
        if moved <= size and size:
            gradient = replace(gradient, size=gradient.size * moved / size or gradient.size)
        elif not moved:  # the optimizer's response to other gradients is unknown
            gradient = replace(gradient, size=0.0, nudged=math.inf)
        else:
            along = sum(float(((new - old) * old).sum()) for new, old in pieces(after, before))
            decay = abs(along) > ALONG * moved * distance(before, torch.zeros_like(before))
            gradient = replace(gradient, size=0.0, stride=not decay)
    place = torch.finfo(after.dtype).eps if is_rounded(after.dtype) else 0.0
    blind = relative((place * new, new - old) for new, old in pieces(after, before)) >= gradient.fault / 2
    return replace(gradient, fault=min(gradient.fault, gradient.precision.least)) if blind else gradient


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield flat fp64 pieces from equally shaped tensors; whole copies would need much memory.

    Pieces lie on a device with fp64, if any tensor does, otherwise on the host. Complex tensors come as real and
    imaginary parts, next to real ones.
    """
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    pairs = any(tensor.is_complex() for tensor in flat)
    place = next((one.device for one in flat if not one.is_cpu and has_fp64(one.device)), torch.device("cpu"))
    size = _PIECE if place.type == "cpu" else _PIECE_ON_DEVICE // len(flat)
    for start in range(0, max(1, flat[0].numel()), size):
        parts = (tensor[start : start + size].to(place) for tensor in flat)
        yield tuple(in_fp64(part.to(torch.complex128) if pairs else part) for part in parts)


def sizes(observed: Tensor, expected: Tensor, base: Tensor | None) -> tuple[Size, Size]:
    """Describe two tensors in numbers: norms, factor and cosine."""
    shapes = tuple(observed.shape), tuple(expected.shape)
    if observed.shape != expected.shape:
        return Size(shapes[0]), Size(shapes[1])
    sums = torch.zeros(4, dtype=torch.float64)  # squares: observed, expected, start; then products
    for one, other, *origin in pieces(observed, expected, *([] if base is None else [base])):
        moved, wanted = (one - origin[0], other - origin[0]) if origin else (one, other)
        start = origin[0] if origin else torch.zeros_like(one[:0])
        sums += torch.stack(
            [(moved * moved).sum(), (wanted * wanted).sum(), (start * start).sum(), (moved * wanted).sum()]
        ).cpu()
    product = sums[3].item()
    observed_norm, wanted_norm, start_norm = sums[:3].sqrt().tolist()
    began, factor, cosine = None if base is None else start_norm, None, None
    if observed_norm and wanted_norm:  # not their product: a NaN would hide a zero
        factor, cosine = product / wanted_norm / wanted_norm, product / wanted_norm / observed_norm
    return Size(shapes[0], observed_norm, began, factor, cosine), Size(shapes[1], wanted_norm, began)


def in_both(one: Mapping[Key, Tensor | None], other: Mapping[Key, Tensor | None]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tensor pairs that share a key."""
    for key, tensor in one.items():
        if tensor is not None and (beside := other.get(key)) is not None:
            yield tensor, beside


def scalar_error(observed: float, expected: float) -> float:
    """|o - e| / |e|."""
    return error(torch.tensor(observed, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64))


def default_floor(precision: Precision = FP32, *, permutation: float = 0.0, nudged: float = 0.0) -> Floor:
    """Return a floor for unmeasured numbers: little passes, much fails, between is unknown."""
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
    """Return a sum's floor: ``others`` are the same sum in other orders, ``apart`` is rounded otherwise.

    parts: summands; their types, and ``computed``, say how coarse the sum is. again: as in ``rounding_of``. Other
    kernels, which give other tensors, lead farther.
    """
    given = [part for part in parts if part is not None]
    wide = precision_of(expected.dtype)
    coarse = coarsest([*(precision_of(one.dtype) for one in (*given, expected)), computed])
    floor = rounding_of(expected, apart, again=again, precision=coarse)
    permutation = max((floor.compare(other, expected)[0] for other in others), default=0.0)
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
    """Return a tensor's floor from its distance to ``apart``, in fp64. ``again`` recomputes it with other rounding.

    If fp64 leaves hardly anything, the tensor is pure rounding. Then ``again`` shows its size, even for a zero tensor,
    up to what the fp64 remainder implies.
    """
    precision = precision or precision_of(expected.dtype)
    size, left = in_fp64(expected).norm().item(), in_fp64(apart).norm().item()
    if left <= HARDLY * size or not size:
        other = again()
        more = 0.0 if other is None else in_fp64(other).norm().item()
        size = max(size, min(more, left * precision.unit / FP64.unit))
    floor = Floor(0.0, 0.0, 0.0, precision, size=size if left <= HARDLY * size else 0.0)
    apart_by = floor.compare(apart, expected)[0] if floor.noise else error(expected, apart)
    return replace(floor, rounding=apart_by)


def _ratio(top: Tensor, bottom: Tensor) -> float:
    if top.item() == 0.0:
        return 0.0
    value = top.item() / bottom.item() if bottom.item() else float("inf")
    return value if value == value else float("inf")

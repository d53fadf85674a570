"""What a tensor really is, told by its content: another microbatch's, an earlier step's, a multiple, nothing."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from validation.judging.tolerance import FP32, error, precision_of
from validation.observers.identity import NARROWER, Label, What
from validation.observers.recording import Point

_SAMPLED = 256
_TELLING = 0.25  # where rounding may have made more of a tensor than that, it is like any other
_ROUNDING = 1 + 1e-12  # of the comparison itself


class Likes:
    """Tensors (N) of one shape and type, none of them zero."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def near(self, seen: Tensor, limit: float, *, size: float = 0.0) -> Iterator[int]:
        """Those within ``limit`` of ``seen``, relative to their size, or to ``size`` where that is larger."""
        limits = limit * (size / self._largest).clamp_min(1.0)
        gaps = (self._few - _few(seen)).abs().amax(dim=1)
        told = limits <= _TELLING
        likely = ((gaps <= limits * self._largest * _ROUNDING) & told).nonzero().flatten().tolist()
        return (k for k in likely if error(seen, self._tensors[k]) <= limits[k].item())

    @cached_property
    def _few(self) -> Tensor:
        """The same few elements of each (N, K)."""
        return torch.stack([_few(tensor) for tensor in self._tensors])

    @cached_property
    def _largest(self) -> Tensor:
        """The largest element of each (N)."""
        return torch.stack([tensor.abs().amax().double() for tensor in self._tensors])


def _few(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _SAMPLED)].double()


_GARBAGE = 1e12  # times the largest expected element: no arithmetic error comes near
_TINY = 1e-30  # memory that was never written is full of numbers below this
_SMALL = 1000  # whole numbers up to this are equal by chance
_FEW = 8  # equal elements that could be chance
_MANY = 32  # elements of which it shows whether what was added to them is noise
_NOISE = 0.5  # of the size of a tensor: with more than that little of it is its own
_EVERYWHERE = 0.9  # of all elements
_CHANCE = 4.0  # standard deviations that chance does not reach


class Catalogue:
    """Tensors of the reference, found again by content. Those with the same bits are one tensor of several labels."""

    def __init__(self, known: Iterable[tuple[Label, Tensor]]) -> None:
        self._labels: dict[bytes, list[Label]] = {}
        self._like: dict[str, list[tuple[list[Label], Tensor]]] = {}
        self._likes: dict[str, Likes] = {}
        for label, tensor in known:
            if _telling(tensor):
                labels = self._labels.setdefault(_digest(tensor), [])
                if not labels:
                    self._like.setdefault(_form(tensor), []).append((labels, tensor))
                labels.append(label)

    def find(self, seen: Tensor, at: Point, *, limit: float) -> Label | None:
        """Whose ``seen`` is: the nearest of those with its bits, or else within ``limit`` of it."""
        labels = self._labels.get(_digest(seen), [])
        if not labels and seen.is_floating_point():
            labels = [label for labels, _ in self.near(seen, limit) for label in labels]
        return min(labels, default=None, key=lambda label: _distance(label, at))

    def like(self, seen: Tensor) -> list[tuple[list[Label], Tensor]]:
        """All tensors of ``seen``'s shape and type, with their labels."""
        return self._like.get(_form(seen), [])

    def near(self, seen: Tensor, limit: float, *, size: float = 0.0) -> Iterator[tuple[list[Label], Tensor]]:
        """Those within ``limit`` of ``seen``, relative to their size, or to ``size`` where that is larger."""
        known, form = self.like(seen), _form(seen)
        if known and form not in self._likes:
            self._likes[form] = Likes([tensor for _, tensor in known])
        return (known[k] for k in self._likes[form].near(seen, limit, size=size)) if known else iter(())


def what_is(
    seen: Tensor | None, expected: Tensor | None, at: Point, *, known: Catalogue, limit: float = FP32.least
) -> What | None:
    """What ``seen`` is in place of ``expected``; None where it is what it should be, up to ``limit``."""
    if seen is None or expected is None:
        if seen is expected:
            return None
        text = "nothing" if seen is None else "a tensor where there should be none"
        return What("missing" if seen is None else "unexpected", text)
    if agrees(seen, expected, limit):
        return None
    found = known.find(seen, at, limit=limit)
    if found is not None and found != Label(at):
        wanted = f"expected microbatch {at.microbatch}'s"
        return What("stale" if found.ago else "other", f"{found.text(at)}, {wanted}", label=found)
    if seen.shape != expected.shape or seen.dtype != expected.dtype:
        return What("shape", f"{_form(seen)}, expected {_form(expected)}")
    return _compared(seen, expected, at, known, limit)


def agrees(seen: Tensor, expected: Tensor, limit: float) -> bool:
    """Whether ``seen`` is ``expected``, bit for bit or within ``limit``."""
    if seen.shape != expected.shape or seen.dtype != expected.dtype:
        return False
    if _same(seen, expected).all():
        return True
    return seen.is_floating_point() and error(seen, expected) <= limit


def _compared(seen: Tensor, expected: Tensor, at: Point, known: Catalogue, limit: float) -> What:
    """``seen`` has the shape and type of ``expected``, and no other's content."""
    for name, dtype in NARROWER.items():
        if seen.is_floating_point() and seen.dtype.itemsize > dtype.itemsize and _rounded(seen, expected, dtype):
            return What("rounded", f"{name}-rounded")
    if not seen.any():
        return What("zero", "zero")
    partial = _partial(seen, expected, at, known)
    if partial is not None:
        return partial
    if not seen.is_floating_point():
        return What("different", f"other integers, {int((seen != expected).sum())} of {seen.numel()} differ")
    bad = int((~seen.isfinite()).sum())
    if bad:
        return What("not-finite", f"not finite in {bad} of {seen.numel()} elements")
    rounding = max(limit, precision_of(expected.dtype).least)
    factor = factor_of(seen, expected, rounding)
    if factor is not None and abs(factor - 1) > rounding:  # once the expected, but for rounding, is no multiple of it
        return What("multiple", f"{factor:.6g} times the expected", factor=factor)
    if _garbage(seen, expected):
        return What("uninitialised", "uninitialised: no such numbers come from arithmetic")
    return _mixed(seen, expected, at, known, limit)


def _mixed(seen: Tensor, expected: Tensor, at: Point, known: Catalogue, limit: float) -> What:
    if seen.numel() >= _FEW and torch.equal(seen.flatten().sort().values, expected.flatten().sort().values):
        parts = "rows" if _same_rows(seen, expected) else "elements"
        return What("reordered", f"its own {parts} in another order")
    difference = (seen.double() - expected.double()).to(seen.dtype)
    size = max(seen.abs().max().item(), expected.abs().max().item())
    rounding = max(limit, precision_of(expected.dtype).least)
    for (label, *_), _ in known.near(difference, rounding, size=4 * size):
        return What("sum", f"the expected plus {label.text(at)}", label=label)
    if _noisy(seen, expected):
        return What("noisy", f"the expected plus noise of {error(seen, expected):.2g} times its size")
    cosine = torch.nn.functional.cosine_similarity(seen.double().flatten(), expected.double().flatten(), dim=0).item()
    return What("different", f"like nothing known: relative error {error(seen, expected):.1e}, cosine {cosine:.4f}")


def _same_rows(seen: Tensor, expected: Tensor) -> bool:
    """Whether a batch of the same rows has them in another order."""
    if seen.dim() < 2 or not len(seen):
        return False
    one, other = (sorted(map(tuple, tensor.flatten(1).tolist())) for tensor in (seen, expected))
    return one == other


def _noisy(seen: Tensor, expected: Tensor) -> bool:
    """Whether what was added is small, is nearly everywhere, and has nothing to do with what it was added to."""
    one, two = seen.double().flatten(), expected.double().flatten()
    added = one - two
    if len(two) < _MANY or (added != 0).double().mean() < _EVERYWHERE or added.norm() > _NOISE * two.norm():
        return False
    pairs = ((added, two), (added, torch.ones_like(two)), (added[:-1], added[1:]))
    cosines = [torch.nn.functional.cosine_similarity(*pair, dim=0).abs().item() for pair in pairs]
    return max(cosines) <= _CHANCE / math.sqrt(len(two))


def factor_of(seen: Tensor, expected: Tensor, limit: float) -> float | None:
    """The factor c for which ``seen`` is c times ``expected``, within ``limit``; None if there is none."""
    one, two = seen.double().flatten(), expected.double().flatten()
    square = (two @ two).item()
    if not square or seen.numel() < 2 or not bool(one.isfinite().all()):
        return None
    factor = (one @ two).item() / square
    if factor == 0.0 or (one - factor * two).norm().item() > limit * abs(factor) * two.norm().item():
        return None
    return factor


def _partial(seen: Tensor, expected: Tensor, at: Point, known: Catalogue) -> What | None:
    """One run of elements differs, and enough of the others are right that this is no chance."""
    same = _same(seen, expected)
    telling = same & (expected.flatten() != 0)
    wrong = (~same).nonzero().flatten()
    if int(telling.sum()) < max(_FEW, seen.numel() // 64):
        return None
    first, last = int(wrong[0]), int(wrong[-1])
    if len(wrong) < (last - first + 1) * 0.9:
        return None
    place = f"from element {first}" if last == seen.numel() - 1 and first else f"in elements {first} to {last}"
    inside = slice(first, last + 1)
    owner = next(
        (of[0] for of, t in known.like(seen) if _same(seen, t)[inside].all() and t.flatten()[inside].any()), None
    )
    content = f" with {owner.text(at)}" if owner is not None else _content(seen.flatten()[inside])
    return What("partial", f"partly overwritten {place}{content}", label=owner)


def _content(part: Tensor) -> str:
    if not part.any():
        return " with zeros"
    return " with NaN" if part.is_floating_point() and bool(part.isnan().all()) else ""


def _rounded(seen: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """All of ``seen`` can be said in ``dtype``, all of ``expected`` cannot, and they differ by rounding alone."""
    narrow = seen.to(dtype).to(seen.dtype)
    if not bool(_same(narrow, seen).all()) or bool(_same(expected.to(dtype).to(expected.dtype), expected).all()):
        return False
    return error(seen, expected) <= 2 * torch.finfo(dtype).eps


def _garbage(seen: Tensor, expected: Tensor) -> bool:
    size = seen.abs()
    tiny = ((size > 0) & (size < _TINY)).sum().item()
    constant = seen.numel() >= _FEW and bool((seen == seen.flatten()[0]).all())
    return constant or tiny > seen.numel() // 4 or size.max().item() > _GARBAGE * max(expected.abs().max().item(), 1.0)


def _telling(tensor: Tensor) -> bool:
    """Whether it is no chance if another tensor has this content."""
    if tensor.numel() == 1:
        return not tensor.is_floating_point() and abs(int(tensor)) > _SMALL
    return bool(tensor.any())


def _same(one: Tensor, other: Tensor) -> Tensor:
    """Element by element: the same bits. Both have one shape and type."""
    width = one.element_size()
    bits = [tensor.contiguous().flatten().view(torch.uint8).view(-1, width) for tensor in (one, other)]
    return (bits[0] == bits[1]).all(dim=1)


def _digest(tensor: Tensor) -> bytes:
    content = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content + _form(tensor).encode(), digest_size=16).digest()


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _distance(label: Label, at: Point) -> tuple[int, ...]:
    point = label.point
    return (point.where != at.where, label.ago, point.stage != at.stage, abs(point.stage - at.stage), point.microbatch)

"""Tensors of the reference, found again by their content: what a wrong tensor may really be, or be made of."""

import hashlib
from collections.abc import Iterable, Iterator
from functools import cached_property

import torch
from torch import Tensor

from pipeproof.core.observe.elements import bits
from pipeproof.core.observe.likeness import Label
from pipeproof.core.tolerance import error
from pipeproof.explain.limits import LITTLE, MOST, TELLING

_ROUNDING = 1 + 1e-12  # of the comparison itself
_SMALL = 1000  # whole numbers up to this are equal by chance

Owned = tuple[list[Label], Tensor]


class Alike:
    """Tensors of one shape and type, none of them zero (N)."""

    def __init__(self) -> None:
        self.owned: list[Owned] = []

    def near(self, seen: Tensor, limit: float) -> Iterator[Owned]:
        """Those within ``limit`` of ``seen``, relative to their size."""
        if limit > TELLING:
            return
        gaps = (self._few - _few(seen)).abs().amax(dim=1)
        likely = (gaps <= limit * self._largest * _ROUNDING).nonzero().flatten().tolist()
        yield from (self.owned[k] for k in likely if error(seen, self.owned[k][1]) <= limit)

    def beside(self, own: Tensor, seen: Tensor) -> Iterator[Owned]:
        """Those with which ``own`` leaves little of ``seen``, as far as a few elements tell; all in one go."""
        base = _unit(_few(own)[None])[0]
        target = _few(seen)
        rest, rows = target - (target @ base) * base, self._few - (self._few @ base)[:, None] * base
        unit = _unit(rows)
        left = (rest - (unit @ rest)[:, None] * unit).norm(dim=1)
        yield from (self.owned[k] for k in (left <= LITTLE * target.norm()).nonzero().flatten().tolist())

    @cached_property
    def _few(self) -> Tensor:
        """The same few elements of each (N, K)."""
        return torch.stack([_few(tensor) for _, tensor in self.owned])

    @cached_property
    def _largest(self) -> Tensor:
        """The largest element of each (N)."""
        return torch.stack([tensor.abs().amax().double() for _, tensor in self.owned])


class Known:
    """Tensors with their labels. Those with the same bits are one tensor of several labels."""

    def __init__(self, tensors: Iterable[tuple[Label, Tensor]] = ()) -> None:
        self._labels: dict[bytes, list[Label]] = {}
        self._alike: dict[str, Alike] = {}
        for label, tensor in tensors:
            if _is_telling(tensor):
                labels = self._labels.setdefault(_digest(tensor), [])
                if not labels:
                    self._alike.setdefault(form(tensor), Alike()).owned.append((labels, tensor))
                labels.append(label)

    def find(self, seen: Tensor, at: Label, *, limit: float) -> Label | None:
        """Whose ``seen`` is: the nearest of those with its bits, or else within ``limit`` of it."""
        labels = self._labels.get(_digest(seen), [])
        if not labels and seen.is_floating_point():
            labels = [label for some, _ in self.like(seen).near(seen, limit) for label in some]
        return nearest(labels, at)

    def like(self, seen: Tensor) -> Alike:
        """All tensors of ``seen``'s shape and type."""
        return self._alike.get(form(seen), _NONE)

    def within(self, seen: Tensor, chosen: Tensor) -> "Known":
        """The ``chosen`` elements of those that have ``seen``'s shape and type."""
        parts = [(label, one[chosen]) for labels, one in self.like(seen).owned for label in labels]
        return Known(parts)


def nearest(labels: Iterable[Label], at: Label) -> Label | None:
    """The one of ``labels`` that is nearest to ``at``."""
    return min(labels, default=None, key=lambda label: _distance(label, at))


def form(tensor: Tensor) -> str:
    """Type and shape."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


class _Nothing(Alike):
    """No tensors."""

    def near(self, seen: Tensor, limit: float) -> Iterator[Owned]:
        return iter(())

    def beside(self, own: Tensor, seen: Tensor) -> Iterator[Owned]:
        return iter(())


_NONE = _Nothing()


def _few(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:: max(1, tensor.numel() // MOST)].double()


def _unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=1, eps=torch.finfo(torch.float64).tiny)


def _is_telling(tensor: Tensor) -> bool:
    """Whether it is no chance if another tensor has this content."""
    if tensor.numel() == 1:
        return not tensor.is_floating_point() and abs(int(tensor)) > _SMALL
    return bool(tensor.any())


def _digest(tensor: Tensor) -> bytes:
    content = bits(tensor).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content + form(tensor).encode(), digest_size=16).digest()


def _distance(label: Label, at: Label) -> tuple[int, ...]:
    here, there = at.point, label.point
    apart = (there.stage != here.stage, abs(there.stage - here.stage), label.name != at.name, label.number != at.number)
    return (there.where != here.where, label.ago, *apart, there.microbatch)

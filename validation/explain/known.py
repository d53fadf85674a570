"""Tensors of the reference, indexed by content to identify a wrong tensor."""

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
    """Nonzero tensors with a common shape and type (N)."""

    def __init__(self) -> None:
        self.owned: list[Owned] = []

    def find_near(self, observed: Tensor, limit: float) -> Iterator[Owned]:
        """Tensors within ``limit`` of ``observed``, relative to their size."""
        if limit > TELLING or not self.owned:
            return
        gaps = (self._few - _few(observed)).abs().amax(dim=1)
        likely = (gaps <= limit * self._largest * _ROUNDING).nonzero().flatten().tolist()
        yield from (self.owned[k] for k in likely if error(observed, self.owned[k][1]) <= limit)

    def find_beside(self, own: Tensor, observed: Tensor) -> Iterator[Owned]:
        """Find tensors that explain ``observed`` beside ``own``, by a few elements, in a single pass."""
        if not self.owned:
            return
        base = _unit(_few(own)[None])[0]
        target = _few(observed)
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
        """Largest elements (N)."""
        return torch.stack([tensor.abs().amax().double() for _, tensor in self.owned])


class Known:
    """Tensors with their labels; equal bits share a tensor with several labels."""

    def __init__(self, tensors: Iterable[tuple[Label, Tensor]] = ()) -> None:
        self._labels: dict[bytes, list[Label]] = {}
        self._alike: dict[str, Alike] = {}
        for label, tensor in tensors:
            single = tensor.numel() == 1  # whose equal content proves nothing, unless it is a large whole number
            if (not tensor.is_floating_point() and abs(int(tensor)) > _SMALL) if single else bool(tensor.any()):
                labels = self._labels.setdefault(_digest(tensor), [])
                if not labels:
                    self._alike.setdefault(form(tensor), Alike()).owned.append((labels, tensor))
                labels.append(label)

    def find(self, observed: Tensor, at: Label, *, limit: float) -> Label | None:
        """Label the nearest tensor with the same bits, or else within ``limit``."""
        labels = self._labels.get(_digest(observed), [])
        if not labels and observed.is_floating_point():
            labels = [label for some, _ in self.like(observed).find_near(observed, limit) for label in some]
        return nearest(labels, at)

    def like(self, observed: Tensor) -> Alike:
        """All tensors of ``observed``'s shape and type."""
        return self._alike.get(form(observed), Alike())

    def narrow(self, observed: Tensor, chosen: Tensor) -> "Known":
        """The ``chosen`` elements of tensors with ``observed``'s shape and type."""
        parts = [(label, one[chosen]) for labels, one in self.like(observed).owned for label in labels]
        return Known(parts)


def nearest(labels: Iterable[Label], at: Label) -> Label | None:
    """The label nearest to ``at``."""

    def distance(label: Label) -> tuple[int, ...]:
        here, there, name, number = at.point, label.point, label.name != at.name, label.number != at.number
        far = abs(there.stage - here.stage)
        return (there.where != here.where, label.ago, far > 0, far, name, number, there.microbatch)

    return min(labels, default=None, key=distance)


def form(tensor: Tensor) -> str:
    """Type and shape."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _few(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:: max(1, tensor.numel() // MOST)].double()


def _unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=1, eps=torch.finfo(torch.float64).tiny)


def _digest(tensor: Tensor) -> bytes:
    content = bits(tensor).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content + form(tensor).encode(), digest_size=16).digest()

"""How far an update is off, as the gradient that would make it.

An optimizer may make much of little: Adam divides a gradient by its own size, so that the sign of one near zero decides
where a whole step leads. So the optimizer itself is asked what it makes of gradients that are off by as much as
rounding allows. What it makes of them is rounding, too, however far it leads.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from pipeproof.judging.tolerance import Floor, difference, distance, error, pieces, relative
from pipeproof.observers.elements import is_rounded
from pipeproof.reference.step import Expected, Gradient, Site

_NEAREST = 1 / 16  # of how far the largest element may be off: each is pushed as far at least
_KEPT_IN = torch.bfloat16  # three digits suffice to say how steep it is


class Updates(Protocol):
    """What an optimizer makes of every parameter, each time from where the step began."""

    def __call__(
        self, gradients: Mapping[Site, Gradient], *, norm: float | None = None, off: float = 0.0
    ) -> Mapping[Site, Tensor]:
        """With these gradients; ``norm``: clipped as if this were theirs. ``off``: with settings so far off."""


class Slopes:
    """How far each element of a parameter moves, by how far its gradient is off.

    ``due``: the step. ``floors`` say how far each gradient may be off. Every element is pushed as far, or to the other
    side of zero where that is nearer, both ways. Half of them are pushed at a time: an optimizer that makes something
    of that in the other half, as Muon does, has no slopes. Rows and columns of zeros stay as they are where ``there``,
    the same gradients in fp64, has none either, as rows of an embedding that nobody looked up.
    """

    def __init__(
        self, due: Expected, floors: Mapping[Site, Floor], updates: Updates, *, there: Mapping[Site, Gradient]
    ) -> None:
        self._due, self._updates, self._there = due, updates, there
        self._limits = {
            site: floor.limit
            for site, floor in floors.items()
            if site in due.parameters and not floor.noise and _may_be_pushed(due.gradients[site])
        }

    @property
    def known(self) -> bool:
        """Whether the optimizer moves every element by its own gradient alone."""
        return bool(self._limits) and self._led.alone

    def of(self, site: Site) -> Tensor | None:
        """Those of one parameter, in its shape; None where no push leads farther than it would by itself."""
        if site not in self._limits or not self._led.alone:
            return None
        due, before = self._due.parameters[site], self._due.before[site[1]]
        step = max(float((new - old).abs().amax()) for new, old in pieces(due, before))
        reach = self._led.reach[site] - torch.finfo(due.dtype).eps * _wide(due).abs()  # less what storing does
        if reach.amax() <= self._limits[site] * step:
            return None
        return (reach.clamp(min=0) / self._push(site)).nan_to_num(0.0).to(_KEPT_IN)

    def far(self, site: Site) -> float:
        """How far the pushes lead one parameter as a whole, as ``tolerance.error`` has it; 0 where none was pushed."""
        return self._led.far[site] if site in self._limits else 0.0

    @cached_property
    def _led(self) -> "_Led":
        led = _Led()
        for way, half in ((way, half) for way in (1, -1) for half in (0, 1)):
            pushed = {site: self._pushed(site, way, half) for site in self._limits}
            after = self._updates({**self._due.gradients, **pushed}, norm=self._due.norm)
            for site in self._limits:
                due, one = self._due.parameters[site], after[site]
                led.add(site, (_wide(one) - _wide(due)).abs(), half)
                far = error(one, due, base=self._due.before[site[1]], rounded=True)
                led.far[site] = max(far, led.far.get(site, 0.0))
        return led

    def _pushed(self, site: Site, way: int, half: int) -> Tensor:
        gradient, push = self._gradient(site), self._push(site)
        return (_wide(gradient) + way * push * _half(push, half)).to(gradient.dtype)

    def _push(self, site: Site) -> Tensor:
        """How far each element of a gradient is pushed: not at all where there is none."""
        size, other = _wide(self._gradient(site)).abs(), self._there[site]
        most = self._limits[site] * float(size.amax())
        none = (size == 0) & (True if other is None else other.to(size.device) == 0)
        return (2 * size).clamp(_NEAREST * most, most) * ~_in_lines(none)

    def _gradient(self, site: Site) -> Tensor:
        found = self._due.gradients[site]
        assert found is not None, "what is pushed is there"
        return found


@dataclass
class _Led:
    """Where pushes led: each element, the one way or the other, and all of a parameter."""

    reach: dict[Site, Tensor] = field(default_factory=dict)
    far: dict[Site, float] = field(default_factory=dict)
    alone: bool = True  # did only those move that were pushed?

    def add(self, site: Site, apart: Tensor, half: int) -> None:
        self.alone = self.alone and bool((apart[~_half(apart, half)] == 0).all())
        self.reach[site] = torch.maximum(self.reach[site], apart) if site in self.reach else apart


@dataclass(frozen=True)
class Moved:
    """A parameter's update: what it is, what is due, from where, and by which gradient; ``slope`` is that of each."""

    seen: Tensor
    due: Tensor
    before: Tensor
    gradient: Tensor
    slope: Tensor

    def as_gradient(self, limit: float, *, rounded: bool) -> float:
        """The error of the gradient that would make what is ``seen``; infinite where none would.

        What is off by less than ``limit`` times the usual step counts as nothing: no sum of that is more than ``limit``
        of the whole. The rest is as in ``tolerance.error``, ``rounded`` too.
        """
        unit = torch.finfo(self.due.dtype).eps if rounded and is_rounded(self.due.dtype) else 0.0
        least = limit * distance(self.due, self.before) / math.sqrt(self.due.numel())

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for one, wanted, given, steep in pieces(self.seen, self.due, self.gradient, self.slope):
                apart, _ = difference(one, wanted, unit)
                yield torch.where(apart <= least, 0.0, apart / steep), given

        return relative(pairs())


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _in_lines(none: Tensor) -> Tensor:
    """Where all of a row or a column is so.

    A single element may be zero by chance: terms cancel to the bit, and what is too small for fp16 is zero in it.
    """
    if none.dim() < 2:
        return torch.zeros_like(none)
    rows, columns = (none.flatten(1).all(1), none.transpose(0, 1).flatten(1).all(1))
    return (rows[:, None] | columns[None, :]).view(*none.shape[:2], *[1] * (none.dim() - 2)).expand_as(none)


def _half(tensor: Tensor, half: int) -> Tensor:
    """Every other element."""
    return (torch.arange(tensor.numel(), device=tensor.device) % 2 == half).view(tensor.shape)


def _may_be_pushed(gradient: Gradient) -> bool:
    return gradient is not None and gradient.is_floating_point() and bool(gradient.numel())

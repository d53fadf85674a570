"""What an update is made of, and what an optimizer makes of gradients that are off by as much as rounding may put them.

An optimizer may make much of little: Adam divides a gradient by its own size, so that the sign of one near zero decides
where a whole step leads. What it makes of gradients within their limits is rounding, too, however far it leads.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pipeproof.core.tolerance import Floor
from pipeproof.reference.data import Batch
from pipeproof.reference.step import Expected, Gradient, Reference, Site

_NEAREST = 1 / 16  # of how far the largest element may be off: each is pushed as far at least

Orders = Mapping[int, Sequence[int]]


@dataclass(frozen=True)
class Pending:
    """One operation whose gradients the next update uses: what was expected, of which microbatches, in which order.

    ``reference``: its own, where operations divide losses by other numbers; None: that of all of them.
    """

    expected: Expected
    batches: Sequence[Batch]
    orders: Orders
    reference: Reference | None = None


class Updates(Protocol):
    """What an optimizer makes of every parameter, each time from where the step began."""

    def __call__(
        self, gradients: Mapping[Site, Gradient], *, norm: float | None = None, off: float = 0.0
    ) -> Mapping[Site, Tensor]:
        """With these gradients; ``norm``: clipped as if this were theirs. ``off``: with settings so far off."""


def gradients_off(
    due: Mapping[Site, Gradient], floors: Mapping[Site, Floor], *, there: Mapping[Site, Gradient]
) -> Iterator[dict[Site, Gradient]]:
    """The gradients that are ``due``, each off as far as its floor allows: the one way, and the other.

    Every element is pushed as far, or to the other side of zero where that is nearer. Rows and columns of zeros stay
    where ``there``, the same gradients in fp64, has none either, as rows of an embedding that nobody looked up.
    """
    for way in (1, -1):
        yield {site: one if one is None else _pushed(one, way, floors[site], there[site]) for site, one in due.items()}


def _pushed(gradient: Tensor, way: int, floor: Floor, other: Gradient) -> Tensor:
    if floor.noise or not gradient.numel() or not gradient.is_floating_point():
        return gradient
    wide = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32))
    size = wide.abs()
    most = floor.limit * float(size.amax())
    none = (size == 0) & (True if other is None else other.to(size.device) == 0)
    push = (2 * size).clamp(_NEAREST * most, most) * ~_in_lines(none)
    return (wide + way * push).to(gradient.dtype)


def _in_lines(none: Tensor) -> Tensor:
    """Where all of a row or a column is so.

    A single element may be zero by chance: terms cancel to the bit, and what is too small for fp16 is zero in it.
    """
    if none.dim() < 2:
        return torch.zeros_like(none)
    rows, columns = (none.flatten(1).all(1), none.transpose(0, 1).flatten(1).all(1))
    return (rows[:, None] | columns[None, :]).view(*none.shape[:2], *[1] * (none.dim() - 2)).expand_as(none)

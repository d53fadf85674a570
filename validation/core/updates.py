"""Optimizer updates under gradients that rounding may shift.

Adam divides a gradient by its own size, so near zero its sign decides a whole step's direction. Whatever an optimizer
makes from gradients within their limits counts as rounding, however far it goes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pipeproof.core.tolerance import Floor
from pipeproof.reference.data import Batch
from pipeproof.reference.step import Expected, Gradient, Reference, Site

_NEAREST = 1 / 16  # of the largest element's allowance: a minimum push per element

Orders = Mapping[int, Sequence[int]]


@dataclass(frozen=True)
class Pending:
    """An operation whose gradients the next update uses: expected values, microbatches, orders.

    reference: its own, if operations use different loss divisors; None: the shared one.
    """

    expected: Expected
    batches: Sequence[Batch]
    orders: Orders
    reference: Reference | None = None


class Updates(Protocol):
    """Maps gradients to updated parameters, always from the step's start."""

    def __call__(
        self, gradients: Mapping[Site, Gradient], *, norm: float | None = None, off: float = 0.0
    ) -> Mapping[Site, Tensor]:
        """Apply these gradients. ``norm``: use it for clipping. ``off``: relative change to all settings."""


def gradients_off(
    expected: Mapping[Site, Gradient], floors: Mapping[Site, Floor], *, there: Mapping[Site, Gradient]
) -> Iterator[dict[Site, Gradient]]:
    """Yield ``expected`` gradients pushed to their floors' limits, up and down.

    Each element moves equally far, or across zero if that is nearer. Rows and columns of zeros stay if ``there``, the
    same gradients in fp64, has zeros too, as for unused embedding rows.
    """
    for way in (1, -1):
        yield {
            site: one if one is None else _push(one, way, floors[site], there[site]) for site, one in expected.items()
        }


def _push(gradient: Tensor, way: int, floor: Floor, other: Gradient) -> Tensor:
    if floor.noise or not gradient.numel() or not gradient.is_floating_point():
        return gradient
    wide = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32))
    size = wide.abs()
    most = floor.limit * float(size.amax())
    none = (size == 0) & (True if other is None else other.to(size.device) == 0)
    push = (2 * size).clamp(_NEAREST * most, most)
    if none.dim() > 1:  # single zeros may be chance: terms cancel, and fp16 flushes small numbers
        rows, columns = (none.flatten(1).all(1), none.transpose(0, 1).flatten(1).all(1))
        lines = rows[:, None] | columns[None, :]
        push = push * ~lines.view(*lines.shape, *[1] * (none.dim() - 2))
    return (wide + way * push).to(gradient.dtype)

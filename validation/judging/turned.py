"""Elements of an update whose gradient rounding may turn round: an optimizer goes as far there, either way.

Adam divides a gradient by its own size, so that the sign of one near zero decides where a whole step leads.
"""

import torch
from torch import Tensor

from pipeproof.judging.tolerance import Floor, error, pieces
from pipeproof.observers.elements import is_rounded

_NEAR = 2.0  # of a gradient's largest element, times what rounding may do to that: later steps of Adam are smooth
_AS_LONG = 1.1  # times the longest step that is due


def only_turned(
    seen: Tensor, due: Tensor, before: Tensor, *, gradient: Tensor, floor: Floor, limit: float, rounded: bool
) -> bool:
    """Whether ``seen`` is as near to ``due`` as ``limit`` allows, but for elements that rounding may have turned round.

    ``floor``: of the ``gradient`` that is due. An element that goes farther than any should is no such. Nor is one that
    has no gradient at all, as in rows of an embedding that nobody looked up.
    """
    alike = seen.shape == due.shape == before.shape == gradient.shape and seen.device == due.device
    if not alike or not is_rounded(gradient.dtype) or gradient.is_complex() or floor.noise or not seen.numel():
        return False
    small = _NEAR * floor.limit * max(float(one.abs().amax()) for (one,) in pieces(gradient))
    longest = _AS_LONG * max(float((one - start).abs().amax()) for one, start in pieces(due, before))
    turned = [
        ((given.abs() <= small) & (given != 0) & ((one - start).abs() <= longest)).to(seen.device)
        for one, start, given in pieces(seen, before, gradient)
    ]
    mixed = torch.where(torch.cat(turned).reshape(seen.shape), due, seen)
    return error(mixed, due, base=before, rounded=rounded) <= limit

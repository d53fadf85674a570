"""How far a parameter moved in a step, against how far it should have."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from validation.diagnosis.rules.update import Factor
from validation.judging.tolerance import pieces, precision_of

_ROOM = 16  # roundings of a parameter that stand between its movement and what is seen of it


def movements(seen: Mapping[str, Tensor], due: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Factor]:
    """For each parameter of ``seen`` how many times as far it moved as it should have; NaN where it went elsewhere."""
    return {name: _movement(one, due[name], before[name]) for name, one in seen.items() if name in due}


def _movement(seen: Tensor, due: Tensor, before: Tensor) -> Factor:
    if not seen.shape == due.shape == before.shape:
        return Factor(math.nan, 0.0)
    sums = torch.zeros(4, dtype=torch.float64)  # of squares: moved, to move, what was there; and of products
    for one, wanted, origin in pieces(seen, due, before):
        moved, move = one - origin, wanted - origin
        sums += torch.stack([moved.square().sum(), move.square().sum(), origin.square().sum(), (moved * move).sum()])
    moved, move, origin = sums[:3].sqrt().tolist()
    if not move:
        return Factor(math.nan, 0.0)
    value = sums[3].item() / move**2
    noise = _ROOM * precision_of(due.dtype).unit * origin / move
    rest = math.sqrt(max(0.0, moved**2 - (value * move) ** 2))
    multiple = rest <= max(1e-3, noise) * max(moved, move)
    return Factor(value if multiple else math.nan, noise)

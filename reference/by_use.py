"""What each use of a tensor gives to its gradient, as autograd's graph of one forward has them apart."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeproof.reference.accumulation import Gradient, added
from pipeproof.reference.graph import consumers, ends_of

_MOST = 8  # uses of one tensor: what each gives is kept, and a layer of a loop has very many


class ByUse:
    """What the uses of ``leaves`` give in the backward of ``loss`` that comes next."""

    def __init__(self, loss: Tensor, leaves: Iterable[Tensor]) -> None:
        self._given: dict[int, list[Gradient]] = {}
        wanted = {id(leaf) for leaf in leaves}
        for leaf, found in consumers(ends_of([loss]) if wanted else (), wanted).items():
            if 1 < len(found) <= _MOST:
                self._given[leaf] = [None] * len(found)
                for use, (node, argument) in enumerate(found):
                    node.register_hook(partial(self._note, leaf, use, argument))

    def _note(self, leaf: int, use: int, argument: int, gradients: tuple[Gradient, ...], _: Any) -> None:
        self._given[leaf][use] = gradients[argument]

    def of(self, leaf: Tensor, whole: Gradient) -> tuple[Gradient, ...]:
        """What each use gave, in the order of the forward; nothing where these do not add up to ``whole``, every bit.

        So nothing is told apart that came another way.
        """
        given = self._given.get(id(leaf), [])
        total = added(given[::-1])
        alike = total is not None and whole is not None and total.layout == whole.layout == torch.strided
        return tuple(given) if alike and torch.equal(total, whole) else ()  # type: ignore[arg-type]  # neither is None

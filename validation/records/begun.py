"""What gradients a step began with: what is there by then is no part of it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pipeproof.observers.shards import held_here, is_plain
from pipeproof.observers.sketch import any_nonzero
from pipeproof.reference.step import dense


class Begun:
    """The gradients of a rank that were not zero when its step began; ``keep`` copies one."""

    def __init__(self, keep: Callable[[Tensor], Tensor]) -> None:
        self._keep = keep
        self._kept: dict[str, Tensor] = {}

    def take(self, gradients: Mapping[str, Any]) -> None:
        """The step begins with these, by name, in place of what it was said to begin with; of shards with its own."""
        tensors = {name: held_here(one) for name, one in gradients.items() if isinstance(one, Tensor)}
        there = {name: one for name, one in tensors.items() if is_plain(one)}
        self._kept = {name: self._keep(one) for name, one in there.items() if any_nonzero(one)}

    def get(self, name: str) -> Tensor | None:
        """What one was; None where it was zero, or none."""
        return self._kept.get(name)

    def has_grown(self, name: str, gradient: Tensor | None) -> bool:
        """Whether anything was added to it since."""
        gradient = None if gradient is None else held_here(gradient)
        if gradient is None or not any_nonzero(dense(gradient)):
            return False
        begun = self._kept.get(name)
        return begun is None or not torch.equal(begun.to(gradient.device), dense(gradient))

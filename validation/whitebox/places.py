"""Where in the reference a tensor passes, told by its content: between which modules, and for which microbatch."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from reference.data import Batch
from reference.step import Loss
from validation.whitebox.sketch import Sketch, sketch

INPUT = "input of the model"


class Places:
    """Sketches by place, one for each microbatch; a place is a module's n-th output, or the model's n-th input."""

    def __init__(self) -> None:
        self.by_place: dict[str, dict[int, Sketch]] = {}
        self._by_content: dict[bytes, list[tuple[str, int]]] = {}

    def note(self, place: str, microbatch: int, tensor: Tensor) -> None:
        """``tensor`` passed there; if it does so more than once, the last counts."""
        made = self.by_place.setdefault(place, {})[microbatch] = sketch(tensor)
        self._by_content.setdefault(made.digest, []).append((place, microbatch))

    def find(self, seen: Sketch) -> Iterator[tuple[str, int]]:
        """Every (place, microbatch) whose tensor ``seen`` is: bit for bit, or if none is, up to rounding."""
        if seen.digest in self._by_content:
            yield from self._by_content[seen.digest]
            return
        for place, sketches in self.by_place.items():
            for microbatch, known in sketches.items():
                if seen.is_like(known):
                    yield place, microbatch

    def usual(self, seen: Sequence[Sketch | None]) -> str | None:
        """The place where most of ``seen`` pass, each for another microbatch; None if none of them passes anywhere."""
        found: dict[str, set[int]] = {}
        for one in seen:
            for place, microbatch in self.find(one) if one is not None else ():
                found.setdefault(place, set()).add(microbatch)
        return max(found, key=lambda place: len(found[place]), default=None)


def survey(model: nn.Module, batches: Sequence[Batch], loss: Loss) -> tuple[Places, Places]:
    """Where tensors and where gradients pass when ``model`` is trained on ``batches``, which changes no parameter."""
    forward, backward = Places(), Places()
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for microbatch, batch in enumerate(batches):
        noted: dict[int, Tensor] = {}  # kept, so that no id is used again
        hooks = [
            module.register_forward_hook(_noting(name, microbatch, (forward, backward), noted))
            for name, module in model.named_modules()
        ]
        for number, tensor in enumerate(batch.inputs):
            forward.note(f"{INPUT} {number}", microbatch, tensor)
        try:
            value = loss.function(model(*batch.inputs), batch.target)
            torch.autograd.grad(value / loss.divisor, wanted, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
    return forward, backward


def _noting(
    name: str, microbatch: int, places: tuple[Places, Places], noted: dict[int, Tensor]
) -> Callable[[nn.Module, Any, Any], None]:
    """A hook that notes a module's outputs, unless a module inside it has given the same tensors."""
    forward, backward = places

    def called(module: nn.Module, arguments: Any, result: Any) -> None:
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for number, tensor in enumerate(outputs):
            if id(tensor) in noted:
                continue
            noted[id(tensor)] = tensor
            place = f"output {number} of {name or 'the model'}"
            forward.note(place, microbatch, tensor)
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient, place=place: backward.note(place, microbatch, gradient))  # type: ignore[no-untyped-call]  # in torch

    return called

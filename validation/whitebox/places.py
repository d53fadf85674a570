"""Where in the reference a tensor passes, told by its content: between which modules, and for which microbatch."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from reference.data import Batch
from validation.whitebox.sketch import Sketch, sketch

INPUT = "input of the model"
Result = TypeVar("Result")


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


Both = tuple[Places, Places]  # of tensors, and of gradients


def survey(
    model: nn.Module, batches: Sequence[Batch], run: Callable[[], Result], *, replicas: int = 1
) -> tuple[Result, Both]:
    """What ``run`` returns, which trains ``model`` on each of ``batches``; and where what passes meanwhile.

    A replica whose share is to be averaged with others has gradients that are ``replicas`` times as large.
    """
    forward, backward = Places(), Places()
    for microbatch, batch in enumerate(batches):
        for number, tensor in enumerate(batch.inputs):
            forward.note(f"{INPUT} {number}", microbatch, tensor)
    observer = _Observer(forward, backward, replicas)
    hooks = [model.register_forward_pre_hook(observer.begins)]
    hooks += [module.register_forward_hook(observer.noting(name)) for name, module in model.named_modules()]
    try:
        return run(), (forward, backward)
    finally:
        for hook in hooks:
            hook.remove()


class _Observer:
    """Notes the outputs of modules, one microbatch after another."""

    def __init__(self, forward: Places, backward: Places, replicas: int) -> None:
        self._forward, self._backward = forward, backward
        self._replicas = replicas
        self._microbatch = -1
        self._noted: dict[int, Tensor] = {}  # of this microbatch; kept, so that no id is used again

    def begins(self, model: nn.Module, arguments: Any) -> None:
        """The next microbatch enters the model."""
        self._microbatch += 1
        self._noted.clear()

    def noting(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        """A hook that notes a module's outputs, unless a module inside it has given the same tensors."""

        def called(module: nn.Module, arguments: Any, result: Any) -> None:
            outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            for number, tensor in enumerate(outputs):
                if id(tensor) not in self._noted:
                    self._noted[id(tensor)] = tensor
                    self._note(f"output {number} of {name or 'the model'}", tensor)

        return called

    def _note(self, place: str, tensor: Tensor) -> None:
        microbatch = self._microbatch
        self._forward.note(place, microbatch, tensor)
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self._flowed(place, microbatch, gradient))  # type: ignore[no-untyped-call]  # in torch

    def _flowed(self, place: str, microbatch: int, gradient: Tensor) -> None:
        self._backward.note(place, microbatch, gradient)
        if self._replicas > 1:
            self._backward.note(f"{place} of a replica", microbatch, gradient * self._replicas)

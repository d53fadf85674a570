"""Where in the reference what passes: a sketch of every tensor that a module puts out, and of its gradient."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeproof.diagnosis.sketches import of_sketches
from pipeproof.observers.elements import is_rounded
from pipeproof.observers.observed import INPUT
from pipeproof.observers.sketch import Sketch, sketch
from pipeproof.reference.data import Batch
from pipeproof.reference.handed_on import Cut, Graph
from pipeproof.reference.outputs import outputs_noted

REPLICA = " of a replica"
TOGETHER = " and "  # between the places of gradients that flow together
_THROUGH = " through stage "
_FEW = 16  # numbers that are soon like others by chance
Result = TypeVar("Result")


class Places:
    """Sketches by place, one for each microbatch; a place is a module's n-th output, or the model's n-th input."""

    def __init__(self) -> None:
        self.by_place: dict[str, dict[int, Sketch]] = {}
        self._by_content: dict[bytes, list[tuple[str, int]]] = {}
        self._computed: torch.dtype | None = None

    def note(self, place: str, microbatch: int, tensor: Tensor) -> None:
        """``tensor`` passed there."""
        self.add(place, microbatch, sketch(tensor))

    def add(self, place: str, microbatch: int, seen: Sketch) -> None:
        """What is ``seen`` passed there."""
        self.by_place.setdefault(place, {})[microbatch] = replace(seen, computed=self._computed)
        self._by_content.setdefault(seen.digest, []).append((place, microbatch))

    def computed_in(self, dtype: torch.dtype) -> None:
        """What passes, and what will be noted, is known to be computed in ``dtype``, narrower than its own."""
        self._computed = dtype
        for seen in self.by_place.values():
            seen |= {microbatch: replace(one, computed=dtype) for microbatch, one in seen.items()}

    def holding(self, seen: Sketch) -> Sequence[tuple[str, int]]:
        """Every (place, microbatch) whose tensor ``seen`` is bit for bit, where it is more than zeros."""
        return self._by_content.get(seen.digest, ()) if seen.norm else ()

    def find(self, seen: Sketch) -> Iterator[tuple[str, int]]:
        """Every (place, microbatch) whose tensor ``seen`` is: bit for bit, or if none is, up to rounding."""
        if seen.digest in self._by_content:
            yield from self._by_content[seen.digest]
            return
        for place, sketches in self.by_place.items():
            for microbatch, known in sketches.items():
                if seen.is_like(known):
                    yield place, microbatch

    def usual(self, seen: Sequence[Sketch | None]) -> tuple[str, ...]:
        """The places where most of ``seen`` pass, each for another microbatch; none if none of them passes anywhere.

        What is zero may be so in many places, and says nothing beside what is not. A few numbers are by chance like
        others, so that of such most must pass there; and of those in a coarse type all, if none is known to the bit: in
        it a small number's tangent is the number.
        """
        there = [one for one in seen if one is not None]
        telling = [one for one in there if one.norm] or there
        found: dict[str, tuple[set[int], set[int]]] = {}
        apart: dict[str, list[float]] = {}
        for k, one in enumerate(telling):
            for place, microbatch in self.find(one):
                numbers, ones = found.setdefault(place, (set(), set()))
                numbers.add(microbatch)
                ones.add(k)  # a mask that all microbatches have is one all the same
                apart.setdefault(place, []).append(one.distance(self.by_place[place][microbatch]))
        counts = {place: min(map(len, both)) for place, both in found.items()}
        most = max(counts.values(), default=0)
        short = any(math.prod(one.shape) < _FEW and one.digest not in self._by_content for one in there)
        coarse = all(_is_coarse(self._computed or one.dtype) for one in telling)
        coarse = coarse and not any(one.digest in self._by_content for one in telling)
        if (short and 2 * most < len(there)) or (coarse and most < len(telling)):
            return ()
        return tuple(
            sorted((place for place in counts if counts[place] == most), key=lambda place: fmean(apart[place]))
        )


def _is_coarse(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and torch.finfo(dtype).eps > torch.finfo(torch.float32).eps


Both = tuple[Places, Places]  # of tensors, and of gradients


def handed_on(place: str, stage: int) -> str:
    """Where the part of a tensor's gradient passes that ``stage`` hands on, to which the tensor comes."""
    return f"{place}{_THROUGH}{stage}"


def is_part(place: str, whole: str) -> bool:
    """Whether a part of the gradient at ``whole`` passes at ``place``."""
    several = whole.split(TOGETHER)
    return bool(whole) and (place.startswith(whole + _THROUGH) or (len(several) > 1 and place in several))


class Survey:
    """Looks where in ``model`` what passes, while it is trained on one microbatch after another.

    A replica whose share is to be averaged with others has gradients that are ``replicas`` times as large.
    """

    def __init__(self, model: nn.Module, *, replicas: int = 1) -> None:
        self.places: Both = Places(), Places()
        self._model = model
        self._replicas = replicas

    def watch(self, microbatch: int, batch: Batch, train: Callable[[], Result]) -> Result:
        """What ``train`` returns, which trains the model on ``batch``."""
        forward, _ = self.places
        for number, tensor in enumerate(batch.inputs):
            forward.note(f"{INPUT} {number}", microbatch, tensor)
        with outputs_noted(self._model, lambda place, tensor: self._note(place, microbatch, tensor)):
            return train()

    def look_again(
        self, model: nn.Module, losses: Iterator[tuple[Tensor, float]], cuts: Mapping[int, Cut], known: Sequence[float]
    ) -> None:
        """Note what each of these stages hands on; ``losses``, which ``model`` makes, must be the ``known`` ones."""
        for microbatch, expected in enumerate(known):
            graph = Graph()
            with outputs_noted(model, graph.note):
                loss, divisor = next(losses)
            for stage, cut in cuts.items() if loss.item() == expected else ():
                for place, gradient in graph.handed_on(loss / divisor, cut).items():
                    if gradient is not None:
                        self._flowed(handed_on(place, stage), microbatch, gradient)

    def _note(self, place: str, microbatch: int, tensor: Tensor) -> None:
        """A module has put out ``tensor``; its gradient is noted when it flows."""
        forward, _ = self.places
        forward.note(place, microbatch, tensor)
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self._flowed(place, microbatch, gradient))  # type: ignore[no-untyped-call]  # in torch

    def _flowed(self, place: str, microbatch: int, gradient: Tensor) -> None:
        _, backward = self.places
        backward.note(place, microbatch, gradient)
        if self._replicas > 1:
            backward.note(f"{place}{REPLICA}", microbatch, gradient * self._replicas)


class Computed(TorchDispatchMode):  # type: ignore[no-untyped-call]  # in torch
    """All that a model computes while this is open, also between its modules."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # in torch
        self._made: dict[tuple[torch.Size, torch.dtype], list[Sketch]] = {}
        self._random = False

    def __torch_dispatch__(self, func: Any, types: Any, *given: Any) -> Any:
        args, kwargs = (*given, None)[:2]  # by name there may be none
        made = func(*args, **(kwargs or {}))
        self._random |= torch.Tag.nondeterministic_seeded in func.tags
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and is_rounded(tensor.dtype):
                self._made.setdefault((tensor.shape, tensor.dtype), []).append(sketch(tensor))
        return made

    def lacks(self, seen: Sketch) -> bool:
        """Whether ``seen`` is nothing of that, nor a change of it, though it has the form of some.

        Nobody knows where random numbers are drawn: others may be as right.
        """
        alike = self._made.get((torch.Size(seen.shape), seen.dtype), ())
        found = any(seen.is_like(one) or of_sketches(seen, one) is not None for one in alike)
        return bool(alike) and not found and not self._random

"""Where in the reference what passes: a sketch of every tensor that a module puts out, and of its gradient."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeproof.core.observe.elements import in_fp64, is_rounded
from pipeproof.core.observe.observed import INPUT
from pipeproof.core.observe.sketch import FEW, Sketch, digest_of_values, sketch
from pipeproof.explain.sketches import of_sketches
from pipeproof.reference.data import Batch
from pipeproof.reference.handed_on import AutogradGraph, Cut
from pipeproof.reference.outputs import outputs_noted

REPLICA = " of a replica"
TOGETHER = " and "  # between the places of gradients that flow together
_THROUGH = " through stage "
_KEPT = b""  # the content of what is kept, until it is noted
Result = TypeVar("Result")


class Places(Mapping[str, Mapping[int, Sketch]]):
    """Sketches by place, one for each microbatch; a place is a module's n-th output, or the model's n-th input.

    What is kept is noted once somebody asks for it. Where contents alone were noted, ``gather`` notes what passed as
    sketches, once that is asked for.
    """

    def __init__(self, gather: Callable[[], None] | None = None) -> None:
        self.gather = gather
        self._kept: list[tuple[str, int, Tensor]] = []
        self._contents: dict[str, dict[int, bytes]] = {}
        self._by_content: dict[bytes, list[tuple[str, int]]] = {}
        self._sketches: dict[str, dict[int, Sketch]] = {}
        self._recognised: dict[bytes, Sketch] = {}
        self._computed: torch.dtype | None = None

    def __getitem__(self, place: str) -> Mapping[int, Sketch]:
        contents, made = self._contents[place], self._sketches.setdefault(place, {})
        if _KEPT in contents.values():
            self._note_kept()
        if len(made) < len(contents):
            if self.gather is not None and not self._recognised.keys() >= {*contents.values()}:
                self.gather()
            for microbatch in contents.keys() - made.keys():
                made[microbatch] = replace(self._recognised[contents[microbatch]], computed=self._computed)
            self._sketches[place] = made = {microbatch: made[microbatch] for microbatch in contents}
        return made

    def __contains__(self, place: object) -> bool:
        return place in self._contents

    def __iter__(self) -> Iterator[str]:
        return iter(self._contents)

    def __len__(self) -> int:
        return len(self._contents)

    def keep(self, place: str, microbatch: int, tensor: Tensor) -> None:
        """``tensor``, which is kept here alone, passed there."""
        self._contents.setdefault(place, {})[microbatch] = _KEPT
        self._kept.append((place, microbatch, tensor))

    def note(self, place: str, microbatch: int, tensor: Tensor) -> None:
        """``tensor`` passed there."""
        if self.gather is None:
            self.sketched(place, microbatch, tensor)
        else:
            self._note(place, microbatch, digest_of_values(tensor))

    def sketched(self, place: str, microbatch: int, tensor: Tensor) -> None:
        """The same, of what no one gathers."""
        self.add(place, microbatch, sketch(tensor))

    def add(self, place: str, microbatch: int, seen: Sketch) -> None:
        """What is ``seen`` passed there."""
        self._note(place, microbatch, seen.digest)
        self._sketches.setdefault(place, {})[microbatch] = replace(seen, computed=self._computed)

    def _note(self, place: str, microbatch: int, content: bytes) -> None:
        contents = self._contents.setdefault(place, {})
        if contents.get(microbatch) != content:
            contents[microbatch] = content
            self._by_content.setdefault(content, []).append((place, microbatch))

    def _note_kept(self, is_sought: Callable[[Tensor], bool] = lambda tensor: True) -> None:
        """Note what is kept, as far as it is sought."""
        kept, self._kept = self._kept, []
        for place, microbatch, tensor in kept:
            if is_sought(tensor):
                self._note(place, microbatch, digest_of_values(tensor))
            else:
                self._kept.append((place, microbatch, tensor))

    def computed_in(self, dtype: torch.dtype) -> None:
        """What passes, and what will be noted, is known to be computed in ``dtype``, narrower than its own."""
        self._computed = dtype
        for made in self._sketches.values():
            made |= {microbatch: replace(one, computed=dtype) for microbatch, one in made.items()}

    def recognise(self, seen: Sequence[Sketch]) -> bool:
        """Whether all of ``seen`` but zeros pass anywhere, bit for bit: these are sketches of what does, then.

        Of what is kept, only what may be any of these is looked at.
        """
        norms = defaultdict[object, set[float]](set)
        for one in seen:
            norms[one.shape, one.dtype].add(one.norm)

        def is_sought(tensor: Tensor) -> bool:
            alike = norms[tensor.shape, tensor.dtype]
            own = float(in_fp64(tensor).norm()) if alike else 0.0
            return any(not abs(own - norm) > own * torch.finfo(torch.float32).eps for norm in alike)

        self._note_kept(is_sought)
        for one in seen:
            if one.digest in self._by_content:
                self._recognised.setdefault(one.digest, one)
        return all(one.digest in self._by_content or not one.norm for one in seen)

    def holding(self, seen: Sketch) -> Sequence[tuple[str, int]]:
        """Every (place, microbatch) whose tensor ``seen`` is bit for bit, where it is more than zeros."""
        return self._equal(seen) if seen.norm else ()

    def find(self, seen: Sketch) -> Iterator[tuple[str, int]]:
        """Every (place, microbatch) whose tensor ``seen`` is: bit for bit, or if none is, up to rounding."""
        if equal := self._equal(seen):
            yield from equal
            return
        for place, sketches in self.items():
            for microbatch, known in sketches.items():
                if seen.is_like(known):
                    yield place, microbatch

    def _equal(self, seen: Sketch) -> Sequence[tuple[str, int]]:
        if seen.digest not in self._recognised:
            self._note_kept()
        return self._by_content.get(seen.digest, ())

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
                apart.setdefault(place, []).append(one.distance(self[place][microbatch]))
        counts = {place: min(map(len, both)) for place, both in found.items()}
        most = max(counts.values(), default=0)
        short = any(math.prod(one.shape) < FEW and not self._equal(one) for one in there)
        coarse = all(_is_coarse(self._computed or one.dtype) for one in telling)
        coarse = coarse and not any(map(self._equal, telling))
        if (short and 2 * most < len(there)) or (coarse and most < len(telling)):
            return ()
        return tuple(
            sorted((place for place in counts if counts[place] == most), key=lambda place: fmean(apart[place]))
        )


def _is_coarse(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and torch.finfo(dtype).eps > torch.finfo(torch.float32).eps


Both = tuple[Places, Places]  # of tensors, and of gradients
_Noting = Callable[[Places, str, int, Tensor], None]


def handed_on(place: str, stage: int) -> str:
    """Where the part of a tensor's gradient passes that ``stage`` hands on, to which the tensor comes."""
    return f"{place}{_THROUGH}{stage}"


def is_part(place: str, whole: str) -> bool:
    """Whether a part of the gradient at ``whole`` passes at ``place``."""
    several = whole.split(TOGETHER)
    return bool(whole) and (place.startswith(whole + _THROUGH) or (len(several) > 1 and place in several))


class Survey:
    """Looks where in ``model`` what passes, while it is trained on one microbatch after another.

    A replica whose share is to be averaged with others has gradients that are ``replicas`` times as large. ``again``:
    watches all once more, where more than contents is asked for; without it sketches are noted at once.
    """

    def __init__(self, model: nn.Module, *, replicas: int = 1, again: Callable[[], None] | None = None) -> None:
        gather = None if again is None else self._gathered
        self.places: Both = Places(gather), Places(gather)
        self._model = model
        self._replicas = replicas
        self._again = again
        self._room = 0  # bytes: no more than the gradients of the microbatches, which are kept too

    def watch(
        self, microbatch: int, batch: Batch, train: Callable[[], Result], *, other: nn.Module | None = None
    ) -> Result:
        """What ``train`` returns, which trains the model on ``batch``, or an ``other`` that is like it."""
        forward, _ = self.places
        self._room += sum(one.nbytes for one in self._model.parameters() if one.requires_grad)
        for number, tensor in enumerate(batch.inputs):
            self._see(forward, f"{INPUT} {number}", microbatch, tensor)
        model = self._model if other is None else other
        with outputs_noted(model, lambda place, tensor: self._note(place, microbatch, tensor)):
            return train()

    def look_again(
        self, model: nn.Module, losses: Iterator[tuple[Tensor, float]], cuts: Mapping[int, Cut], known: Sequence[float]
    ) -> None:
        """Note what each of these stages hands on; ``losses``, which ``model`` makes, must be the ``known`` ones."""
        for microbatch, expected in enumerate(known):
            graph = AutogradGraph()
            with outputs_noted(model, graph.note):
                loss, divisor = next(losses)
            for stage, cut in cuts.items() if loss.item() == expected else ():
                for place, gradient in graph.handed_on(loss / divisor, cut).items():
                    if gradient is not None:
                        self._flowed(handed_on(place, stage), microbatch, gradient, note=Places.sketched)

    def _note(self, place: str, microbatch: int, tensor: Tensor) -> None:
        """A module has put out ``tensor``; its gradient is noted when it flows."""
        forward, _ = self.places
        self._see(forward, place, microbatch, tensor)
        if tensor.requires_grad:
            flowed = partial(self._flowed, place, microbatch, note=self._see)
            tensor.register_hook(flowed)  # type: ignore[no-untyped-call]  # in torch

    def _flowed(self, place: str, microbatch: int, gradient: Tensor, *, note: _Noting) -> None:
        _, backward = self.places
        note(backward, place, microbatch, gradient)
        if self._replicas > 1:
            note(backward, f"{place}{REPLICA}", microbatch, gradient * self._replicas)

    def _see(self, places: Places, place: str, microbatch: int, tensor: Tensor) -> None:
        """``tensor`` passed there; it is kept as it is while there is room."""
        if places.gather is None or tensor.layout != torch.strided or self._room < tensor.nbytes:
            places.note(place, microbatch, tensor)
        else:
            self._room -= tensor.nbytes
            places.keep(place, microbatch, tensor.detach().clone())

    def _gathered(self) -> None:
        assert self._again is not None, "asked for where contents alone are noted"
        for places in self.places:
            places.gather = None
        self._again()


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

        Where random numbers are drawn others may be as right.
        """
        alike = self._made.get((torch.Size(seen.shape), seen.dtype), ())
        found = any(seen.is_like(one) or of_sketches(seen, one) is not None for one in alike)
        return bool(alike) and not found and not self._random

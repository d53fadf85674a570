"""TensorIndex: sketches of all module outputs in the reference, with their gradients, by place."""

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
from pipeproof.reference.graph import hook_at
from pipeproof.reference.handed_on import AutogradGraph, Cut
from pipeproof.reference.outputs import outputs_noted

REPLICA = " of a replica"
TOGETHER = " and "  # joins places whose gradients flow together
_THROUGH = " through stage "
_KEPT = b""  # content of an unread kept tensor
Result = TypeVar("Result")


class Places(Mapping[str, Mapping[int, Sketch]]):
    """Sketches by place and microbatch; a place is a module's n-th output, or the model's n-th input.

    Kept tensors are digested on first use. If only digests were noted, ``gather`` sketches all tensors on demand.
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
        """Keep ``tensor`` at ``place``, to digest it later."""
        self._contents.setdefault(place, {})[microbatch] = _KEPT
        self._kept.append((place, microbatch, tensor))

    def note(self, place: str, microbatch: int, tensor: Tensor) -> None:
        """Note ``tensor`` at ``place``."""
        if self.gather is None:
            self.add(place, microbatch, sketch(tensor))
        else:
            self._note(place, microbatch, digest_of_values(tensor))

    def add(self, place: str, microbatch: int, observed: Sketch) -> None:
        """Add a sketch at ``place``."""
        self._note(place, microbatch, observed.digest)
        self._sketches.setdefault(place, {})[microbatch] = replace(observed, computed=self._computed)

    def _note(self, place: str, microbatch: int, content: bytes) -> None:
        contents = self._contents.setdefault(place, {})
        if contents.get(microbatch) != content:
            contents[microbatch] = content
            self._by_content.setdefault(content, []).append((place, microbatch))

    def _note_kept(self, is_sought: Callable[[Tensor], bool] = lambda tensor: True) -> None:
        """Digest kept tensors that are sought."""
        kept, self._kept = self._kept, []
        for place, microbatch, tensor in kept:
            if is_sought(tensor):
                self._note(place, microbatch, digest_of_values(tensor))
            else:
                self._kept.append((place, microbatch, tensor))

    def note_type(self, dtype: torch.dtype) -> None:
        """Mark all sketches, now and later, as computed in narrower ``dtype``."""
        self._computed = dtype
        for made in self._sketches.values():
            made |= {microbatch: replace(one, computed=dtype) for microbatch, one in made.items()}

    def recognise(self, observed: Sequence[Sketch]) -> bool:
        """True if all nonzero sketches occur in the survey, bit for bit; stores them then.

        Only kept tensors with a fitting norm are read.
        """
        norms = defaultdict[object, set[float]](set)
        for one in observed:
            norms[one.shape, one.dtype].add(one.norm)

        def is_sought(tensor: Tensor) -> bool:
            alike = norms[tensor.shape, tensor.dtype]
            own = float(in_fp64(tensor).norm()) if alike else 0.0
            return any(not abs(own - norm) > own * torch.finfo(torch.float32).eps for norm in alike)

        self._note_kept(is_sought)
        for one in observed:
            if one.digest in self._by_content:
                self._recognised.setdefault(one.digest, one)
        return all(one.digest in self._by_content or not one.norm for one in observed)

    def holding(self, observed: Sketch) -> Sequence[tuple[str, int]]:
        """Return (place, microbatch) pairs equal to a nonzero ``observed``, bit for bit."""
        return self._equal(observed) if observed.norm else ()

    def find(self, observed: Sketch) -> Iterator[tuple[str, int]]:
        """Yield (place, microbatch) pairs equal to ``observed``: bit for bit, otherwise up to rounding."""
        if equal := self._equal(observed):
            yield from equal
            return
        for place, sketches in self.items():
            for microbatch, known in sketches.items():
                if observed.is_like(known):
                    yield place, microbatch

    def _equal(self, observed: Sketch) -> Sequence[tuple[str, int]]:
        if observed.digest not in self._recognised:
            self._note_kept()
        return self._by_content.get(observed.digest, ())

    def usual(self, observed: Sequence[Sketch | None]) -> tuple[str, ...]:
        """Return places that match most of ``observed``, each in a different microbatch; empty without any match.

        Zeros match many places, and count only among zeros. Few numbers match by chance, so most must match; in a
        coarse type without exact matches all must: there a small number equals its tangent.
        """
        there = [one for one in observed if one is not None]
        telling = [one for one in there if one.norm] or there
        found: dict[str, tuple[set[int], set[int]]] = {}
        apart: dict[str, list[float]] = {}
        for k, one in enumerate(telling):
            for place, microbatch in self.find(one):
                numbers, ones = found.setdefault(place, (set(), set()))
                numbers.add(microbatch)
                ones.add(k)  # all microbatches may share one mask
                apart.setdefault(place, []).append(one.distance(self[place][microbatch]))
        counts = {place: min(map(len, both)) for place, both in found.items()}
        most = max(counts.values(), default=0)
        short = any(math.prod(one.shape) < FEW and not self._equal(one) for one in there)
        types = {self._computed or one.dtype for one in telling}
        coarse = all(one.is_floating_point and torch.finfo(one).eps > torch.finfo(torch.float32).eps for one in types)
        coarse = coarse and not any(map(self._equal, telling))
        if (short and 2 * most < len(there)) or (coarse and most < len(telling)):
            return ()
        return tuple(
            sorted((place for place in counts if counts[place] == most), key=lambda place: fmean(apart[place]))
        )


Both = tuple[Places, Places]  # tensors, gradients


def flow_place(place: str, stage: int) -> str:
    """Return the place for a gradient part handed on by ``stage``."""
    return f"{place}{_THROUGH}{stage}"


def is_part(place: str, whole: str) -> bool:
    """True if ``place`` holds a part of the gradient at ``whole``."""
    several = whole.split(TOGETHER)
    return bool(whole) and (place.startswith(whole + _THROUGH) or (len(several) > 1 and place in several))


class TensorIndex:
    """Records places while ``model`` trains on microbatches.

    replicas: gradients in one replica are this many times as large as their average. again: repeats the survey if more
    than digests are needed; without it, sketches are made at once.
    """

    def __init__(self, model: nn.Module, *, replicas: int = 1, again: Callable[[], None] | None = None) -> None:
        gather = None if again is None else self._gather
        self.places: Both = Places(gather), Places(gather)
        self._model = model
        self._replicas = replicas
        self._again = again
        self._room = 0  # bytes for kept tensors, at most the microbatches' gradients, which are kept too

    def watch(
        self, microbatch: int, batch: Batch, train: Callable[[], Result], *, other: nn.Module | None = None
    ) -> Result:
        """Run ``train``, which trains the model (or an equal ``other``) on ``batch``, and record places."""
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
        """Record gradients handed on by these stages; ``losses`` from ``model`` must equal ``known`` ones."""
        for microbatch, expected in enumerate(known):
            graph = AutogradGraph()
            with outputs_noted(model, graph.note):
                loss, divisor = next(losses)
            for stage, cut in cuts.items() if loss.item() == expected else ():
                for place, gradient in graph.hand_on(loss / divisor, cut).items():
                    if gradient is not None:
                        self._on_flow(flow_place(place, stage), microbatch, gradient, at_once=True)

    def _note(self, place: str, microbatch: int, tensor: Tensor) -> None:
        """Record a module output, and its gradient when it flows."""
        forward, _ = self.places
        self._see(forward, place, microbatch, tensor)
        if tensor.requires_grad:
            hook_at(tensor, partial(self._on_flow, place, microbatch))

    def _on_flow(self, place: str, microbatch: int, gradient: Tensor, *, at_once: bool = False) -> None:
        _, backward = self.places
        self._see(backward, place, microbatch, gradient, at_once=at_once)
        if self._replicas > 1:
            self._see(backward, f"{place}{REPLICA}", microbatch, gradient * self._replicas, at_once=at_once)

    def _see(self, places: Places, place: str, microbatch: int, tensor: Tensor, *, at_once: bool = False) -> None:
        """Record ``tensor``, kept as is while memory allows; ``at_once``: as a sketch."""
        if at_once:
            places.add(place, microbatch, sketch(tensor))
        elif places.gather is None or tensor.layout != torch.strided or self._room < tensor.nbytes:
            places.note(place, microbatch, tensor)
        else:
            self._room -= tensor.nbytes
            places.keep(place, microbatch, tensor.detach().clone())

    def _gather(self) -> None:
        assert self._again is not None, "asked for where contents alone are noted"
        for places in self.places:
            places.gather = None
        self._again()


class Computed(TorchDispatchMode):  # type: ignore[no-untyped-call]  # in torch
    """Records all intermediate tensors while active, also between modules."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # in torch
        self._made: dict[tuple[torch.Size, torch.dtype], list[Sketch]] = {}
        self._random = False

    def __torch_dispatch__(self, func: Any, types: Any, *given: Any) -> Any:
        args, kwargs = (*given, None)[:2]  # absent for positional calls
        made = func(*args, **(kwargs or {}))
        self._random |= torch.Tag.nondeterministic_seeded in func.tags
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and is_rounded(tensor.dtype):
                self._made.setdefault((tensor.shape, tensor.dtype), []).append(sketch(tensor))
        return made

    def lacks(self, observed: Sketch) -> bool:
        """True if tensors with equal form exist, but none equals or derives ``observed``.

        With random draws other values may be right too.
        """
        alike = self._made.get((torch.Size(observed.shape), observed.dtype), ())
        found = any(observed.is_like(one) or of_sketches(observed, one) is not None for one in alike)
        return bool(alike) and not found and not self._random

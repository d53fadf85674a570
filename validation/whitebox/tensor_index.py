"""TensorIndex: sketches of all module outputs in the reference, with their gradients, by place."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeproof.core.observe.elements import is_rounded
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
Result = TypeVar("Result")


class Places(Mapping[str, Mapping[int, Sketch]]):
    """Sketches by place and microbatch; a place is a module's n-th output, or the model's n-th input.

    A kept tensor is sketched when its place is read: where ranks are right, their own digests suffice.
    """

    def __init__(self) -> None:
        self._at: dict[str, dict[int, Sketch | Tensor]] = {}
        self._by_digest: dict[bytes, dict[tuple[str, int], None]] = {}  # in the order of coming
        self._computed: torch.dtype | None = None

    def __getitem__(self, place: str) -> Mapping[int, Sketch]:
        here = self._at[place]
        for microbatch, one in here.items():
            if isinstance(one, Tensor):
                here[microbatch] = replace(sketch(one), computed=self._computed)
        return cast(Mapping[int, Sketch], here)

    def __contains__(self, place: object) -> bool:
        return place in self._at  # the default would read the place

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)

    def keep(self, place: str, microbatch: int, tensor: Tensor) -> None:
        """Add ``tensor`` at ``place``, to be sketched later."""
        self._put(place, microbatch, tensor, digest_of_values(tensor))

    def add(self, place: str, microbatch: int, observed: Sketch) -> None:
        """Add a sketch at ``place``."""
        self._put(place, microbatch, replace(observed, computed=self._computed), observed.digest)

    def _put(self, place: str, microbatch: int, one: Sketch | Tensor, digest: bytes) -> None:
        self._at.setdefault(place, {})[microbatch] = one
        self._by_digest.setdefault(digest, {})[place, microbatch] = None

    def note_type(self, dtype: torch.dtype) -> None:
        """Mark all sketches, now and later, as computed in narrower ``dtype``."""
        self._computed = dtype
        for here in self._at.values():
            here |= {m: replace(one, computed=dtype) for m, one in here.items() if isinstance(one, Sketch)}

    def hold_all(self, observed: Iterable[Sketch]) -> bool:
        """True if all nonzero sketches occur here, bit for bit."""
        return all(one.digest in self._by_digest or not one.norm for one in observed)

    def holding(self, observed: Sketch) -> Sequence[tuple[str, int]]:
        """Return (place, microbatch) pairs equal to a nonzero ``observed``, bit for bit."""
        return [*self._by_digest.get(observed.digest, ())] if observed.norm else []

    def find(self, observed: Sketch) -> Iterator[tuple[str, int]]:
        """Yield (place, microbatch) pairs equal to ``observed``: bit for bit, otherwise up to rounding."""
        if equal := self._by_digest.get(observed.digest):
            yield from equal
            return
        for place, sketches in self.items():
            for microbatch, known in sketches.items():
                if observed.is_like(known):
                    yield place, microbatch

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
        short = any(math.prod(one.shape) < FEW and one.digest not in self._by_digest for one in there)
        types = {self._computed or one.dtype for one in telling}
        coarse = all(one.is_floating_point and torch.finfo(one).eps > torch.finfo(torch.float32).eps for one in types)
        coarse = coarse and not any(one.digest in self._by_digest for one in telling)
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

    replicas: gradients in one replica are this many times as large as their average.
    """

    def __init__(self, model: nn.Module, *, replicas: int = 1) -> None:
        self.places: Both = Places(), Places()
        self._model, self._replicas = model, replicas
        self._room = 0  # bytes for kept tensors, at most the microbatches' gradients, which are kept too

    def watch(self, microbatch: int, batch: Batch, train: Callable[[], Result]) -> Result:
        """Run ``train``, which trains the model on ``batch``, and record places."""
        forward, backward = self.places
        self._room += sum(one.nbytes for one in self._model.parameters() if one.requires_grad)

        def see(places: Places, place: str, tensor: Tensor) -> None:
            if tensor.layout != torch.strided or self._room < tensor.nbytes:
                places.add(place, microbatch, sketch(tensor))
            else:
                self._room -= tensor.nbytes
                places.keep(place, microbatch, tensor.detach().clone())

        def see_gradient(place: str, gradient: Tensor) -> None:
            for at, one in self._in_each_scale(place, gradient):
                see(backward, at, one)

        def see_output(place: str, tensor: Tensor) -> None:
            see(forward, place, tensor)
            if tensor.requires_grad:
                hook_at(tensor, partial(see_gradient, place))

        for number, tensor in enumerate(batch.inputs):
            see(forward, f"{INPUT} {number}", tensor)
        with outputs_noted(self._model, see_output):
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
                        for at, one in self._in_each_scale(flow_place(place, stage), gradient):
                            self.places[1].add(at, microbatch, sketch(one))

    def _in_each_scale(self, place: str, gradient: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield place, gradient
        if self._replicas > 1:
            yield f"{place}{REPLICA}", gradient * self._replicas


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

"""Ranks with a stage in common: the results that each handed back."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

from torch import Tensor

from pipeproof.core.cause import Cause, join_numbers
from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.shards import Shard
from pipeproof.core.observe.sketch import Sketch
from pipeproof.core.replicas import Replicas
from pipeproof.core.tolerance import scalar_error
from pipeproof.explain.limits import ALIKE, CLOSE
from pipeproof.reference.step import Contribution, Gradient


class StagePart(Protocol):
    """A rank's results for a stage, by its parameters in order; ``members``: all ranks with this stage.

    ``values``: weights before the step, if they match no parameter of the reference. ``lacks``: parameters that only
    other members have. ``begun``: nonzero initial gradients. ``after``: weights after the step, each with its place in
    the whole (None: it is the whole).
    """

    @property
    def after(self) -> Mapping[int, tuple[Shard | None, Tensor]]: ...

    @property
    def begun(self) -> Mapping[int, Tensor]: ...

    @property
    def values(self) -> Mapping[int, Tensor]: ...

    @property
    def gradients(self) -> Sequence[Gradient]: ...

    @property
    def shards(self) -> Mapping[int, Shard]: ...

    @property
    def members(self) -> "Sequence[tuple[int, StagePart]]": ...

    @property
    def lacks(self) -> Collection[int]: ...

    @property
    def calls(self) -> Sequence[Call] | None: ...


class HeldStage(Protocol):
    """A part at its place in the model, with parameter names by number."""

    @property
    def index(self) -> int: ...

    @property
    def part(self) -> StagePart: ...

    @property
    def names(self) -> Mapping[int, str]: ...


Place = tuple[int, int]  # a rank and a stage


class HeldGradient(NamedTuple):
    """A rank's gradient of a parameter in a stage. ``where``: its place in the whole; None: it is the whole."""

    rank: int
    stage: int
    where: Shard | None
    gradient: Gradient


@dataclass(frozen=True)
class Members:
    """Stages with their ranks, and the norms that ranks report.

    ``contribute`` returns the reference's contribution of each microbatch; nothing if only their sum is known.
    """

    stages: Sequence[HeldStage]
    replicas: Replicas
    contribute: Callable[[], Sequence[Contribution]]
    norms: Sequence[float | None]

    @cached_property
    def contributions(self) -> Sequence[Contribution]:
        """The reference's contribution by microbatch."""
        return self.contribute()

    @cached_property
    def held(self) -> Mapping[str, Sequence[HeldGradient]]:
        """By parameter, the gradients on all ranks: some ranks may lack a flat one."""
        found: dict[str, list[HeldGradient]] = {}
        for stage in self.stages:
            for k, name in stage.names.items():
                for rank, part in stage.part.members:
                    where = part.shards.get(k)
                    if k not in part.lacks and (where is None or where.count):
                        found.setdefault(name, []).append(HeldGradient(rank, stage.index, where, part.gradients[k]))
        return found

    @property
    def shared(self) -> bool:
        """True if several ranks share a parameter."""
        return any(len(every) > 1 for every in self.held.values())

    @property
    def in_shards(self) -> bool:
        """True if any rank holds parameters in part."""
        return any(one.where is not None for every in self.held.values() for one in every)

    def ranks(self, stage: int) -> list[int]:
        """Ranks with ``stage``."""
        return sorted({rank for one in self.stages if one.index == stage for rank, _ in one.part.members})

    def places_begun(self, name: str) -> frozenset[Place]:
        """Ranks and stages with a nonzero ``.grad`` before the step, if known."""
        numbers = [(one, k) for one in self.stages for k, own in one.names.items() if own == name]
        return frozenset((rank, one.index) for one, k in numbers for rank, part in one.part.members if k in part.begun)

    def is_alike(self, stage: HeldStage, observed: Callable[[Call], Iterable[Sketch]]) -> bool | None:
        """True if the ranks of each replica ``observed`` the same at ``stage``, bit for bit: whole tensors, no parts.

        None without observations.
        """
        found: dict[int, set[tuple[bytes, ...]]] = {}
        for rank, part in stage.part.members:
            digests = tuple(one.digest for call in part.calls or () for one in observed(call))
            found.setdefault(self.replicas.of[rank], set()).add(digests)
        return all(len(one) == 1 for one in found.values()) if all(map(all, found.values())) else None

    def norm_causes(self) -> Iterator[Cause]:
        """Causes for a norm over the wrong set of gradients, with parts or copies on several ranks."""
        held = list(self._squares())
        right = math.sqrt(sum(square for square, _ in held))
        first, most = self._replica(0), max((len(ranks) for _, ranks in held), default=0)
        counted: Mapping[str, Callable[[Collection[int]], int]] = {
            "parameters that several ranks hold are counted once for each rank": len,
            "parameters that several ranks of one replica hold are counted once for each rank": (
                lambda ranks: len(first & {*ranks})
            ),
            "parameters that fewer ranks hold than others are left out": lambda ranks: int(len(ranks) == most),
        }
        reported = {rank: norm for rank, norm in enumerate(self.norms) if norm}
        for detail, times in counted.items():
            value = math.sqrt(sum(square * times(ranks) for square, ranks in held))
            if reported and value and _is_apart(value, right) and all(_same(one, value) for one in reported.values()):
                yield Cause("norm", detail=detail)
        for rank, norm in reported.items():
            for ranks in dict.fromkeys((frozenset({rank}), self._replica(self.replicas.of[rank]))):
                value = math.sqrt(sum(square for square, own in held if ranks & {*own}))
                if value and _is_apart(value, right) and _same(norm, value):
                    detail = (
                        f"it is the norm of what rank{'s' * (len(ranks) > 1)} {join_numbers(sorted(ranks))} alone hold"
                    )
                    yield Cause("norm", rank=rank, detail=detail + "s" * (len(ranks) == 1))

    def _replica(self, number: int) -> frozenset[int]:
        """Return a replica's ranks."""
        return frozenset(rank for rank, of in enumerate(self.replicas.of) if of == number)

    def _squares(self) -> Iterator[tuple[float, Sequence[int]]]:
        """Squared norms by part, with the holding ranks."""
        every = [(name, stage.part.gradients[k]) for stage in self.stages for k, name in stage.names.items()]
        wholes = {name: whole for name, whole in every if whole is not None}
        for name, whole in wholes.items():
            ranks: dict[Shard | None, list[int]] = {}
            for one in self.held.get(name, ()):
                where = None if one.where is None else replace(one.where, addend=(0, 1))
                ranks.setdefault(where, []).append(one.rank)
            for where, holders in ranks.items():
                part = whole if where is None else where.of(whole)
                yield part.double().square().sum().item(), holders


def _same(norm: float, value: float) -> bool:
    return scalar_error(norm, value) < CLOSE


def _is_apart(norm: float, value: float) -> bool:
    return scalar_error(norm, value) > ALIKE

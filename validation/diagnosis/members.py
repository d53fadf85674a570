"""Ranks that have a stage in common, and what may have gone wrong between them: told by the numbers, for a law."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, permutations
from typing import Protocol

from torch import Tensor

from pipeproof.core.cause import Cause
from pipeproof.core.tolerance import error, scalar_error
from pipeproof.diagnosis.limits import ALIKE, CLOSE
from pipeproof.observers.calls import Call
from pipeproof.observers.shards import Shard
from pipeproof.observers.sketch import Sketch
from pipeproof.pipeline.mesh import DATA, MODEL, PIPELINE, along
from pipeproof.pipeline.sizes import MOST_RANKS, some
from pipeproof.reference.step import Contribution, Gradient, Site


class ReplicasError(ValueError):
    """Replicas that cannot be."""


@dataclass(frozen=True)
class Replicas:
    """``of[rank]``: the number of the replica of the model that each rank works on.

    ``together[rank]``: ranks of one number hold the same stages, each all of their parameters or some; empty where that
    is to be told by what they hand back. ``copies[rank]``: every parameter is held under each of these numbers; empty:
    as ``of``. ``sequence``: the axis along which ranks have parts of every sequence; empty where none is. ``in_step``:
    one along which ranks wait for each other in every microbatch, so that all must have as many. ``axes``: of a mesh,
    with their sizes. ``shares[rank]``: the microbatches that each rank is given; empty: every n-th of them.
    """

    of: tuple[int, ...]
    microbatches: int
    together: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    sequence: str = ""
    in_step: str = ""
    axes: tuple[tuple[str, int], ...] = ()
    shares: tuple[Sequence[int], ...] = ()

    @classmethod
    def along(cls, ranks: "int | Sequence[int] | Mapping[str, int]", microbatches: int) -> "Replicas":
        """Of ``ranks``: how many, the replica of each, or the sizes of a mesh by its axes, ranks in rows.

        Raises ``ReplicasError`` for what cannot be.
        """
        if type(ranks) is int:
            return cls((0,) * _counted(ranks, ranks), microbatches)
        if not isinstance(ranks, list | tuple | range | Mapping):
            wanted = "how many, the replica of each as a list, or a mesh, its axes and their sizes"
            raise ReplicasError(f"ranks is {ranks!r}: expected {wanted}")
        if not isinstance(ranks, Mapping):
            _counted(len(ranks), len(ranks))
            return cls(tuple(ranks), microbatches)
        if not ranks:
            raise ReplicasError("ranks is empty: expected a mesh, its axes and their sizes, e.g. {'pp': 2, 'dp': 2}")
        for axis, size in ranks.items():
            if axis not in (PIPELINE, *DATA, *MODEL):
                known = ", ".join((PIPELINE, *DATA, *MODEL))
                raise ReplicasError(f"ranks has an axis {axis!r}: expected some of {known}")
            if type(size) is not int or size < 1:
                raise ReplicasError(f"ranks has {size!r} along {axis!r}: expected how many ranks there are")
        _counted(math.prod(ranks.values()), dict(ranks))
        return cls(
            along(ranks, DATA),
            microbatches,
            together=along(ranks, (PIPELINE,)),
            copies=along(ranks, [axis for axis in DATA if axis != "ep"]),
            sequence=next((axis for axis in ("cp", "sp") if ranks.get(axis, 1) > 1), ""),
            in_step=next((axis for axis in ("ep", "fsdp", "dp_shard") if ranks.get(axis, 1) > 1), ""),
            axes=tuple(ranks.items()),
        )

    @property
    def count(self) -> int:
        return max(self.of) + 1

    @property
    def places(self) -> tuple[int, ...]:
        """The place of each rank in its replica. Ranks of one place hold the same stages: a mesh or a list says so."""
        return self.together or tuple(self.of[:rank].count(replica) for rank, replica in enumerate(self.of))

    def others_of(self, size: int) -> list[str]:
        """The axes with so many ranks along which these work on the same data, in words."""
        return [f"the ranks along {axis}" for axis, count in self.axes if axis in MODEL and count == size]

    def of_as_many(self, microbatches: int) -> "Replicas":
        """The same, in an operation of so many microbatches."""
        return replace(self, microbatches=microbatches)

    def share(self, rank: int) -> Sequence[int]:
        """The microbatches that ``rank`` is given."""
        return self.shares[rank] if self.shares else range(self.of[rank], self.microbatches, self.count)

    @property
    def each(self) -> tuple[tuple[int, ...], ...]:
        """The microbatches of each replica."""
        first = {number: rank for rank, number in reversed([*enumerate(self.of)])}
        return tuple(tuple(self.share(first[number])) for number in range(self.count))

    def check(self) -> None:
        """Raise ``ReplicasError`` for what cannot be."""
        if any(type(number) is not int for number in self.of) or sorted({*self.of}) != [*range(self.count)]:
            raise ReplicasError(f"ranks is {list(self.of)}: expected the number of each rank's replica, from 0 on")
        if self.microbatches < self.count:
            raise ReplicasError(f"{self._numbers}: expected at least one for each")
        if self.in_step and self.microbatches % self.count:
            why = f"ranks along {self.in_step} wait for each other in every microbatch"
            raise ReplicasError(f"{self._numbers}: expected a multiple, because {why}")

    @property
    def _numbers(self) -> str:
        return f"{some(self.microbatches, 'microbatch')} for {some(self.count, 'replica')}"


def _counted(count: int, said: object) -> int:
    if not 1 <= count <= MOST_RANKS:
        raise ReplicasError(f"ranks is {said}: expected at least 1, and at most {MOST_RANKS}")
    return count


class Part(Protocol):
    """What a rank handed back of a stage, by its parameters in order; ``members``: all ranks with this stage.

    ``values``: weights before the step, where they are not those of any parameter of the reference. ``lacks``: the
    parameters that others of them have, and this rank has not. ``begun``: what gradients were added to, where that was
    not zero. ``after``: weights after the step, each with where it lies in the whole (None: it is the whole).
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
    def members(self) -> "Sequence[tuple[int, Part]]": ...

    @property
    def lacks(self) -> Collection[int]: ...

    @property
    def calls(self) -> Sequence[Call] | None: ...


class Stage(Protocol):
    """A part at its place in the model, with the names of its parameters by their numbers."""

    @property
    def index(self) -> int: ...

    @property
    def part(self) -> Part: ...

    @property
    def names(self) -> Mapping[int, str]: ...


@dataclass(frozen=True)
class Suspicion:
    """What broken numbers tell of a law."""

    law: str
    cause: Cause


@dataclass(frozen=True)
class Members:
    """The stages with all their members, and what the reference has of every microbatch."""

    stages: Sequence[Stage]
    replicas: Replicas
    contributions: Sequence[Contribution]
    norms: Sequence[float | None]  # that the ranks report

    def notes(self) -> dict[str, str]:
        """A note for each law that broken numbers tell something about."""
        return {one.law: _at_its_stage(one.cause) for one in reversed(self.found)}

    @property
    def cut_over_replicas(self) -> bool:
        """Whether there are shards that not every replica has: what these add up cannot be held against another's."""
        every = {*self.replicas.of}
        for stage in self.stages:
            for k in stage.names:
                holders: dict[Shard, set[int]] = {}
                for rank, part in stage.part.members:
                    if k in part.shards:
                        holders.setdefault(part.shards[k], set()).add(self.replicas.of[rank])
                if any(some != every for some in holders.values()):
                    return True
        return False

    def alike(self, stage: Stage, seen: Callable[[Call], Iterable[Sketch]]) -> bool | None:
        """Whether the ranks of each replica have ``seen`` the same at ``stage``, bit for bit: then these are no parts.

        None where nobody has seen any.
        """
        found: dict[int, set[tuple[bytes, ...]]] = {}
        for rank, part in stage.part.members:
            digests = tuple(one.digest for call in part.calls or () for one in seen(call))
            found.setdefault(self.replicas.of[rank], set()).add(digests)
        return all(len(one) == 1 for one in found.values()) if all(map(all, found.values())) else None

    @cached_property
    def found(self) -> tuple[Suspicion, ...]:
        """The likeliest of each law first."""
        laws = {
            "replicas": self._not_reduced(in_shards=False),
            "gradient": chain(self._not_reduced(in_shards=True), self._misplaced(), self._scaled()),
            "grad-norm": chain(self._norms_of_all(), self._partial_norms()),
        }
        return tuple(Suspicion(law, cause) for law, causes in laws.items() for cause in causes)

    def _not_reduced(self, *, in_shards: bool) -> Iterator[Cause]:
        """Replicas that have the gradients of their own microbatches alone.

        Shards of one gradient have all the same microbatches, unless each rank has its own.
        """
        for stage in self.stages:
            members = [(rank, part) for rank, part in stage.part.members if bool(part.shards) == in_shards]
            alone = [rank for rank, part in members if self.replicas.count > 1 and self._is_own(stage, rank, part)]
            if alone and (not in_shards or len(alone) == len(members)):
                told = ", ".join(
                    f"rank {rank} has the gradient of its own microbatches {_listed(self.replicas.share(rank))} alone"
                    for rank in alone
                )
                detail = f"not reduced over its replicas: {told}"
                one = alone[0] if len(alone) == 1 else None
                yield Cause("not-reduced", rank=one, stage=stage.index, detail=detail)

    def _is_own(self, stage: Stage, rank: int, part: Part) -> bool:
        seen = []
        for k, name in stage.names.items():
            own, gradient = self._gradient((stage.index, name), self.replicas.share(rank)), part.gradients[k]
            if gradient is not None and gradient.numel():
                seen.append(_times(gradient, own if own is None or k not in part.shards else part.shards[k].of(own)))
        return bool(seen) and None not in seen

    def _misplaced(self) -> Iterator[Cause]:
        """A shard that is what belongs in the place of another."""
        for stage in self.stages:
            for (rank, part), (other, its) in permutations(stage.part.members, 2):
                for k, name in stage.names.items():
                    if k not in part.shards or k not in its.shards or part.shards[k] == its.shards[k]:
                        continue
                    whole, seen = (
                        self._gradient((stage.index, name), range(self.replicas.microbatches)),
                        part.gradients[k],
                    )
                    if seen is None or whole is None or not seen.numel():
                        continue
                    own, others = part.shards[k].of(whole), its.shards[k].of(whole)
                    if seen.shape == others.shape and _alike(seen, others) and not _alike(seen, own):
                        detail = (
                            f"rank {rank}'s shard of {name}, said to be {part.shards[k]}, is that of "
                            f"{its.shards[k]}, which rank {other} is said to have: shards in the wrong order"
                        )
                        yield Cause("misplaced", rank=rank, stage=stage.index, parameter=name, detail=detail)

    def _scaled(self) -> Iterator[Cause]:
        """All gradients are too large, or too small, by the number of replicas."""
        factors = set()
        for stage in self.stages:
            for k, name in stage.names.items():
                whole, seen = (
                    self._gradient((stage.index, name), range(self.replicas.microbatches)),
                    stage.part.gradients[k],
                )
                if seen is not None and whole is not None and whole.any():
                    factor = _times(seen, whole)
                    factors.add(None if factor is None else round(factor * self.replicas.count, 2))
        count, (each, rest) = self.replicas.count, divmod(self.replicas.microbatches, self.replicas.count)
        over = " or ".join([f"{count} replicas", *self.replicas.others_of(count)])
        if count > 1 and factors == {1.0}:
            detail = f"all are 1/{count} of what is expected, as a mean over {over} in place of a sum gives"
            yield Cause("scale", factor=1 / count, detail=detail)
        if count > 1 and factors == {float(count * count)}:
            alike = each == count and not rest
            undivided = f", or a loss not divided by the {each} microbatches of a replica," * alike
            why = f"as a sum over {over} in place of a mean{undivided} gives"
            detail = f"all are {count} times what is expected, {why}"
            yield Cause("scale", factor=float(count), detail=detail)

    def _norms_of_all(self) -> Iterator[Cause]:
        """A norm that all ranks report, and that counts what several hold several times, or what few hold never."""
        norms = [norm for norm in self.norms if norm]
        held = list(self._held(range(len(self.norms))))
        every, times = sum(size for _, size, _ in held), sum(size * count for _, size, count in held)
        first = [rank for rank, of in enumerate(self.replicas.of) if of == 0]
        within = sum(size * count for _, size, count in self._held(first))
        most = max((count for *_, count in held), default=0)
        few = [(name, size) for name, size, count in held if count < most]
        left = every - sum(size for _, size in few)
        for told, square in (
            ("parameters that several ranks hold are counted once for each rank", times),
            ("parameters that several ranks of one replica hold are counted once for each rank", within),
            (f"what fewer ranks hold than others is left out, as {few[0][0] if few else ''}", left if few else 0.0),
        ):
            alike = all(scalar_error(norm, math.sqrt(square)) < CLOSE for norm in norms)
            if norms and square > 0 and alike and scalar_error(square, every) > ALIKE:
                yield Cause("norm", detail=told)

    def _held(self, ranks: Collection[int]) -> Iterator[tuple[str, float, int]]:
        """Every part of a parameter: its name, the square of what is due there, and how many of ``ranks`` hold it."""
        for stage in self.stages:
            for k, name in stage.names.items():
                whole = self._gradient((stage.index, name), range(self.replicas.microbatches))
                if whole is None:
                    continue
                members = [part for rank, part in stage.part.members if rank in ranks and k not in part.lacks]
                holders = [part.shards.get(k) for part in members]
                counts = Counter(None if one is None else replace(one, addend=(0, 1)) for one in holders)
                for where, count in counts.items():
                    yield name, _square(whole if where is None else where.of(whole)), count

    def _partial_norms(self) -> Iterator[Cause]:
        """A norm that is that of some ranks' gradients."""
        squares = [self._squares(rank) for rank in range(len(self.norms))]
        every = math.sqrt(sum(_square(gradient) for stage in self.stages for gradient in stage.part.gradients))
        sharded = any(stage.part.shards for stage in self.stages)
        for rank, norm in enumerate(self.norms):
            replica = self.replicas.of[rank]
            peers = [number for number, of in enumerate(self.replicas.of) if of == replica]
            apart = sharded and all(count == 1 for *_, count in self._held(peers))
            for ranks in ([rank], *([peers] if apart else [])):
                part = math.sqrt(sum(squares[number] for number in ranks))
                less = len(ranks) < len(self.norms) and scalar_error(part, every) > ALIKE
                if norm and less and scalar_error(norm, part) < CLOSE:
                    several = len(ranks) > 1
                    held = f"rank{'s' * several} {_listed(ranks)} hold{'s' * (not several)} alone"
                    yield Cause("norm", rank=rank, detail=f"rank {rank}'s is the norm of what {held}")

    def _squares(self, rank: int) -> float:
        """Of what ``rank`` holds: its shards, or its copies."""
        held = [part for stage in self.stages for at, part in stage.part.members if at == rank]
        return sum(_square(gradient) for part in held for gradient in part.gradients)

    def _gradient(self, site: Site, microbatches: Sequence[int]) -> Tensor | None:
        given = [self.contributions[number].gradients.get(site) for number in microbatches]
        found = [gradient.cpu().double() for gradient in given if gradient is not None]
        return sum(found[1:], found[0]) if found else None


def _at_its_stage(cause: Cause) -> str:
    """What a law's line says of ``cause``, which a cause's own line says behind its place."""
    return f"stage {cause.stage} is {cause.detail}" if cause.kind == "not-reduced" else cause.detail


def _square(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else gradient.double().square().sum().item()


def _times(seen: Tensor, known: Tensor | None) -> float | None:
    """How many times ``known`` ``seen`` is; None if it is no multiple."""
    if known is None or seen.shape != known.shape or not known.any():
        return None
    factor = ((seen.double() * known).sum() / known.square().sum()).item()
    return factor if factor and _alike(seen, factor * known) else None


def _alike(seen: Tensor, known: Tensor) -> bool:
    return error(seen, known) < ALIKE


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))

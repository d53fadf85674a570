"""Ranks with a stage in common: the results that each handed back, as counts per microbatch."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pipeproof.core.cause import Cause, join_numbers
from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.shards import Shard
from pipeproof.core.observe.sketch import Sketch
from pipeproof.core.replicas import Replicas
from pipeproof.core.tolerance import error, scalar_error
from pipeproof.explain.limits import ALIKE, CLOSE
from pipeproof.explain.solver import counts_of, limit_of, residual_of, tell_within
from pipeproof.reference.step import Contribution, Expected, Gradient


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
        every = [(name, stage.part.gradients[k]) for stage in self.stages for k, name in stage.names.items()]
        held: list[tuple[float, Sequence[int]]] = []  # squared norms by part, with the holding ranks
        for name, whole in {name: whole for name, whole in every if whole is not None}.items():
            ranks_of: dict[Shard | None, list[int]] = {}
            for one in self.held.get(name, ()):
                where = None if one.where is None else replace(one.where, addend=(0, 1))
                ranks_of.setdefault(where, []).append(one.rank)
            for where, holders in ranks_of.items():
                part = whole if where is None else where.of(whole)
                held.append((part.double().square().sum().item(), holders))
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

        def tells(value: float, norms: Collection[float]) -> bool:
            """True if ``value`` is no right norm, and all ``norms`` equal it."""
            same = bool(norms) and all(scalar_error(one, value) < CLOSE for one in norms)
            return same and bool(value) and scalar_error(value, right) > ALIKE

        for detail, times in counted.items():
            if tells(math.sqrt(sum(square * times(ranks) for square, ranks in held)), reported.values()):
                yield Cause("norm", detail=detail)
        for rank, norm in reported.items():
            for ranks in dict.fromkeys((frozenset({rank}), self._replica(self.replicas.of[rank]))):
                if tells(math.sqrt(sum(square for square, own in held if ranks & {*own})), [norm]):
                    some, verb = ("s", "hold") if len(ranks) > 1 else ("", "holds")
                    detail = f"it is the norm of what rank{some} {join_numbers(sorted(ranks))} alone {verb}"
                    yield Cause("norm", rank=rank, detail=detail)

    def _replica(self, number: int) -> frozenset[int]:
        """Return a replica's ranks."""
        return frozenset(rank for rank, of in enumerate(self.replicas.of) if of == number)


Counts = tuple[float, ...]  # how often each microbatch is in a gradient


@dataclass(frozen=True)
class Copy:
    """A rank's gradient of a parameter, or a part, flat and in fp64 (D).

    ``rows``: each microbatch's addend (M, D), or the sum of all (1, D). ``limit``: rounding of a sum of these;
    ``loose``: rounding of sums over ranks. ``counts``: how often each row is in it; None if unknown.
    """

    rank: int
    stage: int
    where: Shard | None
    observed: Tensor
    rows: Tensor
    limit: float
    loose: float
    counts: Counts | None = None

    @property
    def expected(self) -> Tensor:
        return self.rows.sum(dim=0)

    @property
    def right(self) -> bool:
        return self.fits((1.0,) * len(self.rows))

    def fits(self, counts: Counts) -> bool:
        """True if ``counts`` explain the observed gradient; a common factor is known to three digits only."""
        limit = max(self.limit, ALIKE) if len(set(counts)) == 1 else self.limit
        return len(counts) == len(self.rows) and residual_of(self.observed, self.rows, counts) <= limit


def are_alike(copies: Sequence[Copy]) -> bool:
    """True if all have equal counts, or unknown ones."""
    known = [(one, one.counts) for one in copies if one.counts is not None]
    return not known or any(all(one.fits(counts) for one, _ in known) for _, counts in known)


def makeups(members: Members, expected: Expected) -> dict[str, Sequence[Copy]]:
    """By parameter, ranks' copies and shards with their counts; only parameters with an expected gradient.

    Few elements decide nothing by themselves: they are compared with the counts of the rank's other wrong gradients.
    """
    found = {name: copies for name in members.held if (copies := _copies(name, members, expected))}
    wrong = sorted(
        (one for copies in found.values() for one in copies if not one.right),
        key=lambda one: (one.rank, one.stage, len(one.rows)),
    )
    known = {place: _counts_of(list(some)) for place, some in groupby(wrong, key=lambda one: (one.rank, one.stage))}
    replicas = members.replicas

    def counted(copy: Copy) -> Copy:
        count = len(copy.rows)
        own = {*replicas.share(copy.rank)} if replicas.count > 1 and count == replicas.microbatches else set[int]()
        # The rank's microbatches alone, once each, or divided by only their number.
        alone = [tuple(times * (m in own) for m in range(count)) for times in (1.0, float(replicas.count)) if own]
        likely = [(1.0,) * count, *alone, known.get((copy.rank, copy.stage))]
        fitting = next((counts for counts in likely if counts and copy.fits(counts)), None)
        return replace(copy, counts=fitting or _counts_of([copy]))

    return {name: [counted(one) for one in copies] for name, copies in found.items()}


def _copies(name: str, members: Members, expected: Expected) -> list[Copy]:
    """A parameter's copies on all ranks; empty if any is unusable: absent, an addend, of another form, or not finite.

    Their rows are addends by microbatch (M, ...), or the whole sum (1, ...) if they do not add up to it.
    """
    every = members.held[name]
    totals = (expected.gradients.get((one.stage, name)) for one in every)
    total = next((one for one in totals if one is not None), None)
    if total is None:
        return []
    whole, loose = total.double().cpu(), max(ALIKE, tell_within(total.dtype))
    rows = whole[None]
    for stage in sorted({one.stage for one in every}, reverse=True):  # the first that adds up stays
        given = [one.gradients.get((stage, name)) for one in members.contributions]
        parts = [torch.zeros_like(whole) if one is None else one.double().cpu() for one in given]
        if parts and all(one.shape == whole.shape for one in parts):
            made = torch.stack(parts)
            rows = made if error(made.sum(dim=0), whole) < loose else rows
    limit = limit_of(total.cpu().flatten(), rows.sum(dim=0).flatten())
    copies = []
    for one in every:
        if one.gradient is None or (one.where is not None and one.where.addend[1] > 1):
            return []
        own = torch.stack([(row if one.where is None else one.where.of(row)).flatten() for row in rows])
        observed = one.gradient.double().cpu().flatten()
        if observed.shape != own.shape[1:] or not observed.numel() or not bool(observed.isfinite().all()):
            return []
        copies.append(Copy(one.rank, one.stage, one.where, observed, own, limit, loose))
    return copies


def _counts_of(copies: Sequence[Copy]) -> Counts | None:
    """Count each microbatch in a rank's ``copies``; None if undecided."""
    if len({len(one.rows) for one in copies}) > 1:
        return None
    observed, rows = torch.cat([one.observed for one in copies]), torch.cat([one.rows for one in copies], dim=1)
    whole = rows.sum(dim=0)
    factor = float((observed * whole).sum() / whole.square().sum()) if whole.any() else 0.0
    if error(observed, factor * whole) >= ALIKE and observed.any():
        return counts_of(observed, [*rows], max(one.limit for one in copies)) if len(rows) > 1 else None
    near = (float(round(factor)), 1.0 / (round(1.0 / factor) or 1) if factor else 0.0)
    plain = next((one for one in near if abs(factor - one) <= ALIKE * abs(factor)), None)
    return (float(f"{factor:.3g}") if plain is None else plain,) * len(rows)  # the digits that ranks share

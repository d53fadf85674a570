"""A long run combined from all ranks' files, one step at a time, independent of the layout."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from pipeproof.core.limits import Precision, coarsest, precision_of
from pipeproof.core.observe.shards import Bounds, Shard, find_untiled
from pipeproof.core.observe.sketch import Sketch, add_sketches
from pipeproof.pipeline.files import cannot_read
from pipeproof.pipeline.sizes import SHOWN
from pipeproof.records.rank_part import Arrival, describe_problems, run_of
from pipeproof.records.record import RecordError
from pipeproof.wings.runs.file import (
    STEPS,
    TENSORS,
    Options,
    RankFile,
    RankParameter,
    RankStep,
    dtype_of,
    other_options,
)

_OWN = "give each run a folder of its own"


class Part(NamedTuple):
    """A rank's part of a tensor, None for a missing gradient, and its place."""

    rank: int
    at: Shard
    sketch: Sketch | None


@dataclass(frozen=True)
class WholeTensor:
    """``sketch``: of the whole tensor. parts: from the first rank that has each, by bounds and number as an addend.

    apart: a rank whose part differs from another rank's copy, and that other rank.
    """

    sketch: Sketch | None
    parts: Mapping[tuple[Bounds, tuple[int, int]], Part]
    apart: tuple[int, int] | None = None

    def farthest(self, other: "WholeTensor") -> int | None:
        """Return the rank with the farthest part from ``other``'s; None if parts differ in place."""
        if other.parts.keys() != self.parts.keys():
            return None
        pairs = ((one.rank, one.sketch, other.parts[at].sketch) for at, one in self.parts.items())
        gaps = {rank: one.gap(its) for rank, one, its in pairs if one and its and its.digest != one.digest}
        return max(gaps, key=gaps.__getitem__, default=None)


def whole_tensor(parts: Sequence[Part]) -> WholeTensor:
    """Combine a tensor from all ranks' parts. Replicas count once."""
    first: dict[tuple[Bounds, tuple[int, int]], Part] = {}
    apart = None
    for one in parts:
        other = first.setdefault((one.at.bounds, one.at.addend), one)
        if apart is None and (other.sketch and other.sketch.digest) != (one.sketch and one.sketch.digest):
            apart = one.rank, other.rank
    there, shape = [one.sketch for one in first.values() if one.sketch is not None], parts[0].at.shape
    if not there or shape is None:
        return WholeTensor(None, first, apart)
    whole = add_sketches(there, shape)
    if any(one.at.addend[1] > 1 for one in first.values()):
        # Bits of a sum are unknown before summation; projections give its norm.
        content = hashlib.sha256(b"".join(sorted(one.digest for one in there))).digest()[: len(whole.digest)]
        norm = math.sqrt(sum(one**2 for one in whole.projections) / len(whole.projections))
        whole = replace(whole, digest=content, norm=norm)
    return WholeTensor(whole, first, apart)


@dataclass(frozen=True)
class WholeStep:
    """One step, by the model's parameter names.

    losses: reported by some rank, by microbatch number. loss, norm: None if unreported, or ranks differ. tensors:
    weights ``before`` the step, ``gradients``, and ``weights`` after it. clipped: as of a rank. computed: rounding of
    the narrowest computing type. conflicts: contradictions between ranks, a sentence by law.
    """

    number: int
    microbatches: tuple[str, ...] | None
    losses: Mapping[int, float]
    loss: float | None
    norm: float | None
    options: Options
    tensors: Mapping[str, Mapping[str, WholeTensor]]
    clipped: bool
    computed: Precision
    conflicts: Mapping[str, str]

    @cached_property
    def before(self) -> dict[str, Sketch]:
        """Initial weights."""
        return self._there("before")

    @cached_property
    def gradients(self) -> dict[str, Sketch]:
        """Present gradients of the step."""
        return self._there("gradients")

    @cached_property
    def weights(self) -> dict[str, Sketch]:
        """Weights after the step."""
        return self._there("weights")

    def _there(self, which: str) -> dict[str, Sketch]:
        return {name: one.sketch for name, one in self.tensors[which].items() if one.sketch is not None}

    @cached_property
    def size(self) -> float:
        """Norm of all finite gradients."""
        return math.hypot(*(one.norm for one in self.gradients.values() if math.isfinite(one.norm)))

    @cached_property
    def apart(self) -> dict[str, tuple[str, int, int]]:
        """Parameters that differ between ranks with the same part: kind, rank, and first rank."""
        found: dict[str, tuple[str, int, int]] = {}
        for what, which in (("updated weight", "weights"), ("gradient", "gradients"), ("weight", "before")):
            found |= {name: (what, *one.apart) for name, one in self.tensors[which].items() if one.apart is not None}
        return found


class WholeRun:
    """A run in a folder. Raises ``RecordError`` unless all ranks' files are present and from one run.

    parameters: each with the first rank that has it. numbers: steps kept by all ranks; after a kill, one rank may lack
    another's last step.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            found = sorted(self.path.glob("rank-*.jsonl"))
        except OSError as error:
            raise RecordError(cannot_read(path, error)) from error
        if not found:
            expected = "expected a folder with the rank-N.jsonl that record_run writes"
            raise RecordError(f"{path} has no run in it: {expected}")
        self.files = sorted(map(RankFile, found), key=lambda one: one.header.rank)
        self._check_ranks()
        self.parameters: dict[str, tuple[int, RankParameter]] = {}
        shards: dict[str, list[Shard]] = {}
        for header in (file.header for file in self.files):
            for name, one in header.parameters.items():
                _, first = self.parameters.setdefault(name, (header.rank, one))
                if str(one) != str(first):
                    raise RecordError(f"{self}: ranks hold {name} as {first} and as {one}; expected one form")
                shards.setdefault(name, []).append(one.shard)
        self._check_parts(shards, "")
        self.numbers = sorted(set[int].intersection(*(set(one.numbers) for one in self.files)))
        self.step = lru_cache(STEPS)(self._step)

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def precision(self) -> Precision:
        """Coarsest possible rounding of its numbers."""
        return coarsest([precision_of(dtype_of(one.dtype)) for _, one in self.parameters.values()])

    def _check_ranks(self) -> None:
        first, there = self.files[0], [one.header.rank for one in self.files]
        ranks = first.header.ranks
        if other := next((one for one in self.files if one.header.ranks != ranks), None):
            both = f"{other.path.name} is of {other.header.ranks} ranks, and {first.path.name} of {ranks}"
            raise RecordError(f"{self} has parts of two runs: {both}; {_OWN}")
        if twice := [rank for rank in set(there) if there.count(rank) > 1]:
            names = " and ".join(one.path.name for one in self.files if one.header.rank == twice[0])
            raise RecordError(f"{self}: {names} are both of rank {twice[0]}; {_OWN}")
        if lost := [*islice((rank for rank in range(ranks) if rank not in there), SHOWN)]:
            more = ranks - sum(rank < ranks for rank in there) - len(lost)
            what = f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}{f' and {more} more' * (more > 0)}"
            cure = "bring the files of all of them into one folder"
            raise RecordError(f"{self} is of {ranks} ranks and lacks {what}: {cure}")

    def _check_parts(self, shards: Mapping[str, Sequence[Shard]], what: str) -> None:
        """Raise ``RecordError`` unless each parameter's ``shards`` cover it exactly once."""
        for name, parts in shards.items():
            if (why := find_untiled(parts)) and any(part.count for part in parts):
                expected = "expected each element on one rank, or in copies"
                raise RecordError(f"{self}: {what}{name} is not there once as a whole: {why}; {expected}")

    def _step(self, number: int) -> WholeStep:
        """Combine this step from all ranks. Raises ``RecordError`` if one could not record it."""
        steps = [file.step(number) for file in self.files]
        if problems := {rank: one.problem for rank, one in enumerate(steps) if one.problem}:
            raise RecordError(f"{self} lacks step {number}, which was not recorded: {describe_problems(problems)}")
        placed: dict[str, dict[str, list[Part]]] = {what: {} for what in TENSORS}  # of each rank that has one
        for what, rank, step in ((what, rank, step) for what in TENSORS for rank, step in enumerate(steps)):
            lies = step.lying if what == "gradients" else {}
            for name, one in getattr(step, what).items():
                at = lies.get(name, self.files[rank].header.parameters[name].shard)
                placed[what].setdefault(name, []).append(Part(rank, at, one))
        lying = {
            name: [part.at for part in placed["gradients"][name] if part.sketch is not None]
            for name in {name for step in steps for name in step.lying}
        }
        self._check_parts(lying, f"in step {number} the gradient of ")
        conflicts: dict[str, str] = {}
        return WholeStep(
            number,
            *self._data(number, steps),
            self._number("loss", "loss", steps, conflicts),
            self._number("grad-norm", "norm", steps, conflicts),
            self._options(steps, conflicts),
            {what: {name: whole_tensor(parts) for name, parts in every.items()} for what, every in placed.items()},
            clipped=any(one.clipped for one in steps),
            computed=coarsest([precision_of(dtype_of(one.computed)) for one in steps if one.computed]),
            conflicts=conflicts,
        )

    def _data(self, number: int, steps: Sequence[RankStep]) -> tuple[tuple[str, ...] | None, dict[int, float]]:
        """Return all replicas' microbatches, and their reported losses."""
        if all(one.microbatches is None for one in steps):
            longest: tuple[float, ...] = max((one.losses or () for one in steps), key=len)
            return None, dict(enumerate(longest))
        # Who passes a single module has it as a stage of the rank's number, also where that is a replica. Ranks that
        # have the same parameters and the same microbatches share the work on these, as in tensor parallelism.
        names = [tuple(file.header.parameters) for file in self.files]
        alike = [(own, step.microbatches or rank) for rank, (own, step) in enumerate(zip(names, steps, strict=True))]
        ranks = [rank for rank, group in enumerate(alike) if group not in alike[:rank]]
        run, problems = run_of([Arrival(dict.fromkeys(names[rank], 0), steps[rank].microbatches, "") for rank in ranks])
        if problems:
            raise RecordError(f"step {number} of {self}: {describe_problems(problems)}")
        losses: dict[int, float] = {}
        for group, step in zip(alike, steps, strict=True):
            own = run.shares[ranks.index(alike.index(group))]
            share = range(len(run.microbatches)) if own is None else own
            if step.losses is not None and len(step.losses) == len(share):
                losses |= zip(share, step.losses, strict=True)
        return run.microbatches, losses

    def _number(self, law: str, what: str, steps: Sequence[RankStep], conflicts: dict[str, str]) -> float | None:
        """Return the number on which all reporting ranks agree; None, and a conflict, if they differ."""
        known = {repr(one): one for one in (getattr(step, what) for step in steps) if one is not None}
        if len(known) > 1:  # as text, because NaN differs from NaN
            conflicts[law] = f"ranks of {self} report other numbers for the {what}"
        return next(iter(known.values())) if len(known) == 1 else None

    def _options(self, steps: Sequence[RankStep], conflicts: dict[str, str]) -> Options:
        """Return the options of each parameter's first rank; and a conflict if ranks differ."""
        first: Options = {}
        for rank, step in enumerate(steps):
            if other := other_options(first, step.options):
                said = f"the optimizer of rank {rank} had {other}, unlike ranks before it"
                conflicts.setdefault("updated-parameters", said)
            first = {**step.options, **first}
        return first

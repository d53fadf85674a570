"""A run of many steps as all its ranks kept it: their parts put together, one step at a time."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import TypeVar

from pipeproof.core.limits import FP32, Precision, coarsest, precision_of
from pipeproof.observers.shards import Shard, untiled
from pipeproof.observers.sketch import Sketch
from pipeproof.pipeline.files import cannot_read
from pipeproof.pipeline.sizes import SHOWN
from pipeproof.records.options import Options, other_options
from pipeproof.records.put_together import Part, Whole, wholes
from pipeproof.records.rank_part import Arrival, run_of, told
from pipeproof.records.record import RecordError
from pipeproof.records.run_file import STEPS, Held, RankFile, RankStep, dtype_of

Value = TypeVar("Value")


@dataclass(frozen=True)
class KeptStep:
    """One step, by the model's names of parameters.

    losses: those of microbatches that some rank told, by the microbatch's number; ``loss`` and ``norm`` are None where
    none was told, or not one. before: weights that the step began with. apart: for each parameter that ranks hold alike
    and do not have alike, what of it, and the rank that has another than the first. mixed: what ranks say otherwise, by
    law. told: what optimizers of ranks were told otherwise, in words. computed: how the type rounds that modules
    compute in, the narrowest of them.
    """

    number: int
    microbatches: tuple[str, ...] | None
    losses: Mapping[int, float]
    loss: float | None
    norm: float | None
    options: Mapping[str, Mapping[str, object]]
    before: Mapping[str, Sketch]
    gradients: Mapping[str, Sketch | None]
    weights: Mapping[str, Sketch]
    clipped: bool
    apart: Mapping[str, tuple[str, int, int]]
    mixed: Mapping[str, str] = field(default_factory=dict)
    computed: Precision = FP32
    told: str = ""
    parts: Mapping[str, Mapping[str, Whole]] = field(default_factory=dict)

    @cached_property
    def overflows(self) -> bool:
        """Whether some gradient is not finite."""
        return any(not math.isfinite(one.norm) for one in self.gradients.values() if one is not None)

    @cached_property
    def size(self) -> float:
        """The norm of all gradients together that are finite."""
        norms = [one.norm for one in self.gradients.values() if one is not None]
        return math.sqrt(sum(norm**2 for norm in norms if math.isfinite(norm)))


class KeptRun:
    """The run in a folder. Raises ``RecordError`` unless all its ranks' parts are there and are of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            found = sorted(self.path.glob("rank-*.jsonl"))
        except OSError as error:
            raise RecordError(cannot_read(path, error)) from error
        if not found:
            raise RecordError(
                f"{path} has no run in it: expected a folder with the rank-N.jsonl that record_run writes"
            )
        self.files = sorted((RankFile(one) for one in found), key=lambda one: one.header.rank)
        self._check_ranks()
        self.step = lru_cache(STEPS)(self._step)

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def numbers(self) -> list[int]:
        """Of the steps that all ranks kept: where a job was killed, the last of one may be lost to another."""
        return sorted(set[int].intersection(*(set(one.numbers) for one in self.files)))

    @cached_property
    def parameters(self) -> dict[str, Held]:
        """All of them, in the order of ranks."""
        return _first([one.header.parameters for one in self.files])

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """The first rank that holds each parameter, and the stage it is in there."""
        ranks = [(one.header.rank, one.header.parameters) for one in self.files]
        return _first([{name: (rank, held.stage) for name, held in named.items()} for rank, named in ranks])

    def _check_ranks(self) -> None:
        ranks, there = self.files[0].header.ranks, [one.header.rank for one in self.files]
        for one in self.files:
            if one.header.ranks != ranks:
                raise RecordError(
                    f"{self} has parts of two runs: {one.path.name} is of {one.header.ranks} ranks, and "
                    f"{self.files[0].path.name} of {ranks}; give each run a folder of its own"
                )
        if twice := [rank for rank in set(there) if there.count(rank) > 1]:
            names = " and ".join(one.path.name for one in self.files if one.header.rank == twice[0])
            raise RecordError(f"{self}: {names} are both of rank {twice[0]}; give each run a folder of its own")
        if lost := [*islice((rank for rank in range(ranks) if rank not in there), SHOWN)]:
            more = ranks - sum(rank < ranks for rank in there) - len(lost)
            what = f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}{f' and {more} more' * (more > 0)}"
            raise RecordError(
                f"{self} is of {ranks} ranks and lacks {what}: bring the files of all of them into one folder"
            )
        forms: dict[str, Held] = {}
        shards: dict[str, dict[Shard, None]] = {}
        for one in self.files:
            for name, held in one.header.parameters.items():
                if forms.setdefault(name, held).form != held.form:
                    raise RecordError(f"{self}: ranks hold {name} as {forms[name]} and as {held}; expected one form")
                shards.setdefault(name, {})[held.shard] = None
        self._check_parts(shards, "")

    def _check_parts(self, shards: Mapping[str, Iterable[Shard]], what: str) -> None:
        """Raise ``RecordError`` unless each parameter's ``shards`` are all of it, and nothing of it twice."""
        for name, parts in shards.items():
            if (why := untiled(list(parts))) and any(part.count for part in parts):
                expected = "expected each element on one rank, or in copies"
                raise RecordError(f"{self}: {what}{name} is not there once as a whole: {why}; {expected}")

    def _step(self, number: int) -> KeptStep:
        """The step of this number, of all ranks. Raises ``RecordError`` where one of them could not keep it."""
        parts = [self._part(file, number) for file in self.files]
        if problems := {
            file.header.rank: one.problem for file, one in zip(self.files, parts, strict=True) if one.problem
        }:
            raise RecordError(f"{self} lacks step {number}, which was not recorded: {told(problems)}")
        data, losses = self._data(number, parts)
        loss, norm = (self._one(what, [getattr(one, what) for one in parts]) for what in ("loss", "norm"))
        self._check_parts(self._lying(parts), f"in step {number} the gradient of ")
        before, gradients, weights = (
            wholes([self._placed(file, one, what) for file, one in zip(self.files, parts, strict=True)])
            for what in ("before", "gradients", "weights")
        )
        apart = {
            name: (what, *one.apart)
            for what, found in (("updated weight", weights), ("gradient", gradients), ("weight", before))
            for name, one in found.items()
            if one.apart is not None
        }
        return KeptStep(
            number,
            data,
            losses,
            loss[0],
            norm[0],
            _first([one.options for one in parts]),
            before=_known(before),
            gradients={name: one.sketch for name, one in gradients.items()},
            weights=_known(weights),
            clipped=any(one.clipped for one in parts),
            apart=apart,
            told=self._told(parts),
            mixed={law: said for law, (_, said) in (("loss", loss), ("grad-norm", norm)) if said},
            computed=coarsest([precision_of(dtype_of(one.computed)) for one in parts if one.computed]),
            parts={"before": before, "gradients": gradients, "weights": weights},
        )

    def _part(self, file: RankFile, number: int) -> RankStep:
        """What one rank kept, with all weights that it began with."""
        step, earlier = file.step(number), file.before(number)
        left = {} if earlier is None else earlier.weights
        return replace(step, before={**left, **step.before})

    def _placed(self, file: RankFile, step: RankStep, what: str) -> dict[str, Part]:
        lying = step.lying if what == "gradients" else {}
        parameters, rank = file.header.parameters, file.header.rank
        found: Mapping[str, Sketch | None] = getattr(step, what)
        return {name: Part(rank, lying.get(name, parameters[name].shard), one) for name, one in found.items()}

    def _lying(self, parts: Sequence[RankStep]) -> dict[str, list[Shard]]:
        """Where all parts lie of those gradients of which some do not lie as weights do."""
        names = {name for one in parts for name in one.lying}
        return {
            name: [
                one.lying.get(name, file.header.parameters[name].shard)
                for file, one in zip(self.files, parts, strict=True)
                if one.gradients.get(name) is not None
            ]
            for name in names
        }

    def _data(self, number: int, parts: Sequence[RankStep]) -> tuple[tuple[str, ...] | None, dict[int, float]]:
        """The microbatches of all replicas, and the losses of each of which one was told."""
        if all(one.microbatches is None for one in parts):
            own = max((one.losses or () for one in parts), key=len)
            return None, dict(enumerate(own))
        # Who passes a single module has it as a stage of the rank's number, also where that is a replica. Ranks that
        # have the same parameters and the same microbatches share the work on these, as in tensor parallelism.
        held = [dict.fromkeys(file.header.parameters, 0) for file in self.files]
        alike = [(tuple(of), one.microbatches or rank) for rank, (of, one) in enumerate(zip(held, parts, strict=True))]
        first = {one: rank for rank, one in reversed(list(enumerate(alike)))}
        at = {rank: place for place, rank in enumerate(sorted(first.values()))}
        run, problems = run_of([Arrival(held[rank], parts[rank].microbatches, "") for rank in at])
        if problems:
            raise RecordError(f"step {number} of {self}: {told(problems)}")
        shares = [run.shares[at[first[one]]] for one in alike]
        every = range(len(run.microbatches))
        losses = {
            microbatch: loss
            for share, one in zip(shares, parts, strict=True)
            if one.losses is not None and len(one.losses) == len(every if share is None else share)
            for microbatch, loss in zip(every if share is None else share, one.losses, strict=True)
        }
        return run.microbatches, losses

    def _told(self, parts: Sequence[RankStep]) -> str:
        """Which rank's optimizer was told something else of a parameter than that of a rank before it, and what."""
        first: Options = {}
        for file, one in zip(self.files, parts, strict=True):
            if told := other_options(first, one.options):
                return f"the optimizer of rank {file.header.rank} was told {told}, unlike ranks before it"
            first = {**one.options, **first}
        return ""

    def _one(self, what: str, values: Sequence[float | None]) -> tuple[float | None, str]:
        """The number that all ranks tell that tell one; or, where these are several, a sentence."""
        known = {repr(one): one for one in values if one is not None}  # no NaN is equal to another
        if len(known) == 1:
            return known.popitem()[1], ""
        return None, f"ranks of {self} tell other numbers for the {what}" if known else ""


def _known(found: Mapping[str, Whole]) -> dict[str, Sketch]:
    return {name: one.sketch for name, one in found.items() if one.sketch is not None}


def _first(parts: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """What the first has that has it, by name, in the order in which they have it."""
    found: dict[str, Value] = {}
    for one in parts:
        found |= {name: value for name, value in one.items() if name not in found}
    return found

"""A run of many steps as all its ranks kept it: their parts put together, one step at a time."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TypeVar

from pipeproof.judging.tolerance import FP32, Precision, coarsest, precision_of
from pipeproof.observers.sketch import Sketch
from pipeproof.pipeline.files import cannot_read
from pipeproof.records.rank_part import Arrival, run_of, told
from pipeproof.records.record import RecordError
from pipeproof.records.run_file import Held, RankFile, RankStep, dtype_of

Value = TypeVar("Value")
_STEPS = 4  # that are kept at hand


@dataclass(frozen=True)
class KeptStep:
    """One step, by the model's names of parameters.

    losses: those of microbatches that some rank told, by the microbatch's number; ``loss`` and ``norm`` are None where
    none was told, or not one. before: weights that the step began with. apart: for each parameter that ranks hold alike
    and do not have alike, what of it, and the rank that has another than the first. mixed: what ranks say otherwise, by
    law. computed: how
    the type rounds that modules compute in, the narrowest of them.
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
    apart: Mapping[str, tuple[str, int]]
    mixed: Mapping[str, str] = field(default_factory=dict)
    computed: Precision = FP32

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
        self.step = lru_cache(_STEPS)(self._step)

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def numbers(self) -> list[int]:
        """Of the steps that all ranks kept: where a job was killed, the last of one may be lost to another."""
        return sorted(set[int].intersection(*(set(one.numbers) for one in self.files)))

    @cached_property
    def parameters(self) -> dict[str, Held]:
        """All of them, in the order of ranks; parts of one are apart from each other."""
        return _first([self._named(one) for one in self.files])

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """The first rank that holds each parameter, and the stage it is in there."""
        ranks = [(one.header.rank, self._named(one)) for one in self.files]
        return _first([{name: (rank, held.stage) for name, held in named.items()} for rank, named in ranks])

    def _named(self, file: RankFile) -> dict[str, Held]:
        return {f"{name} {held.part}".rstrip(): held for name, held in file.header.parameters.items()}

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
        if lost := [rank for rank in range(ranks) if rank not in there]:
            what = f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}"
            raise RecordError(
                f"{self} is of {ranks} ranks and lacks {what}: bring the files of all of them into one folder"
            )
        forms: dict[str, Held] = {}
        for one in self.files:
            for name, held in self._named(one).items():
                if forms.setdefault(name, held).form != held.form:
                    raise RecordError(f"{self}: ranks hold {name} as {forms[name]} and as {held}; expected one form")

    def _step(self, number: int) -> KeptStep:
        """The step of this number, of all ranks. Raises ``RecordError`` where one of them could not keep it."""
        parts = [self._part(file, number) for file in self.files]
        if problems := {
            file.header.rank: one.problem for file, one in zip(self.files, parts, strict=True) if one.problem
        }:
            raise RecordError(f"{self} lacks step {number}, which was not recorded: {told(problems)}")
        data, losses = self._data(number, parts)
        loss, norm = (self._one(what, [getattr(one, what) for one in parts]) for what in ("loss", "norm"))
        merged = {what: _first([getattr(one, what) for one in parts]) for what in ("before", "gradients", "weights")}
        apart = {
            name: (what, rank)
            for what, said in (("updated weight", "weights"), ("gradient", "gradients"), ("weight", "before"))
            for name, rank in reversed(list(self._apart([getattr(one, said) for one in parts])))
        }
        return KeptStep(
            number,
            data,
            losses,
            loss[0],
            norm[0],
            _first([one.options for one in parts]),
            **merged,
            clipped=any(one.clipped for one in parts),
            apart=apart,
            mixed={law: said for law, (_, said) in (("loss", loss), ("grad-norm", norm)) if said},
            computed=coarsest([precision_of(dtype_of(one.computed)) for one in parts if one.computed]),
        )

    def _part(self, file: RankFile, number: int) -> RankStep:
        """What one rank kept, with all weights that it began with, and parts by names of their own."""
        step, earlier = file.step(number), file.before(number)
        left = {} if earlier is None else earlier.weights
        by = dict(zip(file.header.parameters, self._named(file), strict=True))

        def named(found: Mapping[str, Value]) -> dict[str, Value]:
            return {by[name]: one for name, one in found.items()}

        return replace(
            step,
            options=named(step.options),
            before=named({**left, **step.before}),
            gradients=named(step.gradients),
            weights=named(step.weights),
        )

    def _data(self, number: int, parts: Sequence[RankStep]) -> tuple[tuple[str, ...] | None, dict[int, float]]:
        """The microbatches of all replicas, and the losses of each of which one was told."""
        if all(one.microbatches is None for one in parts):
            own = max((one.losses or () for one in parts), key=len)
            return None, dict(enumerate(own))
        # Who passes a single module has it as a stage of the rank's number, also where that is a replica; and parts of
        # the same parameters are trained on microbatches of their own.
        held = [dict.fromkeys(file.header.parameters, 0) for file in self.files]
        run, problems = run_of([Arrival(of, one.microbatches, "") for of, one in zip(held, parts, strict=True)])
        if problems:
            raise RecordError(f"step {number} of {self}: {told(problems)}")
        losses = {
            microbatch: loss
            for share, one in zip(run.shares, parts, strict=True)
            if one.losses is not None
            for microbatch, loss in zip(range(len(one.losses)) if share is None else share, one.losses, strict=False)
        }
        return run.microbatches, losses

    def _one(self, what: str, values: Sequence[float | None]) -> tuple[float | None, str]:
        """The number that all ranks tell that tell one; or, where these are several, a sentence."""
        known = {one for one in values if one is not None}
        if len(known) == 1:
            return known.pop(), ""
        return None, f"ranks of {self} tell other numbers for the {what}" if known else ""

    def _apart(self, parts: Sequence[Mapping[str, Sketch | None]]) -> Iterator[tuple[str, int]]:
        """Parameters that a rank has otherwise than the first that has them, and that rank."""
        first: dict[str, Sketch | None] = {}
        for file, each in zip(self.files, parts, strict=True):
            for name, one in each.items():
                if first.setdefault(name, one) is not one and _content(first[name]) != _content(one):
                    yield name, file.header.rank


def _content(one: Sketch | None) -> bytes:
    return b"" if one is None else one.digest


def _first(parts: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """What the first has that has it, by name, in the order in which they have it."""
    found: dict[str, Value] = {}
    for one in parts:
        found |= {name: value for name, value in one.items() if name not in found}
    return found

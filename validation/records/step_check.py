"""One step of a running job under torchrun, held against a record, or against the single-device model beside it.

Every rank compares its own stages, one tensor at a time and where the job holds it, so that comparing takes no more
memory than the largest parameter. What ranks exchange takes more: the store has all weights while a reference is made
of them, and of gradients that ranks have in parts all that others are to judge, until the end. The verdicts are joined
there, so that all ranks have the same.
"""

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from pipeproof.foreign.handed_back import Gradient
from pipeproof.foreign.reference_run import WhiteBoxError
from pipeproof.judging.comparison import Comparison
from pipeproof.judging.ledger import Ledger
from pipeproof.judging.verdict import Crash, Verdict
from pipeproof.observers.shards import Shard
from pipeproof.observers.wrappers import AroundGradients
from pipeproof.pipeline.step import Parts
from pipeproof.records.as_given import (
    bound_of,
    check_operation,
    gradients_of,
    losses_of,
    named_by,
    number,
    pairs_of,
    source_of,
    stages_of,
)
from pipeproof.records.held_in_common import HeldInCommon
from pipeproof.records.rank_part import (
    MOST,
    AdapterNames,
    Arrival,
    Kept,
    RankStages,
    Rename,
    Run,
    other_run,
    own_name,
    places_of,
    run_of,
    told,
)
from pipeproof.records.record import (
    ContentError,
    Record,
    RecordedOperation,
    RecordError,
    against,
    microbatch_digests,
    upstream,
)
from pipeproof.records.record_evidence import Step, checked, explained
from pipeproof.records.record_file import read
from pipeproof.records.single_device import ReferenceBeside, SingleDevice
from pipeproof.records.step_parts import EVERY_LAW, StepPart, joined
from pipeproof.records.step_record import Pairs
from pipeproof.worlds.rank_report import Ending, RankReport
from pipeproof.worlds.side_store import Exchange, RanksAbsent, exchange

_OTHERS_S = 300.0  # how long the others are waited for where the bound that is given is none
_LAST_WORDS_S = 10.0  # a rank that raised waits no longer than this for the others before it goes its way


class CheckError(ValueError):
    """A check that is used in the wrong order."""


class StepCheck:
    """A context manager around one step of a job. Every rank enters it.

    Call ``gradients`` between backward and clipping, and ``report`` anywhere. After the block there is a ``verdict``.
    """

    def __init__(
        self,
        modules: nn.Module | Mapping[int, nn.Module],
        microbatches: Pairs | None,
        *,
        against: str | Path | Record | SingleDevice,
        rename: Rename = own_name,
        operation: int = 0,
        timeout_s: float = 300.0,
    ) -> None:
        """modules: this rank's stages by number. A single module is the stage of this rank's number.

        microbatches: pairs of inputs and target. None on a rank that does not have them; for a ``SingleDevice``, rank 0
        must. against: a record, its file, or the model beside the job. rename: from a stage's number and a name in it
        to the record's name. operation: which one of the record's. timeout_s: bounds each wait for the other ranks,
        and so for the reference.
        """
        self._modules, self._rename = modules, rename
        self._given = microbatches
        self._timeout_s, self._bound_s = timeout_s, _OTHERS_S
        self._source = against
        self._own = RankStages({}, own_name)  # as long as nobody knows that what was given is of use
        self._number = operation
        self._ledger = Ledger(EVERY_LAW)
        self._held: HeldInCommon | None = None  # as ``_at``
        self._shards: Mapping[str, Shard] = {}
        self._at: Comparison | None = None  # None before the step, and where there is nothing to judge
        self._expected: RecordedOperation | None = None
        self._norm: float | None = None
        self._no_norm = ""  # why, where this rank was told one and reports none
        self._record: Record | None = None
        self._beside: ReferenceBeside | None = None
        self._problem = ""  # of this rank, with the record
        self._crash: Crash | None = None  # of this rank, which ends no job
        self._obstacle = ""  # why there is nothing to compare
        self._absent: RanksAbsent | None = None  # who did not come
        self._verdict: Verdict | None = None
        self._run = Run((0,), (), (None,))

    def __enter__(self) -> "StepCheck":
        self._began = perf_counter()
        self._exchange: Exchange = exchange()
        self._kept = Kept(self._exchange.rank, MOST // self._exchange.ranks)
        with self.noting():
            try:
                self._obstacle = self._begin()
            except RanksAbsent as absent:
                self._absent = absent
            if self._at is not None:
                self._kept.begin(self._own.gradients)
        return self

    def refuse(self, why: str) -> None:
        """Say why this rank's part cannot be judged, before the block or in it: the step is unknown then."""
        self._problem = self._problem or why

    @property
    def verdict(self) -> Verdict:
        """The verdict of all ranks together, the same on each. Raises ``CheckError`` before the end of the block."""
        if self._verdict is None:
            raise CheckError("the verdict is known at the end of the with block, on every rank")
        return self._verdict

    def gradients(self, named: Mapping[str, Gradient] | None = None) -> None:
        """Compare this rank's gradients now: they must be complete, and not clipped yet.

        ``named``: gradients by the record's names, for a runtime that does not keep them in ``.grad``. Of those of
        which it has a part, in a DTensor or a ``FlatShard``, ranks put parts together at the end of the block.
        """
        if self._at is not None and self._held is not None and self._expected is not None:
            with self.noting():
                found = self._own.gradients if named is None else gradients_of(named, self._expected.gradients)
                given = {name: found[name] for name in self._expected.gradients if name in found}
                for name in upstream(given, self._own.places):
                    one, shard = given[name], self._own.shards.get(name)
                    whole, gradient = self._held.take(name, (None, shard) if one is None and shard else one)
                    if whole:
                        self._compare(self._at, name, gradient)

    def _compare(self, at: Comparison, name: str, gradient: Tensor | None) -> None:
        before = len(self._ledger.mismatches)
        at.gradient(name, gradient, **self._own.where(name, self._exchange.rank))
        self._kept.end(name, gradient, wrong=len(self._ledger.mismatches) > before)

    def report(
        self,
        *,
        losses: Sequence[float] | None = None,
        loss: float | None = None,
        norm: float | None = None,
        in_order: bool = True,
    ) -> None:
        """Compare what this rank knows: the microbatches' losses, undivided; what they are together; the norm.

        ``in_order``: losses come as microbatches were given to the check. Else they may be in any order.
        """
        if self._at is None or self._expected is None:
            return
        rank, share = self._exchange.rank, self._run.shares[self._exchange.rank]
        with self.noting():
            known = None if losses is None else losses_of(losses)
            if known is not None and share is None and len(known) != len(self._expected.losses):
                told = "whose losses these are nobody says: pass each replica the microbatches it runs"
                self._ledger.doubt("loss", told)
            elif known is not None:
                self._at.losses(known, share=share, rank=rank, in_order=in_order)
            if loss is not None:
                self._at.loss(number("loss", loss), share=share, rank=rank)
            if norm is not None:
                self._norm = number("norm", norm)
                self._at.norm(self._norm, rank=rank)

    def miss_norm(self, why: str) -> None:
        """Say why this rank does not report the norm that it was told."""
        self._no_norm = why

    def begin(self, gradients: Mapping[str, Gradient]) -> None:
        """Say what gradients will be added to, by the record's names: what is there by then is no part of the step."""
        if self._at is not None:
            with self.noting():
                self._kept.begin({n: one for n, one in gradients.items() if one is None or isinstance(one, Tensor)})

    def wrap(self, parts: Parts) -> Parts:
        """For ``PipelineSchedule.wrapped``: its steps then call ``gradients`` themselves, at the right moment."""
        return replace(parts, gradients=_Checked(parts, self))

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Keep what is raised inside for all ranks to know in the end: it is the check that failed, and not the job."""
        try:
            yield
        except (RecordError, ContentError, WhiteBoxError) as error:
            self._problem = self._problem or str(error)
        except Exception as error:  # no one type, and no reason to end a job
            self._crash = self._crash or Crash.of(error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._at is not None and error is None:
            with self.noting():
                self._compare_in_common(self._at)
                self._compare_after(self._at)
        ending = Ending.FINISHED if error is None else Ending.RAISED
        message = "" if error is None else f"{type(error).__name__}: {error}"
        about = RankReport(self._exchange.rank, ending, message)
        why = self._why if self._at is None else self._problem
        mine = StepPart(about, self._ledger, self._kept.notes, self._norm, why, self._crash, self._no_norm)
        what = "the end of the checked step"
        bound_s = self._bound_s if error is None else min(self._bound_s, _LAST_WORDS_S)
        try:
            parts = self._exchange.finish(mine, what=what, bound_s=bound_s)
        except RanksAbsent as absent:
            parts, self._absent = [mine], self._absent or absent
        self._verdict = self._explained(self._joined(parts), parts)
        if self._held is not None:
            self._held.clear()
        if self._beside is not None:
            self._beside.clear()

    @property
    def _why(self) -> str:
        """What stands in the way of a comparison on this rank, or nothing."""
        return self._problem or ("" if self._crash is None else f"the check raised {self._crash.said}")

    def _compare_in_common(self, at: Comparison) -> None:
        """Compare the gradients of which ranks have parts, and hold against each other what several have."""
        assert self._held is not None, "there is something to compare"
        try:
            self._held.enter(self._ledger, self._number, self._run.members, partial(self._compare, at))
        except RanksAbsent as absent:  # all ranks are to know that a part did not come
            self._problem = self._problem or str(absent)

    def _compare_after(self, at: Comparison) -> None:
        """Compare what the step has left."""
        assert self._expected is not None, "there is something to compare with"
        due = [name for name in self._expected.parameters if name in self._own.parameters]
        for name in (name for name in due if name not in self._own.shards):
            at.parameter(name, self._own.parameters[name], **self._own.where(name, self._exchange.rank))
        self._ledger.leave_out("updated-parameters", [name for name in due if name in self._own.shards], "in parts")
        if self._run.count == 1 and self._expected.buffers:
            for name, (stage, buffer) in self._own.buffers.items():
                at.buffer(name, buffer, rank=self._exchange.rank, stage=stage)
        at.close()

    def _begin(self) -> str:
        """Agree on what is expected; what stands in the way of a comparison, in sentences, or nothing."""
        record: Record | None = None
        digests: tuple[str, ...] | None = None
        places: dict[str, int] = {}
        with self.noting():
            self._bound_s = bound_of(self._timeout_s)
            self._take_given()
            record = self._read()
            digests = None if self._given is None else microbatch_digests(self._given)
            self._own.check_names()
            places, self._shards = self._own.places, self._own.shards
            if record is not None:
                self._own.check_start(record.operations[self._number])
        mine = Arrival(places, digests, self._why, self._shards)
        arrivals: list[Arrival] = self._gather(mine, "the beginning of the checked step")
        problems = {rank: arrival.problem for rank, arrival in enumerate(arrivals) if arrival.problem}
        run, wrong = run_of(arrivals)
        problems = problems or wrong
        if not problems and self._beside is not None:
            shares = run.members.each if run.apart else ()
            record, problems = self._beside.record(self._own.parameters, arrivals, self._every(run), shares=shares)
        elif not problems and record is not None:
            problems = other_run(run, record.operations[self._number])
        if problems or record is None:
            return told(problems)
        self._record, self._expected = record, record.operations[self._number]
        self._run, self._places = run.as_in(self._expected.microbatches), places_of(arrivals)
        self._at = against(self._expected, self._ledger, number=self._number)
        self._held = HeldInCommon(self._exchange, self._places, self._own.shapes, bound_s=self._bound_s)
        if self._exchange.rank == 0:
            with self.noting():
                self._count(self._at, self._expected)
        return ""

    def _take_given(self) -> None:
        """Take what the user gave. Raises ``RecordError`` for what is of no use."""
        source = source_of(self._source)
        check_operation(self._number, source)
        self._own = RankStages(stages_of(self._modules, self._exchange.rank), named_by(self._rename))
        self._given = pairs_of(self._given)
        if isinstance(source, SingleDevice):
            renamable = not isinstance(self._rename, AdapterNames)
            self._beside = ReferenceBeside(source, self._exchange, timeout_s=self._bound_s, renamable=renamable)

    def _count(self, at: Comparison, expected: RecordedOperation) -> None:
        """How many stages hold each parameter; a copy of a weight that the model uses in several may be in each."""
        due = dict.fromkeys([*expected.before, *expected.gradients])
        counts = {name: len({stage for _, stage in found}) for name, found in self._places.items()}
        several = max(counts.values(), default=0) > 1
        copies = self._beside.repeated() if several and self._beside is not None else None
        for name in dict.fromkeys([*due, *counts]):
            count, wanted = counts.get(name, 0), int(name in due)
            if count > 1 and wanted and copies is None:
                why = f"{name} is in {count} stages: as copies of one weight, or by a mistake"
                self._ledger.doubt("parameters-once", f"{why}; the model beside the job would tell")
            count = 1 if count > 1 and wanted and (copies is None or name in copies) else count
            rank, stage = next(iter(self._places.get(name, ())), (None, None))
            at.held(name, count, due=wanted, rank=rank, stage=stage)

    def _every(self, run: Run) -> Pairs | None:
        """The microbatches of all replicas, on rank 0, which runs the reference; elsewhere this rank's own."""
        if not run.apart:
            return self._given
        given = self._gather(self._given, "the microbatches of all replicas")
        return run.together(given) if self._exchange.rank == 0 else self._given

    def _read(self) -> Record | None:
        """The record, where there is one already."""
        found = read(self._source) if isinstance(self._source, str | Path) else self._source
        if not isinstance(found, Record):
            return None
        plan = [one.operation for one in found.operations]
        if not 0 <= self._number < len(plan) or plan[self._number] != "train":
            raise RecordError(f"operation {self._number} of {'+'.join(plan)} is no training step")
        return found

    def _joined(self, parts: Sequence[StepPart]) -> Verdict:
        return joined(
            parts,
            None if self._record is None or self._expected is None else (self._record, self._number),
            absent=self._absent,
            obstacle=self._obstacle,
            replicas=self._run.count,
            rerun=f"torchrun --nproc-per-node {self._exchange.ranks} {shlex.join(sys.argv)}",
            seconds=perf_counter() - self._began,
        )

    def _explained(self, verdict: Verdict, parts: Sequence[StepPart]) -> Verdict:
        """``verdict`` with its causes, where there is something to explain: all ranks have the same parts."""
        if not verdict.mismatches:
            return verdict
        bound_s = self._bound_s
        return explained(
            verdict, self._kept, self._exchange, look=lambda: self._checked(parts).evidence(verdict), bound_s=bound_s
        )

    def _checked(self, parts: Sequence[StepPart]) -> Step:
        assert self._record is not None, "there was something to compare with"
        found = checked(
            self._record,
            self._number,
            self._places,
            notes=[part.notes for part in parts],
            norms=[part.norm for part in parts],
            fetch=lambda name: self._exchange.take(name, bound_s=self._bound_s),
            model=None if self._beside is None else self._beside.update,
        )
        return found if self._held is None else replace(found, shards=self._held.shards, replicas=self._run.members)

    def _gather(self, value: object, what: str) -> list[Any]:
        return self._exchange.gather(value, what=what, bound_s=self._bound_s)


class _Checked(AroundGradients):
    """Gradient work that has gradients compared between the tied reduction and the clipping."""

    def __init__(self, parts: Parts, check: StepCheck) -> None:
        super().__init__(parts.gradients, parts.stages)
        self._check = check

    def reduce_tied(self) -> None:
        self.inner.reduce_tied()
        self._check.gradients()


check_step = StepCheck  # as users call it

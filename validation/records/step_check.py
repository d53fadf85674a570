"""One step of a running job under torchrun, held against a record, or against the single-device model beside it.

Every rank compares its own stages, one tensor at a time and where the job holds it, so that comparing takes no more
memory than the largest parameter; beside the model, the gradients that differ in bits wait on the host until the end,
when it measures what rounding does. What ranks exchange takes more: the store has all weights while a reference is made
of them, and of gradients that ranks have in parts all that others are to judge, until the end. The verdicts are joined
there, so that all ranks have the same.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Self

from torch import Tensor, nn

from pipeproof.core.comparison import Comparison
from pipeproof.core.nudged import OtherProducts
from pipeproof.core.observe.shards import Shard
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import Verdict
from pipeproof.records.as_given import (
    check_operation,
    gradients_of,
    losses_of,
    number,
    source_of,
)
from pipeproof.records.checked_step import CheckedStep
from pipeproof.records.checked_step import CheckError as CheckError
from pipeproof.records.floors_later import FloorsLater
from pipeproof.records.held_in_common import HeldInCommon
from pipeproof.records.last_check import LastCheck, last_check, remember
from pipeproof.records.rank_part import (
    MOST,
    AdapterNames,
    Kept,
    Rename,
    Run,
    other_run,
    own_name,
    places_of,
    run_of,
    told,
)
from pipeproof.records.record import Record, Recorded, RecordedOperation, RecordError, against, upstream
from pipeproof.records.record_file import read
from pipeproof.records.single_device import ReferenceBeside, SingleDevice
from pipeproof.records.step_expectation import StepExpectation
from pipeproof.records.step_parts import EVERY_LAW, StepPart, joined
from pipeproof.records.step_record import Pairs
from pipeproof.records.unchecked import check_of
from pipeproof.reference.products import products_in
from pipeproof.whitebox.handed_back import Gradient
from pipeproof.worlds.accelerator import CPU
from pipeproof.worlds.rank_report import RankReport
from pipeproof.worlds.side_store import RanksAbsent

_TOTAL_OF_SOME = (
    "what the losses of some of the replicas are together may be theirs or that of all: report the losses alone, each "
    "replica those of its microbatches"
)

if TYPE_CHECKING:
    from pipeproof.records.record_evidence import RecordedStep


class StepCheck(CheckedStep):
    """A step held against a record, or against the model beside the job."""

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
        """As ``check_step``, which says what each of these is."""
        super().__init__(modules, microbatches, laws=EVERY_LAW, rename=rename, timeout_s=timeout_s)
        self._source = against
        self._number = operation
        self._held: HeldInCommon | None = None  # as ``_at``
        self._shards: Mapping[str, Shard] = {}
        self._at: Comparison | None = None  # None before the step, and where there is nothing to judge
        self._expected: RecordedOperation | None = None
        self._later = FloorsLater(wait=False)
        self._norm: float | None = None
        self._record: Record | None = None
        self._beside: ReferenceBeside | None = None
        self._last = LastCheck()
        self._sums: Mapping[str, object] = {}  # gradients that were handed over

    def __enter__(self) -> Self:
        super().__enter__()
        self._kept = Kept(self._exchange.rank, MOST // self._exchange.ranks)
        if self._at is not None:
            with self.noting():
                self._last = last_check(self._own.modules)
                self._ledger.held = self._last.held(self._given)
                self._kept.begin(self._own.gradients | self._last.added_to)
        return self

    def gradients(self, named: Mapping[str, Gradient] | None = None) -> None:
        """Compare this rank's gradients now: they must be complete, and not clipped yet.

        ``named``: gradients by the record's names, for a runtime that does not keep them in ``.grad``. Of those of
        which it has a part, in a DTensor or a ``FlatShard``, ranks put parts together at the end of the block. Where
        ranks of a stage have a ``FlatShard``, one that leaves a gradient out has no part of it.
        """
        if self._at is not None and self._held is not None and self._expected is not None:
            with self.noting():
                found = self._own.gradients if named is None else gradients_of(named, self._expected.gradients)
                self._sums = {} if named is None else found
                given = {name: found[name] for name in self._expected.gradients if name in found}
                for name in upstream(given, self._own.places):
                    one, shard = given[name], self._own.shards.get(name)
                    whole, gradient = self._held.take(name, (None, shard) if one is None and shard else one)
                    if whole:
                        self._compare(self._at, name, gradient)

    def _compare(self, at: Comparison, name: str, gradient: Tensor | None) -> None:
        self._later.gradient(name, gradient, at.due.gradients, partial(self._enter, at, name))

    def _enter(self, at: Comparison, name: str, gradient: Tensor | None) -> None:
        before, where = len(self._ledger.mismatches), self._own.where(name, self._exchange.rank)
        at.gradient(name, gradient, **where)
        found = self._ledger.compared.get(("gradient", where.get("rank"), where.get("stage"), None, name))
        wrong = len(self._ledger.mismatches) > before
        self._kept.end(name, gradient, wrong=wrong, apart=0.0 if found is None else found.apart)

    def report(
        self,
        *,
        losses: Sequence[float] | None = None,
        loss: float | None = None,
        norm: float | None = None,
    ) -> None:
        """Compare what this rank knows: the losses of its microbatches, undivided; what they are together; the norm.

        ``losses`` come in the order in which microbatches were given to the check.
        """
        if self._at is None or self._expected is None:
            return
        rank, share = self._exchange.rank, self._run.shares[self._exchange.rank]
        with self.noting():
            known = None if losses is None else losses_of(losses)
            if known is not None and share is None and len(known) != len(self._expected.losses):
                told = "whose losses these are nobody says: pass each replica the microbatches it runs"
                self._ledger.doubt("loss", told, Reason.LOSS_SCALE)
            elif known is not None:
                exact = tuple(known) == tuple(self._expected.losses[k] for k in share or range(len(known)))
                self._later.enter(partial(self._at.losses, known, share=share, rank=rank), exact=exact)
            whole = None if loss is None else number("loss", loss)
            if whole is not None and share is not None and len(share) < len(self._expected.losses):
                self._ledger.doubt("loss", _TOTAL_OF_SOME, Reason.LOSS_SCALE)
            elif whole is not None:
                self._later.enter(partial(self._at.loss, whole, rank=rank), exact=whole == self._expected.loss)
            if norm is not None:
                self._norm = norm = number("norm", norm)
                self._later.enter(partial(self._at.norm, norm, rank=rank), exact=norm == self._expected.norm)

    def begin(self, gradients: Mapping[str, Gradient]) -> None:
        """Say what gradients will be added to, by the record's names: what is there by then is no part of the step."""
        if self._at is not None:
            with self.noting():
                self._kept.begin({n: one for n, one in gradients.items() if one is None or isinstance(one, Tensor)})

    def _finish(self) -> None:
        if self._at is not None:
            self._compare_in_common(self._at)
            self._compare_after(self._at)

    def _part(self, about: RankReport) -> StepPart:
        why = self._why if self._at is None else self._problem
        waits, due = self._later.asks(self._ledger), self._expected
        rounding = None if due is None or waits or self._ledger.all_exact else Recorded(due).precision
        more = self._crash, self._no_norm, self._products, waits, rounding
        return StepPart(about, self._ledger, self._kept.notes, self._norm, why, *more)

    @property
    def _products(self) -> Mapping[str, str]:
        """As what this rank rounds products of fp32, where anything is wrong that this may explain."""
        if self._record is None or not self._ledger.mismatches:
            return {}
        place = next((one.device for one in self._own.parameters.values()), CPU)
        return products_in(place, self._record.products)

    def _concluded(self, parts: Sequence[StepPart]) -> Verdict:
        blank = len(parts) < self._exchange.ranks or any(one.problem or one.report.failed for one in parts)
        if not blank and any(one.waits for one in parts):
            try:
                parts = self._settled(parts)
            except RanksAbsent as absent:
                self._obstacle = f"what rounding does to the step is not known: {absent}"
        verdict = joined(
            parts,
            None if self._record is None or self._expected is None else (self._record, self._number),
            absent=self._absent,
            obstacle=self._obstacle,
            replicas=self._run.count,
            rerun=f"torchrun --nproc-per-node {self._exchange.ranks} {shlex.join(sys.argv)}",
            seconds=perf_counter() - self._began,
        )
        return self._explained(verdict, parts)

    def _settled(self, parts: Sequence[StepPart]) -> Sequence[StepPart]:
        """The parts once floors are measured, and all is compared: every rank calls this."""
        if self._beside is None or self._at is None or self._record is None:
            return parts
        found, problems = self._beside.measured(self._record)
        if found is None:
            self._obstacle = told(problems)
            return parts
        self._record, self._expected = found, found.operations[0]
        self._at.allowed = Recorded(self._expected)
        for entry in self._later.settled():
            with self.noting():
                entry()
        mine = self._part(parts[self._exchange.rank].report)
        return self._exchange.finish(mine, what="what floors decide in the checked step", bound_s=self._bound_s)

    def _clear(self) -> None:
        if self._at is not None:
            weights = dict[str, Tensor] if self._beside is None else self._beside.weights
            remember(self._own.modules, self.verdict, self._given, sums=self._sums, weights=weights)
        if self._held is not None:
            self._held.clear()
        if self._beside is not None:
            self._beside.clear()

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
        shards = [name for name in due if name in self._own.shards]
        self._ledger.leave_out("updated-parameters", shards, "in parts", Reason.PARTS)
        if self._run.count == 1 and self._expected.buffers:
            for name, (stage, buffer) in self._own.buffers.items():
                at.buffer(name, buffer, rank=self._exchange.rank, stage=stage)
        self._later.enter(at.close)

    def _begin(self) -> str:
        record: Record | None = None
        with self.noting():
            self._take_given()
            record = self._read()
            self._shards = self._own.shards
            if record is not None:
                self._own.check_start(record.operations[self._number])
        arrivals = self._arrivals()
        problems = {rank: arrival.problem for rank, arrival in enumerate(arrivals) if arrival.problem}
        run, wrong = run_of(arrivals)
        problems = problems or wrong
        if not problems and self._beside is not None:
            shares = run.members.each if run.apart else ()
            given = self._own.parameters, arrivals, self._every(run)
            record, problems = self._beside.record(*given, shares=shares, beside=self._own.modules)
        elif not problems and record is not None:
            problems = other_run(run, record.operations[self._number])
        if problems or record is None:
            return told(problems)
        self._record, self._expected = record, record.operations[self._number]
        self._run, self._places = run.as_in(self._expected.microbatches), places_of(arrivals)
        self._at = against(self._expected, self._ledger, number=self._number)
        self._later = FloorsLater(wait=self._beside is not None and self._beside.source.floors)
        compared = {name: places for name, places in self._places.items() if name in self._expected.gradients}
        self._held = HeldInCommon(self._exchange, compared, self._own.shapes, bound_s=self._bound_s)
        if self._exchange.rank == 0:
            with self.noting():
                self._count(self._at, self._expected)
        return ""

    def _take_given(self) -> None:
        super()._take_given()
        source = source_of(self._source)
        check_operation(self._number, source)
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
                told = f"{why}; the model beside the job would tell"
                self._ledger.doubt("parameters-once", told, Reason.EQUAL_WEIGHTS)
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

    def _explained(self, verdict: Verdict, parts: Sequence[StepPart]) -> Verdict:
        """``verdict`` with its causes, where there is something to explain: all ranks have the same parts."""
        if not verdict.mismatches:
            return verdict
        from pipeproof.records.record_evidence import explained  # loaded where something is wrong

        assert self._record is not None, "there was something to compare with"
        with nullcontext() if self._beside is None else self._beside.apart():
            return explained(
                verdict,
                self._kept,
                self._exchange,
                look=lambda judged: self._checked(parts).evidence(judged),
                moved=self._record.moved if self._beside is None else self._beside.moved,
                products=OtherProducts.among(self._record.products, [part.products for part in parts]),
                bound_s=self._bound_s,
            )

    def _checked(self, parts: Sequence[StepPart]) -> "RecordedStep":
        from pipeproof.records.record_evidence import checked

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
        if self._beside is not None and self._last.weights:
            found = replace(found, earlier=(self._last.weights,), with_weights=self._beside.with_weights)
        return found if self._held is None else replace(found, shards=self._held.shards, replicas=self._run.members)


def check_step(
    modules: nn.Module | Mapping[int, nn.Module],
    microbatches: Pairs | None,
    *,
    against: str | Path | Record | SingleDevice | StepExpectation,
    rename: Rename = own_name,
    operation: int = 0,
    timeout_s: float = 300.0,
) -> CheckedStep:
    """A context manager around one step of a job. Every rank enters it.

    Call ``gradients`` between backward and clipping, and ``report`` anywhere. After the block there is a ``verdict``.

    modules: this rank's stages by number. A single module is the stage of this rank's number.
    microbatches: pairs of inputs and target. None on a rank that does not have them; for a ``SingleDevice``, rank 0
    must, and for ``Composed`` the ranks of the first and of the last stage. against: a record, its file, the model
    beside the job, or the step itself, link by link. rename: from a stage's number and a name in it to the name in the
    whole model, or in the record. operation: which one of the record's. timeout_s: bounds each wait for the other
    ranks, and so for the reference.
    """
    if isinstance(against, StepExpectation):
        return check_of(against, modules, microbatches, rename=rename, operation=operation, timeout_s=timeout_s)
    return StepCheck(modules, microbatches, against=against, rename=rename, operation=operation, timeout_s=timeout_s)

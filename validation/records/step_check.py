"""Check a step in a job under torchrun against a record, or a single-device model beside it.

Every rank compares its own stages, one tensor at a time and in place, so that comparing takes no more memory than the
largest parameter; beside the model, gradients that differ in bits wait on the host until the end, for measured floors.
The exchange takes more: the store has all weights during the build of a reference, and all parts of gradients that
other ranks judge, until the end. All ranks join their verdicts there, and have the same.
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
    describe_problems,
    other_run,
    own_name,
    places_of,
    run_of,
)
from pipeproof.records.record import Record, Recorded, RecordedOperation, RecordError, against, upstream
from pipeproof.records.record_file import read
from pipeproof.records.single_device import ReferenceBeside, SingleDevice
from pipeproof.records.step_expectation import StepExpectation
from pipeproof.records.step_parts import EVERY_LAW, StepPart, join_parts
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
    """A step compared with a record, or with the model beside the job."""

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
        """Take ``check_step``'s arguments."""
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
                self._ledger.held = self._last.bitwise_laws(self._given)
                self._kept.begin(self._own.gradients | self._last.added_to)
        return self

    def gradients(self, named: Mapping[str, Gradient] | None = None) -> None:
        """Compare this rank's gradients now: complete, and not clipped yet.

        ``named``: gradients by the record's names, for a runtime that does not keep them in ``.grad``. Parts, in a
        DTensor or a ``FlatShard``, are joined at the end of the block. If ranks of a stage have a ``FlatShard``, an
        omitted gradient means no part.
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
        self._later.gradient(name, gradient, at.expected.gradients, partial(self._enter, at, name))

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
        """Compare this rank's results: microbatch losses, undivided; their total; the norm.

        ``losses`` come in the order of the microbatches given to the check.
        """
        if self._at is None or self._expected is None:
            return
        rank, share = self._exchange.rank, self._run.shares[self._exchange.rank]
        with self.noting():
            known = None if losses is None else losses_of(losses)
            if known is not None and share is None and len(known) != len(self._expected.losses):
                text = "the microbatches of these losses are not known: pass each replica the microbatches it runs"
                self._ledger.doubt("loss", text, Reason.LOSS_SCALE)
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
        """Declare initial gradients, by the record's names: content from before the step."""
        if self._at is not None:
            with self.noting():
                self._kept.begin({n: one for n, one in gradients.items() if one is None or isinstance(one, Tensor)})

    def _finish(self) -> None:
        if self._at is not None:
            self._compare_in_common(self._at)
            self._compare_after(self._at)

    def _part(self, about: RankReport) -> StepPart:
        why = self._why if self._at is None else self._problem
        waits, expected = self._later.asks(self._ledger), self._expected
        rounding = None if expected is None or waits or self._ledger.all_exact else Recorded(expected).precision
        more = self._crash, self._no_norm, self._products, waits, rounding
        return StepPart(about, self._ledger, self._kept.notes, self._norm, why, *more)

    @property
    def _products(self) -> Mapping[str, str]:
        """Return this rank's rounding for fp32 products, if it may explain a mismatch."""
        if self._record is None or not self._ledger.mismatches:
            return {}
        place = next((one.device for one in self._own.parameters.values()), CPU)
        return products_in(place, self._record.products)

    def _conclude(self, parts: Sequence[StepPart]) -> Verdict:
        blank = len(parts) < self._exchange.ranks or any(one.problem or one.report.failed for one in parts)
        if not blank and any(one.waits for one in parts):
            try:
                parts = self._settle(parts)
            except RanksAbsent as absent:
                self._obstacle = f"what rounding does to the step is not known: {absent}"
        verdict = join_parts(
            parts,
            None if self._record is None or self._expected is None else (self._record, self._number),
            absent=self._absent,
            obstacle=self._obstacle,
            replicas=self._run.count,
            rerun=f"torchrun --nproc-per-node {self._exchange.ranks} {shlex.join(sys.argv)}",
            seconds=perf_counter() - self._began,
        )
        return self._explain(verdict, parts)

    def _settle(self, parts: Sequence[StepPart]) -> Sequence[StepPart]:
        """Measure floors, finish all comparisons, and return the new parts: every rank calls this."""
        if self._beside is None or self._at is None or self._record is None:
            return parts
        found, problems = self._beside.measure(self._record)
        if found is None:
            self._obstacle = describe_problems(problems)
            return parts
        self._record, self._expected = found, found.operations[0]
        self._at.allowed = Recorded(self._expected)
        for entry in self._later.settle():
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
        """Compare gradients in parts, and copies with each other."""
        assert self._held is not None, "there is something to compare"
        try:
            self._held.enter(self._ledger, self._number, self._run.members, partial(self._compare, at))
        except RanksAbsent as absent:  # all ranks are to know that a part did not come
            self._problem = self._problem or str(absent)

    def _compare_after(self, at: Comparison) -> None:
        """Compare the state after the step."""
        assert self._expected is not None, "there is something to compare with"
        expected = [name for name in self._expected.parameters if name in self._own.parameters]
        for name in (name for name in expected if name not in self._own.shards):
            at.parameter(name, self._own.parameters[name], **self._own.where(name, self._exchange.rank))
        shards = [name for name in expected if name in self._own.shards]
        self._ledger.leave_out("updated-parameters", shards, "in parts", Reason.PARTS)
        if self._run.count == 1 and self._expected.buffers:
            for name, (stage, buffer) in self._own.buffers.items():
                at.buffer(name, buffer, rank=self._exchange.rank, stage=stage)
        self._later.enter(at.close)

    def _begin(self) -> str:
        record: Record | None = None
        with self.noting():
            self._take_given()
            record = self._read_record()
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
            return describe_problems(problems)
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
        """Count the stages of each parameter; copies of a weight used in several places count once."""
        names = dict.fromkeys([*expected.before, *expected.gradients])
        counts = {name: len({stage for _, stage in found}) for name, found in self._places.items()}
        several = max(counts.values(), default=0) > 1
        copies = self._beside.repeated_parameters() if several and self._beside is not None else None
        for name in dict.fromkeys([*names, *counts]):
            count, wanted = counts.get(name, 0), int(name in names)
            if count > 1 and wanted and copies is None:
                why = f"{name} is in {count} stages: as copies of one weight, or by a mistake"
                text = f"{why}; the model beside the job would tell"
                self._ledger.doubt("parameters-once", text, Reason.EQUAL_WEIGHTS)
            count = 1 if count > 1 and wanted and (copies is None or name in copies) else count
            rank, stage = next(iter(self._places.get(name, ())), (None, None))
            at.count_holders(name, count, expected=wanted, rank=rank, stage=stage)

    def _every(self, run: Run) -> Pairs | None:
        """All replicas' microbatches, on rank 0 for the reference; elsewhere the rank's."""
        if not run.apart:
            return self._given
        given = self._gather(self._given, "the microbatches of all replicas")
        return run.together(given) if self._exchange.rank == 0 else self._given

    def _read_record(self) -> Record | None:
        """Read the record, if given."""
        found = read(self._source) if isinstance(self._source, str | Path) else self._source
        if not isinstance(found, Record):
            return None
        plan = [one.operation for one in found.operations]
        if not 0 <= self._number < len(plan) or plan[self._number] != "train":
            raise RecordError(f"operation {self._number} of {'+'.join(plan)} is no training step")
        return found

    def _explain(self, verdict: Verdict, parts: Sequence[StepPart]) -> Verdict:
        """Add causes to ``verdict``, given a mismatch: all ranks share the parts."""
        if not verdict.mismatches:
            return verdict
        from pipeproof.records.record_evidence import explain_step  # loaded where something is wrong

        assert self._record is not None, "there was something to compare with"
        with nullcontext() if self._beside is None else self._beside.set_apart():
            return explain_step(
                verdict,
                self._kept,
                self._exchange,
                look=lambda judged: self._step_evidence(parts).evidence(judged),
                moved=self._record.nudged if self._beside is None else self._beside.nudged,
                products=OtherProducts.among(self._record.products, [part.products for part in parts]),
                bound_s=self._bound_s,
            )

    def _step_evidence(self, parts: Sequence[StepPart]) -> "RecordedStep":
        from pipeproof.records.record_evidence import check_step_evidence

        assert self._record is not None, "there was something to compare with"
        found = check_step_evidence(
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
    """Return a context manager for a step in a job. Every rank enters it.

    Call ``gradients`` between backward and clipping, and ``report`` anywhere. After the block there is a ``verdict``.

    modules: this rank's stages by number. A single module is the stage of this rank's number. microbatches: pairs of
    inputs and target. None on a rank without them; a ``SingleDevice`` needs them on rank 0, ``StageByStage`` on the
    ranks of the first and the last stage. against: a record, its file, the model beside the job, or the step itself,
    link by link. rename: from a stage's number and a name in it to the name in the whole model, or in the record.
    operation: its number in the record. timeout_s: bounds each wait for the other ranks, and so for the reference.
    """
    if isinstance(against, StepExpectation):
        return check_of(against, modules, microbatches, rename=rename, operation=operation, timeout_s=timeout_s)
    return StepCheck(modules, microbatches, against=against, rename=rename, operation=operation, timeout_s=timeout_s)

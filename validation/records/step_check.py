"""Check a step in a job under torchrun against a record, or a single-device model beside it.

Every rank compares its own stages, one tensor at a time and in place, so that comparing takes no more memory than the
largest parameter; beside the model, gradients that differ in bits wait on the host until the end, for measured floors.
The exchange takes more: the store has all weights during the build of a reference, and all parts of gradients that
other ranks judge, until the end. All ranks join their verdicts there, and have the same.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from pipeproof.core.comparison import Comparison
from pipeproof.core.contract import DEFAULTS, Contract
from pipeproof.core.nudged import OtherProducts
from pipeproof.core.reason import Reason
from pipeproof.core.tolerance import same_bits
from pipeproof.core.verdict import Verdict
from pipeproof.records.as_given import (
    gradients_of,
    losses_of,
    number,
    source_of,
)
from pipeproof.records.checked_step import CheckedStep, Unchecked
from pipeproof.records.checked_step import CheckError as CheckError
from pipeproof.records.held_in_common import HeldInCommon
from pipeproof.records.last_check import LastCheck, last_check, remember
from pipeproof.records.rank_part import (
    MOST,
    AdapterNames,
    Kept,
    Rename,
    describe_problems,
    own_name,
    places_of,
    run_of,
)
from pipeproof.records.record import (
    Record,
    Recorded,
    RecordedOperation,
    RecordError,
    against,
    other_microbatch,
    other_weights,
    upstream,
)
from pipeproof.records.record_file import read
from pipeproof.records.single_device import ReferenceBeside, SingleDevice
from pipeproof.records.step_expectation import StepExpectation
from pipeproof.records.step_parts import EVERY_LAW, StepPart, how_ranks_ended, judge_parts, not_compared
from pipeproof.records.step_record import Pairs
from pipeproof.reference.products import products_in
from pipeproof.whitebox.handed_back import Gradient
from pipeproof.worlds.accelerator import CPU
from pipeproof.worlds.rank_report import RankReport
from pipeproof.worlds.side_store import Exchange, RanksAbsent

_TOTAL_OF_SOME = (
    "what the losses of some of the replicas are together may be theirs or that of all: report the losses alone, each "
    "replica those of its microbatches"
)
_CURES = {"names": "give rename=, from stage and name", "stages": "its modules are given by their numbers"}


class StepCheck(CheckedStep):
    """A step compared with a record, or with the model beside the job."""

    def __init__(
        self,
        modules: nn.Module | Mapping[int, nn.Module],
        microbatches: Pairs | None,
        *,
        against: str | Path | Record | SingleDevice,
        operation: int = 0,
        **options: Any,
    ) -> None:
        """Take ``check_step``'s arguments."""
        super().__init__(modules, microbatches, laws=EVERY_LAW, **options)
        self._source = against
        self._number = operation
        self._record: Record | None = None
        self._beside: ReferenceBeside | None = None
        self._at: Comparison | None = None  # None before the step, and where there is nothing to judge
        self._held = HeldInCommon(Exchange(None), {}, {}, bound_s=self._bound_s)
        self._waits = False  # floors are measured once bits differ: what they decide waits for them
        self._waiting: list[Callable[[], None]] = []
        self._norm: float | None = None
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
        if self._at is not None:
            with self.noting():
                expected = self._expected.gradients
                found = self._own.gradients if named is None else gradients_of(named, expected)
                self._sums = {} if named is None else found
                for name in upstream((name for name in expected if name in found), self._own.places):
                    one, shard = found[name], self._own.shards.get(name)
                    whole, gradient = self._held.take(name, (None, shard) if one is None and shard else one)
                    if whole:
                        self._compare(name, gradient)

    def _compare(self, name: str, gradient: Tensor | None) -> None:
        wanted = self._expected.gradients[name] if self._waits else None
        same = gradient is not None and wanted is not None and same_bits(gradient.detach(), wanted)
        if same or not self._waits:
            self._enter(name, gradient)
        else:  # the step may write to it before floors are measured
            kept = None if gradient is None else gradient.detach().to(CPU, copy=True)
            self._later(partial(self._enter, name, kept), exact=gradient is None or wanted is None)

    def _later(self, entry: Callable[[], None], *, exact: bool = True) -> None:
        """Make an ``entry`` now, or once floors are known, behind those that wait. ``exact``: no floor decides it."""
        if self._waits and (self._waiting or not exact):
            self._waiting.append(entry)
        else:
            entry()

    def _enter(self, name: str, gradient: Tensor | None) -> None:
        assert self._at is not None, "there is something to compare with"
        before, where = len(self._ledger.mismatches), self._own.where(name, self._exchange.rank)
        self._at.gradient(name, gradient, **where)
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
        if self._at is None:
            return
        rank, share, expected = self._exchange.rank, self._run.shares[self._exchange.rank], self._expected
        with self.noting():
            known = None if losses is None else losses_of(losses)
            if known is not None and share is None and len(known) != len(expected.losses):
                text = "the microbatches of these losses are not known: pass each replica the microbatches it runs"
                self._ledger.doubt("loss", text, Reason.LOSS_SCALE)
            elif known is not None:
                exact = tuple(known) == tuple(expected.losses[k] for k in share or range(len(known)))
                self._later(partial(self._at.losses, known, share=share, rank=rank), exact=exact)
            whole = None if loss is None else number("loss", loss)
            if whole is not None and share is not None and len(share) < len(expected.losses):
                self._ledger.doubt("loss", _TOTAL_OF_SOME, Reason.LOSS_SCALE)
            elif whole is not None:
                self._later(partial(self._at.loss, whole, rank=rank), exact=whole == expected.loss)
            if norm is not None:
                self._norm = norm = number("norm", norm)
                self._later(partial(self._at.norm, norm, rank=rank), exact=norm == expected.norm)

    def begin(self, gradients: Mapping[str, Gradient]) -> None:
        if self._at is not None:
            with self.noting():
                self._kept.begin({n: one for n, one in gradients.items() if one is None or isinstance(one, Tensor)})

    def _finish(self) -> None:
        if self._at is None:
            return
        try:
            self._held.enter(self._ledger, self._number, self._run.members, self._compare)
        except RanksAbsent as absent:  # all ranks are to know that a part did not come
            self._problem = self._problem or str(absent)
        own, rank = self._own, self._exchange.rank
        expected = [name for name in self._expected.parameters if name in own.parameters]
        for name in (name for name in expected if name not in own.shards):
            self._at.parameter(name, own.parameters[name], **own.where(name, rank))
        shards = [name for name in expected if name in own.shards]
        self._ledger.leave_out("updated-parameters", shards, "in parts", Reason.PARTS)
        if self._run.count == 1 and self._expected.buffers:
            for name, (stage, buffer) in own.buffers.items():
                self._at.buffer(name, buffer, rank=rank, stage=stage)
        self._later(self._at.close)

    def _part(self, about: RankReport) -> StepPart:
        products, rounding = dict[str, str](), None
        waits = self._waits and (bool(self._waiting) or not self._ledger.all_exact)
        if self._record is not None and self._ledger.mismatches:
            place = next((one.device for one in self._own.parameters.values()), CPU)
            products = products_in(place, self._record.products)
        if self._at is not None and not waits and not self._ledger.all_exact:
            rounding = Recorded(self._expected).precision
        why = self._why if self._at is None else self._problem
        more = self._crash, self._no_norm, products, waits, rounding
        return StepPart(about, self._ledger, self._kept.notes, self._norm, why, *more)

    def _conclude(self, parts: Sequence[StepPart]) -> Verdict:
        blank = len(parts) < self._exchange.ranks or any(one.problem or one.report.failed for one in parts)
        if not blank and any(one.waits for one in parts):
            try:
                parts = self._settle(parts)
            except RanksAbsent as absent:
                self._obstacle = f"what rounding does to the step is not known: {absent}"
        obstacle = self._obstacle or describe_problems({part.report.rank: part.problem for part in parts})
        ended = how_ranks_ended([part.report for part in parts], self._absent)
        if ended is None and not obstacle and self._record is not None:
            verdict = judge_parts(parts, self._record, self._number, replicas=self._run.count)
        else:
            verdict = not_compared(obstacle, ended)
        return self._explain(self._timed(verdict), parts)

    def _settle(self, parts: Sequence[StepPart]) -> Sequence[StepPart]:
        """Measure floors, finish all comparisons, and return the new parts: every rank calls this."""
        if self._beside is None or self._at is None or self._record is None:
            return parts
        found, problems = self._beside.measure(self._record)
        if found is None:
            self._obstacle = describe_problems(problems)
            return parts
        self._record = found
        self._at.allowed = Recorded(self._expected)
        self._waits, entries = False, self._waiting
        for entry in entries:
            with self.noting():
                entry()
        mine = self._part(parts[self._exchange.rank].report)
        return self._exchange.finish(mine, what="what floors decide in the checked step", bound_s=self._bound_s)

    def _clear(self) -> None:
        if self._at is not None:
            weights = dict[str, Tensor] if self._beside is None else self._beside.weights
            remember(self._own.modules, self.verdict, self._given, sums=self._sums, weights=weights)
        self._held.clear()
        if self._beside is not None:
            self._beside.clear()

    @property
    def _expected(self) -> RecordedOperation:
        assert self._record is not None, "there is something to compare with"
        return self._record.operations[self._number]

    def _begin(self) -> str:
        record: Record | None = None
        with self.noting():
            self._take_given()
            record = self._take_source()
        arrivals = self._arrivals()
        run, problems = run_of(arrivals)
        if not problems and self._beside is not None:
            given = self._given
            if run.apart:
                every = self._gather(given, "the microbatches of all replicas")
                given = run.together(every) if self._exchange.rank == 0 else given
            shares = run.members.each if run.apart else ()
            own = self._own.parameters, arrivals, given
            record, problems = self._beside.record(*own, shares=shares, beside=self._own.modules)
        elif not problems and record is not None:
            expected = record.operations[self._number].microbatches
            if found := other_microbatch(expected, run.as_in(expected).microbatches):
                text = f"microbatches that are not the record's: {found}; run the recorded ones in this step"
                problems = {0: text}
        if problems or record is None:
            return describe_problems(problems)
        self._record = record
        self._run, self._places = run.as_in(self._expected.microbatches), places_of(arrivals)
        self._at = against(self._expected, self._ledger, number=self._number)
        self._waits = self._beside is not None and self._beside.source.floors
        compared = {name: places for name, places in self._places.items() if name in self._expected.gradients}
        self._held = HeldInCommon(self._exchange, compared, self._own.shapes, bound_s=self._bound_s)
        if self._exchange.rank == 0:
            with self.noting():
                self._count(self._at)
        return ""

    def _take_source(self) -> Record | None:
        """Accept the source of the expectation: return its record, if it has one. Raises ``RecordError``."""
        source = source_of(self._source, self._number)
        if isinstance(source, SingleDevice):
            renamable = not isinstance(self._rename, AdapterNames)
            self._beside = ReferenceBeside(source, self._exchange, timeout_s=self._bound_s, renamable=renamable)
            return None
        record = source if isinstance(source, Record) else read(source)
        plan = [one.operation for one in record.operations]
        if not 0 <= self._number < len(plan) or plan[self._number] != "train":
            raise RecordError(f"operation {self._number} of {'+'.join(plan)} is no training step")
        if found := other_weights(record.operations[self._number].before, self._own.parameters, self._own.shards):
            raise RecordError(
                f"weights that differ from the record's before the step: {found}; start from the recorded ones"
            )
        return record

    def _count(self, at: Comparison) -> None:
        """Count the stages of each parameter; copies of a weight used in several places count once."""
        names = dict.fromkeys([*self._expected.before, *self._expected.gradients])
        counts = {name: len({stage for _, stage in found}) for name, found in self._places.items()}
        several = max(counts.values(), default=0) > 1
        copies = self._beside.repeated_parameters() if several and self._beside is not None else None
        for name in [name for name in names if counts.get(name, 0) > 1]:
            if copies is None:
                why = f"{name} is in {counts[name]} stages: as copies of one weight, or by a mistake"
                text = f"{why}; the model beside the job would tell"
                self._ledger.doubt("parameters-once", text, Reason.EQUAL_WEIGHTS)
            counts |= {name: 1} if copies is None or name in copies else {}
        at.count_holders(names, counts, self._places)

    def _explain(self, verdict: Verdict, parts: Sequence[StepPart]) -> Verdict:
        """Add causes to ``verdict``, given a mismatch: all ranks share the parts."""
        if not verdict.mismatches:
            return verdict
        from pipeproof.records.record_evidence import RecordedStep, explain_step  # loaded where something is wrong

        record, beside = self._record, self._beside
        assert record is not None, "there was something to compare with"

        def look() -> RecordedStep:
            known = {} if beside is None else {"model": beside.update, "with_weights": beside.with_weights}
            return RecordedStep.of_notes(
                record,
                self._number,
                self._places,
                [part.notes for part in parts],
                fetch=lambda name: self._exchange.take(name, bound_s=self._bound_s),
                norms=[part.norm for part in parts],
                shards=self._held.shards,
                replicas=self._run.members,
                earlier=(self._last.weights,) if beside is not None and self._last.weights else (),
                **known,
            )

        with nullcontext() if beside is None else beside.set_apart():
            return explain_step(
                verdict,
                self._kept,
                self._exchange,
                look=look,
                moved=record.nudged if beside is None else beside.nudged,
                products=OtherProducts.among(record.products, [part.products for part in parts]),
                bound_s=self._bound_s,
            )


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
    options: dict[str, Any] = {"rename": rename, "timeout_s": timeout_s}
    if not isinstance(against, StepExpectation):
        return StepCheck(modules, microbatches, against=against, operation=operation, **options)
    if (turn := against.turn()) is None:
        return Unchecked()
    check = against.check_of(modules, microbatches, turn=turn, **options)
    if operation:
        check.refuse(f"operation is {operation}: a step that is held against itself is one, so leave operation= out")
    said = against.contract if isinstance(against.contract, Contract) else DEFAULTS
    for word, cure in _CURES.items():
        if getattr(said, word):
            check.refuse(f"{word} of the contract is not read by check_step: {cure}")
    return check

"""Each rank's observations of a checked step, and their joint verdict."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pipeproof.core.comparison import leave_out
from pipeproof.core.judge import conclude
from pipeproof.core.ledger import Ledger
from pipeproof.core.limits import FP32, Precision
from pipeproof.core.reason import reasons_of
from pipeproof.core.verdict import Crash, LawResult, Verdict
from pipeproof.records.held_in_common import LAWS as IN_COMMON
from pipeproof.records.rank_part import Notes
from pipeproof.records.record import LAWS, Record, against
from pipeproof.worlds.rank_report import Ending, RankReport, headline, with_reports
from pipeproof.worlds.side_store import RanksAbsent

EVERY_LAW = (*LAWS, *IN_COMMON)
Ended = tuple[list[RankReport], Literal["error", "hang"]]  # all ranks, and a word for their endings


@dataclass(frozen=True)
class StepPart:
    """A rank's observations of the step: its end, comparisons, notes, reported norm, and problem.

    ``crash``: an error during the comparison. ``no_norm``: why it withholds a norm. ``products``: its device's rounding
    of the products behind the expected values. ``waits``: floors, still to be measured, decide on some of it.
    ``rounding``: precision of the expected values, if needed: they can be fetched only while this part is awaited.
    """

    report: RankReport
    ledger: Ledger
    notes: Notes
    norm: float | None
    problem: str = ""
    crash: Crash | None = None
    no_norm: str = ""
    products: Mapping[str, str] = field(default_factory=dict)
    waits: bool = False
    rounding: Precision | None = None


def not_compared(obstacle: str, ended: Ended | None = None) -> Verdict:
    """Build the verdict without a comparison: for ``obstacle``, or by how ranks ``ended``."""
    laws = (LawResult("comparable", "unknown", note=obstacle, reasons=reasons_of(obstacle)),) if obstacle else ()
    blank = Verdict("a step of this job", "unknown", "none", laws)
    if ended is None:
        return blank
    known, how = ended
    return replace(with_reports(blank, known), headline=headline(known), ended=how)


def how_ranks_ended(reports: Sequence[RankReport], absent: RanksAbsent | None) -> Ended | None:
    """Return all ranks' endings, and a word for them; None if every rank finished its step."""
    missing = {} if absent is None else absent.reasons
    known = [one for one in reports if one.failed or one.rank not in missing]
    came = {one.rank for one in known}
    known += [RankReport(rank, Ending.ABSENT, reason) for rank, reason in missing.items() if rank not in came]
    if not any(one.failed for one in known):
        return None
    raised = any(one.failed for one in reports)
    return known, "hang" if absent is not None and absent.late and not raised else "error"


def judge_parts(parts: Sequence[StepPart], record: Record, number: int, *, replicas: int) -> Verdict:
    """Judge all ranks' parts, compared with operation ``number`` of ``record``; ``replicas``: their number."""
    expected, ledger = record.operations[number], Ledger(EVERY_LAW)
    for part in reversed(parts):  # as gradients flow
        ledger.join(part.ledger)
    leave_out(ledger, expected, number=number)
    if replicas == 1:  # every rank has looked by now
        at, compared = against(expected, ledger, number=number), ledger.compared_names("buffers", number)
        for name in (name for name in expected.buffers if name not in compared):
            at.buffer(name, None)
    ledger.forget(IN_COMMON)
    order = EVERY_LAW.index
    ledger.mismatches.sort(key=lambda one: (order(one.law), -math.inf if one.stage is None else -one.stage))
    if all(part.norm is None for part in parts):
        ledger.miss("grad-norm", next((part.no_norm for part in parts if part.no_norm), "the job reports none"))
    if not expected.parameters:
        ledger.skip("updated-parameters", "what is expected makes no update: the optimizer's state is the job's")
    if not expected.buffers:
        ledger.skip("buffers", "nothing is expected of them")
    elif replicas > 1:
        ledger.skip("buffers", "each replica leaves its own, of its own microbatches")
    otherwise = next((part.rounding for part in parts if part.rounding is not None), FP32)
    verdict = conclude(ledger, f"a step of this job against {record.name}", otherwise=otherwise)
    return verdict.before_its_end(next((part.crash for part in parts if part.crash is not None), None))

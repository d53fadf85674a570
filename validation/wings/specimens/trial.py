"""One planted fault tried in one case: is it caught, correctly named, and located?

Nothing here knows how a fault is found: a case with a specimen is judged and diagnosed like any other.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter

from pipeproof.core.cause import Cause
from pipeproof.core.verdict import Verdict
from pipeproof.own.case import Case
from pipeproof.own.faults import pass_on
from pipeproof.own.judgement import diagnose, judge
from pipeproof.own.observe import observe
from pipeproof.own.validator import crash_verdict, explain_case, refusal_verdict
from pipeproof.pipeline.program import lower
from pipeproof.pipeline.program_laws import violations
from pipeproof.pipeline.schedules import virtuals
from pipeproof.wings.specimens.catalogue import fault
from pipeproof.wings.specimens.specimen import Specimen
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.world import World


@dataclass(frozen=True)
class Named:
    """The diagnosis of a planted fault. ``kind``: its first cause's, or None.

    ``right``: it matches the planted kind, or a kind alike on this evidence. ``located``: the place matches too.
    ``seconds``: the time of the diagnosis.
    """

    kind: str | None
    right: bool
    located: bool
    seconds: float

    @property
    def wrong(self) -> bool:
        """True if it names a wrong cause, which is worse than none."""
        return self.kind is not None and not self.right


@dataclass(frozen=True)
class Trial:
    """The result of one specimen in one case.

    ``laws`` failed: the judge's, static ones, or "deadlock" and "crash". ``recorded``: diagnosis with boundary tensors.
    ``final``: diagnosis from an unobserved runtime's results; None if not asked for, or without a run to hand back.
    ``transport`` and ``seed``: the simulated ranks', with the first seed that shows the fault, or the last.
    """

    specimen: str
    case: str
    law: str
    planted: str
    laws: tuple[str, ...]
    recorded: Named | None = None
    final: Named | None = None
    seconds: float = 0.0
    transport: str | None = None
    seed: str | None = None

    @property
    def caught(self) -> bool:
        """True if the expected law failed."""
        return self.law in self.laws

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {**asdict(self), "caught": self.caught}


def case_for(specimen: Specimen, schedule: str, *, ranks: int = 4, microbatches: int = 8) -> Case:
    """Return the case on ``schedule`` that meets the needs of ``specimen``, if possible."""
    needs = specimen.needs
    model = needs.models[0] if needs.models else "gpt"
    case = needs.case(schedule, ranks, virtuals(schedule, looped=2), microbatches, model)
    return replace(case, specimen=specimen.name)


def smallest_of(specimen: Specimen) -> Case:
    """Return the smallest case that shows ``specimen``, with it planted."""
    return Case.parse(f"{specimen.smallest} specimen={specimen.name}")


def try_out(case: Case, world: World, *, record: bool = True) -> Trial:
    """Run a case with a planted fault, unless a static law refuses it before any rank starts.

    ``record``: run it again with every boundary tensor recorded, as a validation does.
    """
    specimen, began = fault(case.specimen), perf_counter()
    laws, recorded, final = _outcome(specimen, case, world, record=record)
    planted = specimen.cause(case)
    seconds = perf_counter() - began
    return Trial(specimen.name, str(case), specimen.law, planted.kind, laws, recorded, final, seconds)


def search(case: Case, world: World, *, record: bool = True) -> Trial:
    """Try seeds on simulated ranks in order until one shows a fault."""
    seconds, trial = 0.0, None
    for _ in world.interleavings():
        trial = try_out(case, world, record=record)
        seconds += trial.seconds
        if trial.laws:
            break
    assert trial is not None, "there is a seed to try"
    by = world.decision
    assert by is not None, "it is a world of simulated ranks"
    return replace(trial, seconds=seconds, transport=by.transport.value, seed=str(by.first))


def compare_names(planted: Cause, verdict: Verdict, *, alike: Sequence[str] = (), since: float | None = None) -> Named:
    """Compare ``verdict`` with the planted fault. ``alike``: other kinds that are right. ``since``: when it began."""
    found, seconds = verdict.causes[0] if verdict.causes else None, 0.0 if since is None else perf_counter() - since
    if found is None:
        return Named(None, False, False, seconds)
    right = found.kind in (planted.kind, *alike)
    return Named(found.kind, right, right and is_located(planted, found), seconds)


def is_located(planted: Cause, found: Cause) -> bool:
    """True if ``found`` gives every place required by ``planted``."""
    fields = ("rank", "stage", "microbatches", "parameter")
    return all(getattr(planted, field) in (None, (), getattr(found, field)) for field in fields)


def _outcome(
    specimen: Specimen, case: Case, world: World, *, record: bool
) -> tuple[tuple[str, ...], Named | None, Named | None]:
    """Return the failed laws, and the diagnoses."""
    planted = specimen.cause(case)
    if specimen.reorder is not pass_on:
        broken = tuple(violations(specimen.reorder(lower(case.built))))
        laws = tuple(dict.fromkeys(violation.law for violation in broken))
        return laws, compare_names(planted, refusal_verdict(case, broken)) if broken else None, None
    try:
        observed = observe(case, world)
    except RankFailed as failure:
        verdict = crash_verdict(case, failure)
        return tuple(cause.kind for cause in verdict.causes), compare_names(planted, verdict), None
    verdict = judge(case, observed)
    laws = tuple(law.name for law in verdict.laws if law.outcome == "fail")
    if verdict.outcome != "fail":
        return laws, None, None
    recorded, began = None, perf_counter()
    if record:
        recorded = compare_names(planted, explain_case(case, world, observed, verdict), since=began)
        began = perf_counter()
    final = diagnose(case, observed.final(), verdict)
    return laws, recorded, compare_names(planted, final, alike=specimen.fault.alike, since=began)

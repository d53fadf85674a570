"""One planted fault tried in one case: is it caught, is it named as what was planted, is it located?

Nothing here knows how a fault is found: a case with a specimen is judged and diagnosed like any other.
"""

from dataclasses import asdict, dataclass, replace
from time import perf_counter

from pipeproof.core.cause import Cause
from pipeproof.core.observe.observed import Observed
from pipeproof.core.verdict import Verdict
from pipeproof.own.case import Case
from pipeproof.own.faults import unchanged
from pipeproof.own.judgement import diagnose, judge
from pipeproof.own.observe import observe
from pipeproof.own.validator import crashed, explained, refused
from pipeproof.pipeline.program import lower
from pipeproof.pipeline.program_laws import violations
from pipeproof.pipeline.schedules import virtuals
from pipeproof.wings.specimens.catalogue import fault
from pipeproof.wings.specimens.specimen import Specimen
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.world import World


@dataclass(frozen=True)
class Named:
    """What a diagnosis made of a planted fault. ``kind`` is that of its first cause, None where it names none.

    ``right``: that is what was planted, or a kind that this evidence is not asked to tell from it; ``located``: the
    place is too. ``seconds`` is what the diagnosis took.
    """

    kind: str | None
    right: bool
    located: bool
    seconds: float

    @property
    def wrong(self) -> bool:
        """Whether it names something else, which is worse than to name nothing."""
        return self.kind is not None and not self.right


@dataclass(frozen=True)
class Trial:
    """What became of one specimen in one case.

    ``laws`` failed: the judge's, static ones, or "deadlock" and "crash" where ranks failed. ``recorded`` is the
    diagnosis with boundary tensors, ``final`` the one from what a runtime hands back that nobody watched; None where
    it was not asked for, or nothing ran that could be handed back. ``transport`` and ``seed`` are those of simulated
    ranks: the first seed under which something was wrong, or the last that was tried.
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
        """Whether the law that must fail did."""
        return self.law in self.laws

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {**asdict(self), "caught": self.caught}


def case_for(specimen: Specimen, schedule: str, *, ranks: int = 4, microbatches: int = 8) -> Case:
    """The case on ``schedule`` that has what ``specimen`` needs, where a schedule can have it at all."""
    needs = specimen.needs
    model = needs.models[0] if needs.models else "gpt"
    case = needs.case(schedule, ranks, virtuals(schedule, looped=2), microbatches, model)
    return replace(case, specimen=specimen.name)


def smallest_of(specimen: Specimen) -> Case:
    """The smallest case that shows ``specimen``, with it planted."""
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
    """Try it on simulated ranks under one of their seeds after the other, until something is wrong."""
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


def named(specimen: Specimen, case: Case, verdict: Verdict, *, alike: bool, seconds: float) -> Named:
    """How well ``verdict`` names what was planted. ``alike``: kinds that final gradients cannot tell apart will do."""
    planted, found = specimen.cause(case), verdict.cause[0] if verdict.cause else None
    kinds = (planted.kind, *(specimen.fault.alike if alike else ()))
    if found is None:
        return Named(None, False, False, seconds)
    right = found.kind in kinds
    return Named(found.kind, right, right and located(planted, found), seconds)


def located(planted: Cause, found: Cause) -> bool:
    """Whether ``found`` says of place all that ``planted`` asks for."""
    fields = ("rank", "stage", "microbatches", "parameter")
    return all(getattr(planted, field) in (None, (), getattr(found, field)) for field in fields)


_Outcome = tuple[tuple[str, ...], Named | None, Named | None]


def _outcome(specimen: Specimen, case: Case, world: World, *, record: bool) -> _Outcome:
    """The laws that failed, and the diagnoses."""
    if specimen.reorder is not unchanged:
        broken = tuple(violations(specimen.reorder(lower(case.built))))
        laws = tuple(dict.fromkeys(violation.law for violation in broken))
        found = named(specimen, case, refused(case, broken), alike=False, seconds=0.0) if broken else None
        return laws, found, None
    try:
        observed = observe(case, world)
    except RankFailed as failure:
        verdict = crashed(case, failure)
        found = named(specimen, case, verdict, alike=False, seconds=0.0)
        return tuple(cause.kind for cause in verdict.cause), found, None
    verdict = judge(case, observed)
    laws = tuple(law.name for law in verdict.laws if law.outcome == "fail")
    if verdict.verdict != "fail":
        return laws, None, None
    recorded = _recorded(specimen, case, world, observed, verdict) if record else None
    return laws, recorded, _final(specimen, case, observed, verdict)


def _recorded(specimen: Specimen, case: Case, world: World, observed: Observed, verdict: Verdict) -> Named:
    began = perf_counter()
    found = explained(case, world, observed, verdict)
    return named(specimen, case, found, alike=False, seconds=perf_counter() - began)


def _final(specimen: Specimen, case: Case, observed: Observed, verdict: Verdict) -> Named:
    began = perf_counter()
    found = diagnose(case, observed.final(), verdict)
    return named(specimen, case, found, alike=True, seconds=perf_counter() - began)

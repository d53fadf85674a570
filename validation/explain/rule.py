"""Rules of explanation: one link of a gradient's way each, in the order of that way.

The first broken link is the cause; anything after it is consequence. A sound link before it excludes its kinds, but
only if all evidence for it existed and was compared in this run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pipeproof.core.cause import OF_MICROBATCHES, Cause, Cells, RuledOut, alternatives
from pipeproof.core.verdict import Mismatch, Verdict
from pipeproof.explain.evidence import Evidence

Clears = Callable[[Evidence], RuledOut | None]
Besides = Callable[[Evidence, Sequence[Cause]], tuple[Sequence[Cause], Sequence[str]]]


@dataclass(frozen=True)
class Rule:
    """One link: the causes it names, all true together, and the kinds it excludes if sound.

    ``needs``: whether its evidence exists. ``left``: faults without a cause; then nothing behind it can be judged.
    ``beside``: kinds that the evidence for its causes excludes. ``besides``: further faults, and open questions.
    """

    explains: Callable[[Evidence], Sequence[Cause]]
    clears: Clears = lambda evidence: None
    needs: Callable[[Evidence], bool] = lambda evidence: True
    left: Callable[[Evidence], Sequence[str]] = lambda evidence: ()
    beside: Callable[[Evidence], Sequence[RuledOut]] = lambda evidence: ()
    besides: Besides = lambda evidence, causes: ((), ())


def clears(law: str, kinds: tuple[str, ...], words: str, *, unless: str = "") -> Clears:
    """Exclude ``kinds`` if ``law`` compared something and passed, ``unless`` another law failed."""

    def rule_out(evidence: Evidence) -> RuledOut | None:
        held = [one for one in evidence.verdict.laws if one.name == law and one.outcome == "pass" and one.checked]
        return RuledOut(kinds, words, held[0].checked) if held and not (unless and evidence.differs(unless)) else None

    return rule_out


def follow_rules(evidence: Evidence, rules: Sequence[Rule]) -> Verdict:
    """Return the verdict with causes from the first rule that names any, and kinds excluded before."""
    cleared: list[RuledOut] = []
    for rule in (rule for rule in rules if rule.needs(evidence)):
        if causes := rule.explains(evidence):
            more, left = rule.besides(evidence, causes)
            first, *others = alternatives(tuple(dict.fromkeys((*causes, *more))))
            kinds = {cause.kind for explanation in (first, *others) for cause in explanation}
            return replace(
                evidence.verdict,
                mismatches=_nearest(evidence.verdict.mismatches, first[0]),
                causes=first,
                alternatives=tuple(others),
                ruled_out=tuple(one for one in (*rule.beside(evidence), *cleared) if not kinds & set(one.kinds)),
                cells=_cells(evidence, first) if kinds & OF_MICROBATCHES else None,
                undecided=tuple(left),
            )
        if open_ := rule.left(evidence):
            return replace(evidence.verdict, undecided=tuple(open_), ruled_out=tuple(cleared))
        clear = rule.clears(evidence)
        cleared += [] if clear is None else [clear]
    return replace(evidence.verdict, ruled_out=tuple(cleared))


def _cells(evidence: Evidence, causes: Sequence[Cause]) -> Cells | None:
    """The attribution's cells, if they inform about the causes' places."""
    cells = None if evidence.attribution is None else evidence.attribution.cells
    if cells is None or cells.right:
        return None
    places = {cause.stage for cause in causes if cause.stage is not None}
    return cells if all(any(cell.own is not None for cell in cells.rows[stage]) for stage in places) else None


def _nearest(mismatches: Sequence[Mismatch], cause: Cause) -> tuple[Mismatch, ...]:
    """Put a mismatch at the cause's place first: downstream mismatches are consequences.

    Mismatches with the model come before those with another rank, which may itself be wrong.
    """
    stages = cause.stages or (() if cause.stage is None else (cause.stage,))

    def away(k: int) -> tuple[int, bool, int, bool, int]:
        one = mismatches[k]
        others = (
            cause.rank is not None and one.rank != cause.rank,
            cause.action is not None and one.action != cause.action,
            bool(cause.microbatches) and one.microbatch not in (None, *cause.microbatches),
            cause.parameter is not None and one.parameter != cause.parameter,
        )
        near = sum(others) if one.stage in stages else 0
        return one.operation, one.stage not in stages, near, one.beside is not None, k

    first = min(range(len(mismatches)), key=away) if stages else 0
    return (*mismatches[first : first + 1], *mismatches[:first], *mismatches[first + 1 :])

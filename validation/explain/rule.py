"""Rules of explanation: each looks at one link of the way that a gradient takes, in the order of that way.

The first link that broke is the cause; what comes after it is consequence. A sound link before it rules out what it
could have been, but only where all that speaks of it was there and was compared in this run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pipeproof.core.cause import OF_MICROBATCHES, Cause, Cells, RuledOut, alternatives
from pipeproof.core.verdict import Mismatch, Verdict
from pipeproof.explain.evidence import Evidence

Clears = Callable[[Evidence], RuledOut | None]
Besides = tuple[Sequence[Cause], Sequence[str]]  # what else is wrong, and what stays open


@dataclass(frozen=True)
class Rule:
    """One link: the causes it names, all of which hold, and what it rules out where it is sound.

    ``needs``: whether there is evidence for it. ``left``: what is wrong there although it names no cause; then nothing
    behind it can be judged. ``beside``: what the evidence for its causes rules out. ``besides``: what else is wrong,
    and what could not be judged.
    """

    explains: Callable[[Evidence], Sequence[Cause]]
    clears: Callable[[Evidence], RuledOut | None] = lambda evidence: None
    needs: Callable[[Evidence], bool] = lambda evidence: True
    left: Callable[[Evidence], Sequence[str]] = lambda evidence: ()
    beside: Callable[[Evidence], Sequence[RuledOut]] = lambda evidence: ()
    besides: Callable[[Evidence, Sequence[Cause]], tuple[Sequence[Cause], Sequence[str]]] = lambda evidence, causes: (
        (),
        (),
    )


def clears(law: str, kinds: tuple[str, ...], words: str) -> Clears:
    """Rules ``kinds`` out where ``law`` compared something, and all of it held."""

    def cleared(evidence: Evidence) -> RuledOut | None:
        held = [one for one in evidence.verdict.laws if one.name == law and one.outcome == "pass" and one.checked]
        return RuledOut(kinds, words, held[0].checked) if held else None

    return cleared


def followed(evidence: Evidence, rules: Sequence[Rule]) -> Verdict:
    """The verdict with the causes of the first of ``rules`` that names any, and what those before it rule out."""
    cleared: list[RuledOut] = []
    for rule in (rule for rule in rules if rule.needs(evidence)):
        if causes := rule.explains(evidence):
            more, left = rule.besides(evidence, causes)
            explanations = alternatives(tuple(dict.fromkeys((*causes, *more))))
            found = _named(evidence, explanations, [*rule.beside(evidence), *cleared])
            return replace(found, undecided=tuple(left))
        if open_ := rule.left(evidence):
            return replace(evidence.verdict, undecided=tuple(open_), ruled_out=tuple(cleared))
        clear = rule.clears(evidence)
        cleared += [] if clear is None else [clear]
    return replace(evidence.verdict, ruled_out=tuple(cleared))


def _named(evidence: Evidence, explanations: Sequence[tuple[Cause, ...]], cleared: Sequence[RuledOut]) -> Verdict:
    first, *others = explanations
    kinds = {cause.kind for explanation in (first, *others) for cause in explanation}
    found = evidence.attribution if kinds & OF_MICROBATCHES else None
    return replace(
        evidence.verdict,
        mismatches=_nearest(evidence.verdict.mismatches, first[0]),
        cause=first,
        alternatives=tuple(others),
        ruled_out=tuple(one for one in cleared if not kinds & set(one.kinds)),
        cells=None if found is None else _told(found.cells, first),
    )


def _told(cells: Cells | None, causes: Sequence[Cause]) -> Cells | None:
    """``cells`` that say something of where ``causes`` are."""
    places = {cause.stage for cause in causes if cause.stage is not None}
    known = cells is not None and all(any(cell.own is not None for cell in cells.rows[stage]) for stage in places)
    return cells if known and cells is not None and not cells.right else None


def _nearest(mismatches: Sequence[Mismatch], cause: Cause) -> tuple[Mismatch, ...]:
    """``mismatches``, one at the place of ``cause`` first: what lies downstream of it is consequence.

    What is held against the model comes before what is held against another rank, which may itself be wrong.
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

"""Rules of diagnosis: each looks at one link of the way that a gradient takes, in the order of that way.

The first link that broke is the cause; what comes after it is consequence. A sound link before it rules out what it
could have been, but only where all that speaks of it was there and was compared in this run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from pipeproof.core.cause import Cause, Cells, RuledOut, alternatives
from pipeproof.core.verdict import Mismatch, Verdict
from pipeproof.diagnosis.attribution import Attribution

# Kinds that are a matter of how often which microbatch is in a stage's sums.
OF_MICROBATCHES = frozenset(
    {"dropped", "doubled", "scale", "sign", "unequal-weights", "swapped-activations", "swapped-gradients"}
    | {"swapped-data", "mispaired", "extra-term"}
)


class Judged(Protocol):
    """Facts of a failed verdict, whatever it is about."""

    @property
    def verdict(self) -> Verdict: ...

    @property
    def attribution(self) -> Attribution | None: ...


Facts = TypeVar("Facts", bound=Judged)
Clears = Callable[[Judged], RuledOut | None]


def nothing(facts: Judged) -> None:
    """Rules nothing out."""


def always(facts: Judged) -> bool:
    """Needs no more than there always is."""
    return True


def nowhere(facts: Judged) -> tuple[()]:
    """Has nothing more to say."""
    return ()


def none_besides(facts: Judged, causes: Sequence[Cause]) -> tuple[tuple[()], tuple[()]]:
    """Knows of nothing else that is wrong."""
    return (), ()


def not_otherwise(facts: Judged, causes: Sequence[Cause]) -> tuple[()]:
    """Knows no other explanation."""
    return ()


@dataclass(frozen=True)
class Rule(Generic[Facts]):
    """One link: the causes it names, all of which hold, and what it rules out where it is sound.

    ``needs``: whether there is evidence for it. ``left``: what is wrong there although it names no cause; then nothing
    behind it can be judged. ``beside``: what the evidence for its causes rules out. ``otherwise``: what else, in place
    of its causes, explains what is wrong. ``besides``: what else is wrong, and what could not be judged.
    """

    explains: Callable[[Facts], Sequence[Cause]]
    clears: Callable[[Facts], RuledOut | None] = nothing
    needs: Callable[[Facts], bool] = always
    left: Callable[[Facts], Sequence[str]] = nowhere
    beside: Callable[[Facts], Sequence[RuledOut]] = nowhere
    otherwise: Callable[[Facts, Sequence[Cause]], Sequence[Cause]] = not_otherwise
    besides: Callable[[Facts, Sequence[Cause]], tuple[Sequence[Cause], Sequence[str]]] = none_besides


def clears(law: str, kinds: tuple[str, ...], evidence: str) -> Clears:
    """Rules ``kinds`` out where ``law`` compared something, and all of it held."""

    def cleared(facts: Judged) -> RuledOut | None:
        held = [one for one in facts.verdict.laws if one.name == law and one.outcome == "pass" and one.checked]
        return RuledOut(kinds, evidence, held[0].checked) if held else None

    return cleared


def followed(facts: Facts, rules: Sequence[Rule[Facts]]) -> Verdict:
    """The verdict with the causes of the first of ``rules`` that names any, and what those before it rule out."""
    cleared: list[RuledOut] = []
    for rule in (rule for rule in rules if rule.needs(facts)):
        if causes := rule.explains(facts):
            others, (more, left) = rule.otherwise(facts, causes), rule.besides(facts, causes)
            whole = tuple(dict.fromkeys((*causes, *more)))
            explanations = (*alternatives(whole), *(alternatives(others) if others else ()))
            found = _named(facts, explanations, [*rule.beside(facts), *cleared])
            return replace(found, undecided=tuple(left))
        if open_ := rule.left(facts):
            return replace(facts.verdict, undecided=tuple(open_), ruled_out=tuple(cleared))
        clear = rule.clears(facts)
        cleared += [] if clear is None else [clear]
    return replace(facts.verdict, ruled_out=tuple(cleared))


def _named(facts: Judged, explanations: Sequence[tuple[Cause, ...]], cleared: Sequence[RuledOut]) -> Verdict:
    first, *others = explanations
    kinds = {cause.kind for explanation in (first, *others) for cause in explanation}
    found = facts.attribution if kinds & OF_MICROBATCHES else None
    return replace(
        facts.verdict,
        mismatches=_nearest(facts.verdict.mismatches, first[0]),
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

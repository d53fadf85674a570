"""From coefficients to faults.

First the faults that each stage shows by itself; then one fault in several stages becomes one cause: in all stages it
is the step's, in the first ones it came down with the output gradients.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pipeproof.core.cause import Cause, RuledOut
from pipeproof.core.observe.likeness import Likeness
from pipeproof.core.tolerance import error, stands_for_none
from pipeproof.explain.atoms import Explanation, Term, Update
from pipeproof.explain.chains import swaps
from pipeproof.explain.limits import ALIKE, CLOSE
from pipeproof.explain.microbatch_weights import faults_in_counts, uniform
from pipeproof.explain.mixed_gradients import find_mixed, gradient_of
from pipeproof.explain.solver import tell_within
from pipeproof.explain.tied import Shares, name_open, of_copies
from pipeproof.reference.step import Stage

_NOTHING = "no multiple of what the others say"
_SWAPPED = ("swapped-activations", "swapped-gradients", "swapped-data", "mispaired")
STALE = "the gradient from before the step is still in it"
_STALE = ("stale-gradient", "stale-tensor")
# Terms from outside this step: a kind of cause, and words.
_FOREIGN = {
    "gradient": ("stale-gradient", STALE),
    "parameter": ("extra-term", "the parameter itself was added"),
    "evaluated": ("extra-term", "the gradient of an evaluation was added"),
}
_OLD = {
    "old-activation": "an activation of the step before",
    "old-gradient": "an output gradient of the step before",
    "old-data": "data of the step before",
    "old-weights": "weights of the step before",
}


def name_causes(
    update: Update, stages: Sequence[Explanation], tied: Sequence[Shares]
) -> tuple[tuple[Cause, ...], tuple[str, ...], tuple[RuledOut, ...]]:
    """Return the causes, likeliest first; open questions; and excluded kinds."""
    swapped = swaps(update, stages)
    shown = [one for one in stages if one.explained and (one.names or one.odd or not any(one.coefficients.values()))]
    left = {cause.stage for cause in swapped if cause.kind == "swapped-gradients"}
    each = {one.stage: fill_nominal(one, by_activation=one.stage in left) for one in shown}
    faults = {one.stage: f for one in shown if (f := faults_of(update, one, each[one.stage])) is not None}
    sums = find_mixed(stages, update)
    causes = [
        *swapped,
        *_place_faults(update, stages, faults),
        *of_parameters(update, stages, sums),
        *of_copies(update.tied, tied),
    ]
    causes += find_untrained(update)
    causes = [_with_rank(update, _or_twice(update, cause)) for cause in causes if not _follows(cause, causes)]
    causes = [_or_multiplied(cause, causes) for cause in causes]
    unknown = tuple(_unknown(stages, tied, sums))
    ruled_out = tuple(_rule_out(stages, tied, causes, known=update.before is not None))
    return tuple(dict.fromkeys(causes)), unknown, ruled_out


def _follows(cause: Cause, causes: Sequence[Cause]) -> bool:
    """True if a stage without finite gradients got them from a later stage: non-finite values flow back through all."""
    later = [one.stage for one in causes if one.kind == "not-finite" and one.parameter is not None]
    whole = cause.kind == "not-finite" and cause.parameter is None and cause.stage is not None
    return whole and any(stage is not None and stage > (cause.stage or 0) for stage in later)


def _or_twice(update: Update, cause: Cause) -> Cause:
    """A gradient left from before the step; or this step's own counted twice, if both look alike."""
    pairs = [
        (one, expected)
        for site, one in update.old.items()
        if (expected := update.expected.get(site)) is not None and one is not None
    ]
    alike = all(error(one.cpu(), expected.cpu()) <= tell_within(expected.dtype) for one, expected in pairs)
    if cause.kind != "stale-gradient" or cause.microbatches or not alike:
        return cause
    twice = replace(cause, kind="scale", factor=2.0, detail="or this step's own, which is the same, was added twice")
    return replace(cause, instead=(twice,))


def _or_multiplied(cause: Cause, causes: Sequence[Cause]) -> Cause:
    """``cause`` for repeated microbatches, with multiplication as an alternative: sums do not separate the two.

    Not if others are missing: then these ran in their place.
    """
    if cause.kind != "doubled" or any(other.kind == "dropped" for other in causes):
        return cause
    kind = "unequal-weights" if cause.factor is None else "scale"
    text = f"or {'they were' if len(cause.microbatches) > 1 else 'it was'} multiplied: the loss, or gradients of it"
    return replace(cause, instead=(replace(cause, kind=kind, detail="; ".join(filter(None, (cause.detail, text)))),))


def fill_nominal(stage: Explanation, *, by_activation: bool = False) -> dict[Term, float]:
    """The nominal coefficients, with each wrong pair counted for the microbatch that provided its output gradient.

    If that microbatch is present already, it counts for the activation's microbatch; ``by_activation``: for that one
    first, as after a backward with another's output gradient.
    """
    found = {term: c for term, c in stage.coefficients.items() if term.nominal}
    taken: dict[int, Term] = {}

    def place(term: Term, tried: set[int]) -> bool:
        """Give ``term`` a microbatch, if terms in its way can move to another: each stands in for one."""
        slots: tuple[int, ...] = (term.gradient, term.activation)  # likeliest first
        if term.nominal or term.what in _FOREIGN:
            slots = ()
        elif term.what == "flow":
            slots = (term.activation, *sorted(stage.wrong[term.gradient].near))
        elif term.what == "old-gradient" or (by_activation and term.what == "pair"):
            slots = (term.activation, term.gradient)
        for slot in slots:
            if found.get(Term("pair", slot, slot)) != 0.0 or slot in tried:
                continue
            tried.add(slot)
            if slot not in taken or place(taken[slot], tried):
                taken[slot] = term
                return True
        return False

    for term, c in stage.coefficients.items():
        if c:
            place(term, set())
    return found | {Term("pair", slot, slot): stage.coefficients[term] for slot, term in taken.items()}


def faults_of(update: Update, stage: Explanation, nominal: dict[Term, float]) -> tuple[Cause, ...] | None:
    """Faults in a stage's coefficients, apart from swaps; None if all are undecided, as with equal microbatches.

    Faults explained by undecided coefficients are left out; these also explain a factor that is not simple.
    """
    if stage.whole:
        return None if stage.undecided else (Cause(stage.whole, detail="every gradient"),)
    calls = sorted({term.gradient for term in nominal if term.what == "earlier"})
    own = {term.activation: c for term, c in nominal.items() if term.what == "pair"}
    within = max(CLOSE, stage.limit)
    faults = [*faults_in_counts(update, own, within)]
    for call in calls:
        part = {term.activation: c for term, c in nominal.items() if term[::2] == ("earlier", call)}
        detail = f"in the accumulating call {call} before the step"
        faults += [replace(fault, detail=detail, earlier=call) for fault in faults_in_counts(update, part, within)]
    if any(nominal.values()):  # zero is a gradient, not the part of one
        faults = [replace(fault, kind="dropped") if fault.kind == "zero" else fault for fault in faults]
    if len({(fault.kind, fault.factor) for fault in faults}) == 1 and calls and len(faults) == len(calls) + 1:
        faults = [replace(faults[0], detail="", earlier=0)]
    terms = {term: c for term, c in stage.coefficients.items() if not term.nominal and c}
    for what, (kind, words) in _FOREIGN.items():
        of = [c for term, c in terms.items() if term.what == what]
        faults += [Cause(kind, factor=c, detail=words if c == 1.0 else f"{words}, {c:.4g} times") for c in of]
    for what, words in _OLD.items():
        found = {term.activation if what == "old-gradient" else term.gradient for term in terms if term.what == what}
        faults += [Cause("stale-tensor", microbatches=tuple(sorted(found)), detail=words)] if found else []
    if not stage.undecided:
        return tuple(faults)
    others = {microbatch for term in stage.undecided for microbatch in (term.activation, term.gradient)}
    clear = [one for one in faults if one.microbatches and one.kind != "scale"]
    return tuple(one for one in clear if not others & set(one.microbatches)) or None


def _place_faults(
    update: Update, stages: Sequence[Explanation], faults: dict[Stage, tuple[Cause, ...]]
) -> Iterator[Cause]:
    """Each fault once, with all stages that show it; its factor up to rounding."""
    where: dict[Cause, list[Stage]] = {}
    for stage, found in sorted(faults.items()):
        for fault in found:
            same = (
                one for one, at in where.items() if _is_same(fault, one, *(stages[s].limit for s in (stage, at[0])))
            )
            where.setdefault(next(same, fault), []).append(stage)
    known = [*faults]
    for fault, at in sorted(where.items(), key=lambda item: (-len(item[1]), -max(item[1]))):
        last = at[-1]
        if len(at) == 1:
            yield replace(fault, stage=last)
        elif at == sorted(known) and last == update.now.stages - 1:
            yield fault
        elif at == list(range(len(at))) and last + 1 in known:
            below = f"stage {last}'s output gradient may already be so: every earlier stage shows the same"
            yield replace(fault, stage=last, detail="; ".join(filter(None, (fault.detail, below))))
        else:
            ranks = {update.placement[s] for s in at}
            yield replace(fault, rank=ranks.pop() if len(ranks) == 1 else None, stages=tuple(at))


def _is_same(one: Cause, other: Cause, *limits: float) -> bool:
    if one.factor is None or other.factor is None:
        return one == other
    near = abs(one.factor - other.factor) <= max(ALIKE, *limits) * abs(other.factor)
    return near and replace(one, factor=other.factor, detail=other.detail) == other


def _unknown(
    stages: Sequence[Explanation], tied: Sequence[Shares], sums: Mapping[Stage, Sequence[Cause]]
) -> Iterator[str]:
    for one in reversed(stages):
        if one.unfounded:
            yield f"stage {one.stage}: what the reference's microbatches give does not add up to its own gradients"
        elif not one.explained and not sums[one.stage]:
            tried = "no mix of the reference's contributions explains these gradients"
            text = tried if one.residual > one.limit else "rounding hides what its gradients are made of"
            yield f"stage {one.stage}: {text} (left over {one.residual:.1e}; rounding allows {one.limit:.1e})"
        elif one.undecided:
            terms = ", ".join(f"({t.activation}, {t.gradient})" for t in one.undecided)
            yield f"stage {one.stage}: the coefficients of {terms} are not decided by so few, or so similar, numbers"
        named = {cause.parameter for cause in sums[one.stage]}
        for odd in one.odd:
            if odd.kind == "shape":
                what = f"the gradient of {odd.parameter} is {odd.forms[0]}, expected {odd.forms[1]}"
                yield f"stage {one.stage}: {what}: of a part, hand back its place"
            elif not odd.is_known and odd.parameter not in named:
                where = None if odd.part is None else odd.part.text
                what = _NOTHING if where is None else f"wrong in {where} alone, by no known fault"
                text = "; ".join(filter(None, (what, odd.words)))
                yield f"stage {one.stage}: the gradient of {odd.parameter} is {text}"
    yield from name_open(tied)


def _rule_out(
    stages: Sequence[Explanation], tied: Sequence[Shares], causes: Sequence[Cause], *, known: bool
) -> Iterator[RuledOut]:
    """Kinds excluded by coefficients. They describe a stage's own parameters alone: wrong copies may differ.

    ``known``: whether the step before is. An unknown one may have had the same microbatches, and so be the reason for
    repeated ones.
    """
    for one in stages:
        right = [odd.parameter for odd in one.odd if odd.kind == "right"]
        if right:
            evidence = f"of stage {one.stage}, {', '.join(right)} {'is' if len(right) == 1 else 'are'} right"
            yield RuledOut((), evidence, len(right))
    counted = ("multiple", "counted", "sum", "other")
    if not all(copy.right for copy in tied) or any(odd.kind in counted for one in stages for odd in one.odd):
        return  # the other parameters do not speak for these
    terms = [(term, c) for one in stages for term, c in one.coefficients.items()]
    nominal = [c for term, c in terms if term.nominal]
    if not nominal or not all(one.complete and one.names and not one.undecided for one in stages):
        return
    kinds = {cause.kind for cause in causes}
    paired = any(c and term.what in ("pair", "logits", "flow") and not term.nominal for term, c in terms)
    others = any(c and not term.nominal for term, c in terms)
    there = {term for term, c in terms if term.nominal and c}
    lost = "" if all(nominal) else " in the sums"
    swapped = _SWAPPED if {term for term, _ in terms if term.nominal} == there else ()  # else of some nothing is known
    for found, holds, evidence in (
        (("dropped", "zero"), all(nominal), "every microbatch is in every stage's sum"),
        (("doubled",), not paired and not any(c > 1 for _, c in terms), "no microbatch is there twice"),
        (swapped, not others and bool(there), f"every activation{lost} met its own microbatch's output gradient"),
        (_STALE, not others and (known or max(nominal) <= 1.0), "nothing of an earlier step is in the sums"),
        (("scale", "sign"), set(nominal) <= {0.0, 1.0}, "every contribution has factor 1"),
    ):
        if holds and not kinds & set(found):
            excluded = tuple(kind for kind in found if kind != "swapped-data" or not kinds >= {"dropped", "doubled"})
            yield RuledOut(excluded, evidence, sum(map(bool, nominal)) if found == swapped else len(nominal))


def _with_rank(update: Update, cause: Cause) -> Cause:
    if cause.stage is None or not update.placement:
        return cause
    instead = tuple(_with_rank(update, other) for other in cause.instead)
    return replace(cause, rank=update.placement[cause.stage], instead=instead)


def of_parameters(
    update: Update, stages: Sequence[Explanation], sums: Mapping[Stage, Sequence[Cause]]
) -> Iterator[Cause]:
    """Causes for parameters that deviate from their stage, in gradient order from the last stage.

    Factors and counts tell nothing if any parameter stays unexplained: all may have one cause, such as an overwritten
    output gradient, which a bias shows as one microbatch in place of others, and a weight as unknown.
    """
    for one in reversed(stages):
        if one.whole:
            continue  # the stage's own fault
        yield from sums[one.stage]
        groups: dict[Likeness, list[Likeness]] = {}
        alone = all(odd.is_known for odd in one.odd)
        for odd in (odd for odd in one.odd if alone or odd.kind not in ("counted", "multiple")):
            groups.setdefault(replace(odd, at=None, label=None if odd.kind == "other" else odd.label), []).append(odd)
        for alike in groups.values():
            first, *others = alike
            also = f"also: {', '.join(odd.parameter for odd in others)}" if others else ""
            if first.kind == "other" and first.source is None:  # exchanged gradients each have a source
                also = ", ".join(f"{odd.parameter} has {odd.text}" for odd in others)
            where = "" if first.part is None else f"{first.part.text} of it, all else is right"
            for cause in _of_elements(update, first, max(CLOSE, one.limit)):
                detail = "; ".join(filter(None, (where, cause.detail, also)))
                names = tuple(odd.parameter for odd in alike)
                yield replace(cause, stage=one.stage, parameter=names[0], detail=detail, parameters=names)


def find_untrained(update: Update) -> Iterator[Cause]:
    """Causes for frozen parameters with a gradient."""
    for stage in range(update.now.stages):
        trained = update.now.parameters(stage)
        for (owner, name), expected in update.expected.items():
            observed = update.observed.get((owner, name))
            if owner == stage and name not in trained and expected is None and not stands_for_none(observed):
                yield Cause("unexpected", stage=stage, parameter=name)


def _of_elements(update: Update, odd: Likeness, within: float) -> Iterator[Cause]:
    if odd.kind in ("missing", "unexpected", "zero", "not-finite", "rounded"):
        yield Cause(odd.kind)
    elif odd.kind == "reordered":
        yield Cause("altered", detail=f"its own {odd.line}s are in another order")
    elif odd.kind == "other" and odd.source is not None:
        yield Cause("misplaced", detail=f"what is there belongs in {odd.source.text}")
    elif odd.kind == "other" and odd.label is not None:
        yield Cause("misplaced", detail=f"it is {gradient_of(odd.label)}")
    elif odd.kind == "multiple" and odd.factor is not None:
        fault = uniform(update, odd.factor, within)
        yield replace(fault, detail=f"{odd.factor:.6g} times" if fault.detail else "")
    elif odd.kind == "sum":
        yield Cause("extra-term", detail=odd.change)
    elif odd.kind == "counted":
        yield from faults_in_counts(update, dict(odd.counts), within)

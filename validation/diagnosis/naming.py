"""From what gradients are made of to the faults that made them so.

First what each stage shows by itself; then the same fault in several stages becomes one cause: in all of them it is the
step's, in the first ones it came down with the output gradients.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from reference.step import Stage
from validation.cause import Cause
from validation.diagnosis.atoms import Term
from validation.diagnosis.chains import swaps
from validation.diagnosis.explanation import Explanation, Oddity
from validation.diagnosis.mixed import mixed
from validation.diagnosis.tied import Shares
from validation.diagnosis.update import Update
from validation.diagnosis.within import Paired

_WHOLE = {"missing", "unexpected", "rounded", "not-finite"}  # what a whole stage can be at once
_SAME = 1e-3  # factors that differ by no more, relatively, are one


@dataclass(frozen=True)
class Fault:
    """What is wrong in a stage's coefficients; ``within``: how far, relatively, rounding may have moved its factor."""

    kind: str
    microbatches: tuple[int, ...] = ()
    factor: float | None = None
    detail: str = ""
    within: float = field(default=_SAME, compare=False)

    def same(self, other: "Fault") -> bool:
        """Whether both are one fault, seen twice: alike but for how rounding moved the factor."""
        if self.factor is None or other.factor is None:
            return self == other
        near = abs(self.factor - other.factor) <= max(self.within, other.within) * abs(self.factor)
        return near and (self.kind, self.microbatches) == (other.kind, other.microbatches)


def name_causes(
    update: Update, stages: Sequence[Explanation], tied: Sequence[Shares]
) -> tuple[tuple[Cause, ...], tuple[str, ...], tuple[str, ...]]:
    """The causes, the most likely first; what stays unknown; and what was ruled out."""
    swapped = swaps(update, stages)
    shown = [one for one in stages if one.explained and (one.compared or one.odd or not any(one.coefficients.values()))]
    faults = {one.stage: found for one in shown if (found := _decided_faults(update, one)) is not None}
    sums = mixed(stages, update)
    causes = [*swapped, *_placed(update, faults), *_odd(update, stages, sums), *_tied(update, tied)]
    causes += _untrained(update)
    causes = [_with_rank(update, cause) for cause in causes]
    unknown = tuple(_unknown(stages, tied, sums))
    return tuple(dict.fromkeys(causes)), unknown, tuple(_ruled_out(stages, causes))


def _decided_faults(update: Update, stage: Explanation) -> tuple[Fault, ...] | None:
    """A stage's faults but for those that other coefficients would explain away, as where microbatches are equal.

    None where no other is left.
    """
    faults = faults_of(update, stage, filled(stage))
    if not stage.undecided:
        return faults
    others = {microbatch for term in stage.undecided for microbatch in (term.activation, term.gradient)}
    return tuple(one for one in faults if one.microbatches and not others & set(one.microbatches)) or None


def filled(stage: Explanation) -> dict[Term, float]:
    """The nominal coefficients, a wrong pair counted for the microbatch whose output gradient it used up.

    Where that microbatch is there already, it is the one whose activation was used.
    """
    found = {term: c for term, c in stage.coefficients.items() if term.nominal}
    for term, c in stage.coefficients.items():
        for slot in _slots(stage, term):
            if found.get(Term("pair", slot, slot)) == 0.0:
                found[Term("pair", slot, slot)] = c
                break
    return found


def _slots(stage: Explanation, term: Term) -> tuple[int, ...]:
    """The microbatches that a wrong term may stand in for, the likeliest first."""
    if term.nominal or term.what in ("gradient", "contribution", "parameter", "evaluated"):
        return ()
    if term.what == "flow":
        return (term.activation, *sorted(stage.wrong[term.gradient].near))
    order = (term.activation, term.gradient) if term.what == "old-gradient" else (term.gradient, term.activation)
    return order


def faults_of(update: Update, stage: Explanation, nominal: dict[Term, float]) -> tuple[Fault, ...]:
    """What is wrong with one stage's coefficients, swaps apart."""
    calls = sorted({term.gradient for term in nominal if term.what == "earlier"})
    own = {term.activation: c for term, c in nominal.items() if term.what == "pair"}
    within = max(_SAME, stage.limit)
    absent = {oddity.what for oddity in stage.odd}
    if stage.compared == 0 and len(absent) == 1 and absent <= _WHOLE:
        return (Fault(absent.pop(), detail="every parameter"),)
    faults = [*_weights(update, own, within)]
    for call in calls:
        part = {term.activation: c for term, c in nominal.items() if term[::2] == ("earlier", call)}
        detail = f"in the accumulating call {call} before the step"
        faults += [replace(fault, detail=detail) for fault in _weights(update, part, within)]
    if any(nominal.values()):  # zero is a gradient, not the part of one
        faults = [replace(fault, kind="dropped") if fault.kind == "zero" else fault for fault in faults]
    if len({fault.kind for fault in faults}) == 1 and calls and len(faults) == len(calls) + 1:
        if len({fault.factor for fault in faults}) == 1:
            faults = [replace(faults[0], detail="")]
    return (*faults, *_leftovers(stage))


def _weights(update: Update, found: Mapping[int, float], within: float) -> Iterator[Fault]:
    """What is wrong with the coefficients of microbatches, each of which should be 1, up to ``within``."""
    uneven = _uneven(update, found, within)
    if uneven is not None:
        yield uneven
        return
    base = _base(list(found.values()), within)
    if abs(base - 1.0) > within:
        yield _uniform(update, base, within)
    if base == 0.0:
        return
    odd: dict[float, list[int]] = {}
    for microbatch, c in found.items():
        ratio = c / base
        if abs(ratio - 1) > within:
            same = next((known for known in odd if abs(known - ratio) <= within * abs(known)), ratio)
            odd.setdefault(same, []).append(microbatch)
    for ratio, microbatches in sorted(odd.items()):
        yield _some(update, ratio, tuple(microbatches), within)


def _base(values: list[float], within: float) -> float:
    """The factor that most microbatches have, or 1."""
    groups: Counter[float] = Counter()
    for value in values:
        groups[next((g for g in groups if abs(g - value) <= within * max(abs(g), abs(value))), value)] += 1
    (base, count), *_ = groups.most_common(1)
    if count == len(values) or (2 * count > len(values) and base != 0.0):
        return base
    return 1.0


def _uniform(update: Update, factor: float, within: float) -> Fault:
    if factor == 0.0:
        return Fault("zero")
    if factor == -1.0:
        return Fault("sign", factor=-1.0)
    return Fault("scale", factor=factor, detail=factor_words(update, factor, within), within=within)


def _some(update: Update, ratio: float, microbatches: tuple[int, ...], within: float) -> Fault:
    if abs(ratio) <= within:
        return Fault("dropped", microbatches)
    undivided = ratio == update.now.microbatches > 2  # by their number; nothing is counted so often by chance
    if ratio == round(ratio) and ratio >= 2 and not undivided:
        detail = "" if ratio == 2 else f"{ratio:g} times"
        return Fault("doubled", microbatches, factor=ratio, detail=detail)
    kind = "sign" if ratio == -1 else "scale"
    detail = factor_words(update, ratio, within)
    return Fault(kind, microbatches, factor=ratio, detail=detail, within=within)


def _uneven(update: Update, found: Mapping[int, float], within: float) -> Fault | None:
    """Microbatches weighted by their tokens, or alike, where it should be the other way round.

    Not those that all have one factor, least of all none: that is in proportion to anything.
    """
    counts = {i: float(batch.tokens) for i, batch in enumerate(update.now.batches)}
    if not all(counts.values()) or len(set(found.values())) == 1:
        return None  # nobody knows how many targets count
    for weights, words in ((counts, "by their tokens, not alike"), ({i: 1 / n for i, n in counts.items()}, "alike")):
        ratios = [found[i] / weights[i] for i in found]
        if len(set(counts.values())) > 1 and max(ratios) - min(ratios) <= within * abs(max(ratios)):
            return Fault("unequal-weights", factor=None, detail=f"microbatches count {words}")
    return None


def _leftovers(stage: Explanation) -> Iterator[Fault]:
    """What is in a gradient that is no part of this step."""
    terms = {term: c for term, c in stage.coefficients.items() if not term.nominal and c}
    for what, kind, words in (
        ("gradient", "stale-gradient", "the gradient of the step before was added"),
        ("parameter", "extra-term", "the parameter itself was added"),
        ("evaluated", "extra-term", "the gradient of an evaluation was added"),
    ):
        for term, c in terms.items():
            if term.what == what:
                yield Fault(kind, factor=c, detail=f"{words}, {c:.4g} times")
    old = {term.activation: c for term, c in terms.items() if term.what == "contribution"}
    if old:
        factor = next(iter(old.values())) if len(set(old.values())) == 1 else None
        yield Fault("stale-gradient", tuple(sorted(old)), factor, "of these microbatches of the step before")
    for what, words in (
        ("old-activation", "an activation of the step before"),
        ("old-gradient", "an output gradient of the step before"),
        ("old-data", "data of the step before"),
        ("old-weights", "weights of the step before"),
    ):
        found = sorted(
            {term.activation if what == "old-gradient" else term.gradient for term in terms if term.what == what}
        )
        if found:
            yield Fault("stale-tensor", tuple(found), detail=words)


def factor_words(update: Update, factor: float, within: float = _SAME) -> str:
    """Where a factor may come from: every number of things in this step that it is, or is one over."""
    count, tokens = len(update.now.batches), sum(batch.tokens for batch in update.now.batches)
    known = {
        "the number of microbatches": count,
        "the square of the number of microbatches": count**2,
        "the number of tokens": tokens,
        "tokens per microbatch": tokens / count,
        "the number of stages": update.now.stages,
        "the number of ranks" + " of a replica" * (update.replicas > 1): len(set(update.placement)),
        "the number of replicas": update.replicas,
    }
    minus, size = ("minus " if factor < 0 else ""), abs(factor)
    told = {name: value for name, value in known.items() if value not in (0, 1)}
    times = {name: value for name, value in told.items() if abs(size - value) <= within * value}
    over = {name: value for name, value in told.items() if abs(size - 1 / value) <= within / value}
    for found, fraction, words in ((times, "", ""), (over, "1/", "one over ")):
        if found:
            return f"{minus}{fraction}{next(iter(found.values())):g}, {words}{' or '.join(found)}"
    digits = 6 if within <= _SAME else math.ceil(-math.log10(within))
    return f"{factor:.{digits}g} times"


def _placed(update: Update, faults: dict[Stage, tuple[Fault, ...]]) -> Iterator[Cause]:
    """Each fault once, with the stages that it is in."""
    compounded = _compounded(update, faults)
    if compounded is not None:
        yield compounded
        return
    where: dict[Fault, list[Stage]] = {}
    for stage, found in sorted(faults.items()):
        for fault in found:
            known = next((known for known in where if known.same(fault)), fault)
            where.setdefault(known, []).append(stage)
    for fault, stages in sorted(where.items(), key=lambda item: -len(item[1])):
        yield from _in_stages(update, fault, stages, list(faults))


def _in_stages(update: Update, fault: Fault, stages: list[Stage], known: list[Stage]) -> Iterator[Cause]:
    cause = Cause(fault.kind, microbatches=fault.microbatches, factor=fault.factor, detail=fault.detail)
    if stages == sorted(known) and len(known) > 1:
        yield cause
    elif len(stages) > 1 and stages == list(range(len(stages))):
        below = f"stage {stages[-1]}'s output gradient already was so: all stages before it show the same"
        yield replace(cause, stage=stages[-1], detail="; ".join(filter(None, (fault.detail, below))))
    elif len(ranks := {update.placement[s] for s in stages}) == 1 and len(stages) > 1:
        yield replace(cause, rank=ranks.pop(), detail="; ".join(filter(None, (fault.detail, f"stages {stages}"))))
    else:
        yield from (replace(cause, stage=stage) for stage in stages)


def _compounded(update: Update, faults: dict[Stage, tuple[Fault, ...]]) -> Cause | None:
    """A factor that every stage applies once more to what it hands on."""
    factors = []
    within = max((fault.within for found in faults.values() for fault in found), default=_SAME)
    for stage in reversed(range(update.now.stages)):
        found = faults.get(stage, ())
        if len(found) > 1 or any(fault.kind not in ("scale", "sign") or fault.microbatches for fault in found):
            return None
        factors.append(found[0].factor or 1.0 if found else 1.0)
    if len(factors) < 3 or stage not in faults or factors[0] == factors[1] or not factors[0]:
        return None
    ratios = [low / high for high, low in pairwise(factors)]
    if max(ratios) - min(ratios) > within * abs(max(ratios)) or abs(abs(ratios[0]) - 1.0) <= within:
        return None
    detail = f"{factor_words(update, ratios[0], within)}, once more in every stage before"
    return Cause("scale", factor=ratios[0], detail=detail)


def _odd(update: Update, stages: Sequence[Explanation], sums: Mapping[Stage, Sequence[Cause]]) -> Iterator[Cause]:
    """The parameters that do not follow their stage."""
    for one in stages:
        if one.compared == 0 and len({oddity.what for oddity in one.odd} & _WHOLE) == 1:
            continue  # the stage's own fault
        yield from sums[one.stage]
        groups: dict[tuple[str, float | None, Paired | None], list[str]] = {}
        for oddity in one.odd:
            groups.setdefault((oddity.what, oddity.factor, oddity.pairs), []).append(oddity.parameter)
        for (what, factor, pairs), names in groups.items():
            for cause in _odd_causes(update, Oddity(names[0], what, factor, pairs), max(_SAME, one.limit)):
                more = f"and {', '.join(names[1:])}" if len(names) > 1 else ""
                detail = "; ".join(filter(None, (cause.detail, more)))
                yield replace(cause, stage=one.stage, parameter=names[0], detail=detail)


def _untrained(update: Update) -> Iterator[Cause]:
    """Parameters that are not trained, and have a gradient."""
    for stage in range(update.now.stages):
        trained = update.now.parameters(stage)
        for (owner, name), due in update.expected.items():
            seen = update.observed.get((owner, name))
            if owner == stage and name not in trained and due is None and seen is not None:
                yield Cause("unexpected", stage=stage, parameter=name)


def _odd_causes(update: Update, odd: Oddity, within: float) -> Iterator[Cause]:
    if odd.what in ("missing", "unexpected", "zero", "not-finite", "rounded", "altered"):
        yield Cause(odd.what)
    elif odd.what == "shape":
        yield Cause("partition", detail="its gradient has another shape")
    elif odd.what == "factor" and odd.factor is not None:
        fault = _uniform(update, odd.factor, within)
        yield Cause(fault.kind, factor=fault.factor, detail=fault.detail)
    elif odd.pairs is not None:
        told = ", ".join(f"{j} with {i}'s" for i, j in odd.pairs.wrong)
        microbatches = tuple(sorted({j for _, j in odd.pairs.wrong}))
        for kind in odd.pairs.kinds:
            yield Cause(kind, microbatches=microbatches, detail=f"its output gradients met activations so: {told}")


def _tied(update: Update, tied: Sequence[Shares]) -> Iterator[Cause]:
    """One cause for each tied parameter, with a stage if only one of its copies is wrong."""
    for copies in update.tied:
        wrong = [copy for copy in tied if (copy.stage, copy.parameter) in copies.items() and not copy.right]
        causes = [_tied_cause(copy) for copy in wrong if copy.explained]
        if any(cause.kind == "altered" for cause in causes):
            yield next(cause for cause in causes if cause.kind == "altered")
        elif causes and len({cause.kind for cause in causes}) == 1 and len(causes) == len(copies):
            detail = "; ".join(f"{cause.parameter} of stage {cause.stage} has {cause.detail}" for cause in causes)
            yield replace(causes[0], stage=None, detail=detail)
        else:
            yield from causes


def _tied_cause(copy: Shares) -> Cause:
    where = Cause(copy.absent or "tied-not-summed", stage=copy.stage, parameter=copy.parameter)
    counts = list(copy.counts.values())
    if copy.turned is not None:
        return replace(where, kind="altered", stage=copy.turned, detail="its share is in another order")
    if copy.lacking:
        listed = ", ".join(map(str, copy.lacking))
        detail = f"other stages' share of microbatch {listed} is missing"
        return replace(where, microbatches=copy.lacking, detail=detail)
    detail = ", ".join(f"stage {stage}'s share {count:g} times" for stage, count in copy.counts.items())
    if copy.absent or (0.0 in counts and set(counts) <= {0.0, 1.0}):
        return replace(where, detail=detail)
    if all(count == round(count) and count >= 1 for count in counts):
        return replace(where, kind="tied-doubled", detail=detail)
    if counts and max(counts) - min(counts) <= _SAME * abs(max(counts)):
        return replace(where, kind="scale", factor=counts[0], detail=detail)
    return replace(where, detail=detail)


def _unknown(
    stages: Sequence[Explanation], tied: Sequence[Shares], sums: Mapping[Stage, Sequence[Cause]]
) -> Iterator[str]:
    for one in reversed(stages):
        if not one.explained:
            yield (
                f"stage {one.stage}: no combination of what the reference knows makes its gradients; the best leaves "
                f"{one.residual:.1e} of them, rounding {one.limit:.1e}"
            )
        elif one.undecided:
            terms = ", ".join(f"({t.activation}, {t.gradient})" for t in one.undecided)
            yield f"stage {one.stage}: the coefficients of {terms} are not decided by so few, or so similar, numbers"
        told = {cause.parameter for cause in sums[one.stage]}
        for odd in one.odd:
            if odd.what == "unknown" and odd.parameter not in told:
                yield f"stage {one.stage}: the gradient of {odd.parameter} is no multiple of what the others say"
    for copy in tied:
        if not copy.explained:
            yield f"stage {copy.stage}: the gradient of {copy.parameter} is no sum of the stages' shares"


def _ruled_out(stages: Sequence[Explanation], causes: Sequence[Cause]) -> Iterator[str]:
    """What the coefficients speak against."""
    if not stages or not all(one.explained for one in stages):
        return
    kinds = {cause.kind for cause in causes}
    terms = [(term, c) for one in stages for term, c in one.coefficients.items()]
    if not kinds & {"dropped", "zero"} and all(c for term, c in terms if term.nominal):
        yield "dropped: every microbatch is in every stage's sum"
    paired = any(c and term.what in ("pair", "logits", "flow") and not term.nominal for term, c in terms)
    if not kinds & {"doubled"} and not paired and not any(c >= 2 for _, c in terms):
        yield "doubled: no microbatch is there twice"
    if not paired and not any(kind.startswith("swapped") for kind in kinds):
        yield "swapped: every activation met its own microbatch's output gradient"
    if not any(kind.startswith("stale") for kind in kinds):
        yield "stale: nothing of an earlier step is in the sums"
    if not kinds & {"scale", "sign"}:
        yield "scale: what is there is there with factor 1"


def _with_rank(update: Update, cause: Cause) -> Cause:
    if cause.stage is None or not update.placement:
        return cause
    return replace(cause, rank=update.placement[cause.stage])

"""From a step that a record contradicts to the fault that explains it: the links of ``diagnose`` that show."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from validation.diagnosis.rule import Rule, clears, followed
from validation.diagnosis.rules.laws import buffers, partition
from validation.diagnosis.rules.norm import other_norm
from validation.diagnosis.rules.report import report
from validation.diagnosis.rules.update import Factor, clipped_as, near, to_clip
from validation.diagnosis.rules.update import update as updated
from validation.judging.cause import Cause, RuledOut
from validation.judging.tolerance import error
from validation.judging.verdict import Verdict
from validation.observers.sketch import UNSOUGHT
from validation.records.record_facts import RecordFacts

_ALIKE = 1e-3  # no verdict hangs on it
Left = Callable[[RecordFacts], Sequence[str]]


def caused(facts: RecordFacts) -> Verdict:
    """The verdict with its causes, the likeliest first; none where the evidence does not decide."""
    if facts.verdict.verdict == "pass" or not facts.verdict.mismatches:
        return facts.verdict
    if any(gradient is not None and gradient.is_complex() for gradient in facts.seen.gradients.values()):
        return replace(facts.verdict, undecided=(UNSOUGHT,))
    found = followed(facts, RULES)
    if not facts.seen.left_out or not facts.attribution:
        return found
    untold = f"{facts.seen.left_out} more wrong gradients were not looked at, for they are too large to be kept"
    return replace(found, undecided=(*found.undecided, untold))


def _broken(*laws: str) -> Left:
    """What is said where one of ``laws`` is broken and the rule behind them names no cause."""

    def left(facts: RecordFacts) -> Sequence[str]:
        broken = [law for law in laws if facts.differs(law)]
        return (f"{broken[0]}: what is wrong with it tells nothing",) if broken else ()

    return left


def _judged(law: str) -> Callable[[RecordFacts], bool]:
    return lambda facts: facts.judged(law)


def _renamed(facts: RecordFacts) -> Sequence[str]:
    broken = facts.differs("parameters-once")
    names = "parameters of the step and of what is expected do not go together: rename= says which is which"
    return (names,) if broken else ()


def _unexplained(facts: RecordFacts) -> Sequence[str]:
    return facts.unexplained or _broken("presence", "gradient")(facts)


def _beside(facts: RecordFacts) -> Sequence[RuledOut]:
    return () if facts.attribution is None or facts.indistinct else facts.attribution.ruled_out


def shared(facts: RecordFacts) -> list[Cause]:
    """Replicas of a stage, or copies of a weight, of which each has a part of the gradient, and all the whole."""
    found: dict[tuple[str, int | None, str], list[str]] = {}
    for name, by_rank in facts.seen.copies.items():
        due, told = facts.due.gradients.get(name), ""
        given = [one for one in by_rank.values() if one is not None]
        if due is None or len(given) < len(by_rank) or any(one.shape != due.shape for one in given):
            continue
        parts = [one.double().cpu() for k, one in enumerate(given) if not any(torch.equal(one, o) for o in given[:k])]
        whole = torch.stack(parts).sum(dim=0)
        for what, one in (("sum", whole), ("mean", whole / len(parts))):
            if len(parts) > 1 and error(one, due.double().cpu()) < _ALIKE:
                told = f"ranks {', '.join(map(str, by_rank))} keep gradients of their own, and their {what} is expected"
        stages = {stage for _, stage in facts.places[name]}
        if told:
            kind = "not-reduced" if len(stages) == 1 else "tied-not-summed"
            found.setdefault((kind, min(stages) if len(stages) == 1 else None, told), []).append(name)
    return [
        Cause(kind, stage=stage, parameter=names[0], detail=told)
        if len(names) == 1
        else Cause(kind, stage=stage, detail=f"{', '.join(names)}: {told}")
        for (kind, stage, told), names in found.items()
    ]


def held(facts: RecordFacts) -> list[Cause]:
    """Parameters that no stage holds, or several; nothing where they may only be called otherwise."""
    strange = any(m.what == "held" and m.due == 0 for m in facts.verdict.mismatches)
    return [] if strange else partition(facts)


def attributed(facts: RecordFacts) -> list[Cause]:
    """The causes that attribution names."""
    found = () if facts.indistinct or facts.attribution is None else facts.attribution.causes
    return [_clipped(facts, cause) for cause in found]


def _clipped(facts: RecordFacts, cause: Cause) -> Cause:
    """``cause`` with a word on clipping, where all gradients are a part of what they should be: it does just that."""
    factor, size = cause.factor, facts.due.norm
    if cause.kind != "scale" or cause.stage is not None or cause.rank is not None:
        return cause
    if factor is None or not 0 < factor < 1 or not size:
        return cause
    text = ""
    if facts.max_norm is not None and near(factor, facts.max_norm / (size + 1e-6)):
        text = f"clipping to {facts.max_norm:g} does that: they were compared after it"
    elif facts.agrees("grad-norm"):
        text = f"the norm is right, so it was done later, as clipping to {factor * size:.6g} does: compare before that"
    return replace(cause, detail="; ".join(filter(None, (cause.detail, text))))


def norm(facts: RecordFacts) -> list[Cause]:
    """A norm that is not that of the gradients, although these are right."""
    found = [m for m in facts.verdict.mismatches if m.law == "grad-norm"]
    if not found or any(map(facts.differs, ("gradient", "presence"))):
        return []
    return other_norm(facts, found)


def update(facts: RecordFacts) -> list[Cause]:
    """Parameters that are not what the right gradients should have made of them: by the clipping, or the optimizer.

    What the optimizer was given is not recorded. But where its step is linear in that, a factor shows in how far
    parameters moved, and it is clipping's if clipping comes to it. Where it does not, which of the two stays open.
    """
    found, size, most = updated(facts), facts.due.norm or 0.0, facts.max_norm
    if not found or (most is not None and size <= most):
        return found
    if most is None:
        return _or_clip(found)
    wanted = to_clip(size, most)
    used = {site: Factor(one.value * wanted, one.noise) for site, one in facts.moved.items()}
    clip = partial(to_clip, max_norm=most)
    words = {clipped_as(facts, stage, one, clip) if one.value == one.value else "" for (stage, _), one in used.items()}
    if not words or "" in words:
        return _or_clip(found)
    first = next(iter(used.values()))
    known = words.pop() if len(words) == 1 else ""
    detail = "; ".join(filter(None, (f"multiplied by {first.value:.4g}, expected {wanted:.4g}", known)))
    return [replace(found[0], kind="clip", factor=first.value, detail=detail)]


def _or_clip(found: Sequence[Cause]) -> list[Cause]:
    return [replace(cause, instead=(replace(cause, kind="clip"),)) for cause in found]


RULES: tuple[Rule[RecordFacts], ...] = (
    Rule(
        held,
        clears("parameters-once", ("partition",), "every parameter is in the stage that should hold it"),
        left=_renamed,
    ),
    Rule(shared, needs=lambda facts: bool(facts.seen.copies)),
    Rule(
        attributed,
        clears("gradient", ("scale", "sign", "dropped", "doubled"), "every gradient is what it should be"),
        _judged("presence"),
        left=_unexplained,
        beside=_beside,
    ),
    Rule(
        norm,
        clears("grad-norm", ("norm",), "the norm is that of the gradients"),
        _judged("grad-norm"),
        left=_broken("grad-norm"),
    ),
    Rule(
        update,
        clears("updated-parameters", ("clip", "update"), "the optimizer did what it should"),
        _judged("updated-parameters"),
        left=_broken("updated-parameters"),
    ),
    Rule(
        buffers,
        clears("buffers", ("buffers",), "what forwards leave behind is right"),
        _judged("buffers"),
        left=_broken("buffers"),
    ),
    Rule(
        report, clears("loss", ("report",), "every loss that was reported is right"), _judged("loss"), _broken("loss")
    ),
)

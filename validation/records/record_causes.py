"""From a step that a record contradicts to the fault that explains it: the links of ``diagnose`` that show."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from validation.diagnosis.diagnose import followed
from validation.diagnosis.rules.attributed import named
from validation.diagnosis.rules.laws import buffers, partition
from validation.diagnosis.rules.norm import other_norm
from validation.diagnosis.rules.report import report
from validation.diagnosis.rules.update import Factor, clipped_as, near, to_clip
from validation.diagnosis.rules.update import update as updated
from validation.judging.cause import Cause
from validation.judging.tolerance import error
from validation.judging.verdict import Verdict
from validation.observers.elements import UNSOUGHT
from validation.records.record_facts import RecordFacts

_ALIKE = 1e-3  # no verdict hangs on it
Link = Callable[[RecordFacts], list[Cause]]


def caused(facts: RecordFacts) -> Verdict:
    """The verdict with its causes, the likeliest first; none where the evidence does not decide."""
    if facts.verdict.verdict == "pass" or not facts.verdict.mismatches:
        return facts.verdict
    if any(gradient is not None and gradient.is_complex() for gradient in facts.seen.gradients.values()):
        return replace(facts.verdict, undecided=(UNSOUGHT,))
    found = followed(facts.verdict, facts, _links(facts), unexplained=lambda link: _left(link, facts))
    if not facts.seen.left_out or not facts.attribution:
        return found
    untold = f"{facts.seen.left_out} more wrong gradients were not looked at, for they are too large to be kept"
    return replace(found, undecided=(*found.undecided, untold))


def _links(facts: RecordFacts) -> Mapping[Link, str]:
    """The links that there is something of; and what it means that one is sound."""
    links: list[tuple[Link, str, bool]] = [
        (held, "partition: every parameter is in the stage that should hold it", True),
        (forward, "computation: every loss is right, so the forwards are", facts.agrees("loss")),
        (shared, "replicas: ranks that have a stage in common agree", bool(facts.seen.copies)),
        (attributed, "gradients: they are made of what they should be", facts.judged("none-ness")),
        (norm, "norm: it is that of the gradients", facts.judged("grad-norm")),
        (update, "clip, update: the optimizer did what it should", facts.judged("updated-parameters")),
        (buffers, "buffers: what forwards leave behind is right", facts.judged("buffers")),
        (report, "report: what was reported is what was computed", facts.judged("loss")),
    ]
    return {link: sound for link, sound, shown in links if shown}


def _left(link: Link, facts: RecordFacts) -> Sequence[str]:
    """What is wrong at a link that names no cause, where nothing behind it can be judged."""
    broken = [law for law in _ANSWERS.get(link, ()) if facts.differs(law)]
    if link is held and broken:
        return ("parameters of the step and of what is expected do not go together: rename= says which is which",)
    if link is attributed and facts.unexplained:
        return facts.unexplained
    return (f"{broken[0]}: what is wrong with it tells nothing",) if broken else ()


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


def forward(facts: RecordFacts) -> list[Cause]:
    """Nothing: what is wrong with a forward shows in its gradients. Right losses say that nothing is."""
    return []


def attributed(facts: RecordFacts) -> list[Cause]:
    """The causes that attribution names."""
    found = [] if facts.indistinct else named(facts.attribution)
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
    if not found or any(map(facts.differs, ("gradient", "none-ness"))):
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
        return [*found, *(replace(cause, kind="clip") for cause in found)]
    wanted = to_clip(size, most)
    used = {site: Factor(one.value * wanted, one.noise) for site, one in facts.moved.items()}
    clip = partial(to_clip, max_norm=most)
    words = {clipped_as(facts, stage, one, clip) if one.value == one.value else "" for (stage, _), one in used.items()}
    if not words or "" in words:
        return [*found, *(replace(cause, kind="clip") for cause in found)]
    first = next(iter(used.values()))
    known = words.pop() if len(words) == 1 else ""
    detail = "; ".join(filter(None, (f"multiplied by {first.value:.4g}, expected {wanted:.4g}", known)))
    return [replace(found[0], kind="clip", factor=first.value, detail=detail)]


_ANSWERS: Mapping[Link, tuple[str, ...]] = {  # for which laws
    held: ("parameters-once",),
    attributed: ("none-ness", "gradient"),
    norm: ("grad-norm",),
    update: ("updated-parameters",),
    buffers: ("buffers",),
    report: ("loss",),
}

"""The link that final gradients alone show: what they are made of, or which one thing would have given them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pipeproof.core.cause import Cause
from pipeproof.core.verdict import Size
from pipeproof.explain.attribution import attribute_coarsely
from pipeproof.explain.candidates import near
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.replay import replayed
from pipeproof.explain.rules.factors import by_loss_scale, told_apart
from pipeproof.explain.rules.inside import first_of_backward, other_forward
from pipeproof.explain.rules.passages import unexplained_passage
from pipeproof.explain.rules.place import or_wrong_message
from pipeproof.explain.rules.update import clip_factor


def handed_late(evidence: Evidence) -> Sequence[str]:
    """That gradients were cleared, or clipped, before they were handed back, where the update is right."""
    laws = {law.name: law for law in evidence.verdict.laws}
    updated = laws.get("updated-parameters")
    if updated is None or updated.outcome == "fail" or not updated.checked:
        return ()
    if updated.outcome == "pass" and evidence.differs("presence") and laws["gradient"].checked == 0:
        told = "no gradient was handed back, and {}: leave gradients as the update had them"
    elif _are_clipped(evidence):
        told = "gradients are those of after the clipping, and {}: give the check those of before it"
    else:
        return ()
    return (told.format("the weights after the step are right"),)


def _are_clipped(evidence: Evidence) -> bool:
    """Whether all wrong gradients are what clipping makes of the right ones."""
    found = [one for one in evidence.verdict.mismatches if one.law == "gradient"]
    factor = clip_factor(evidence, evidence.expected.norm) if found else 1.0
    sizes = [one.found for one in found if isinstance(one.found, Size) and one.found.factor is not None]
    return factor != 1.0 and len(sizes) == len(found) and all(near(one.factor, factor) for one in sizes)


def attributed(evidence: Evidence) -> list[Cause]:
    """The causes that attribution names; where they leave any open, the one thing that gives all."""
    found = evidence.attribution
    if handed_late(evidence) or found is None or found.right or evidence.alike:
        return []
    causes = [told_apart(cause, evidence) for cause in found.causes]
    if found.unknown or not causes:  # one thing that gives everything says more than what gives a part
        causes = evidence.once(replayed) or _coarsely(evidence) or causes
        causes = causes or wrong_backward(evidence) or other_forward(evidence)
    causes = [by_loss_scale(cause, evidence) for cause in causes]
    if _of_record(evidence):
        return [_clipped(evidence, cause) for cause in causes]
    return [_seen_more(cause, evidence) for cause in causes]


def wrong_backward(evidence: Evidence) -> list[Cause]:
    """The last stage with wrong gradients, where every tensor that reached a stage was recorded and is right."""
    recording, wrong = evidence.recording, evidence.wrong("gradient")
    if recording is None or not wrong or evidence.divergences or evidence.differs("loss"):
        return []
    stage = max(stage for stage, _ in wrong)
    names = [name for at, name in sorted(wrong) if at == stage]
    random = evidence.beside is not None and evidence.beside.draws
    detail = "its inputs and output gradients are right, its gradients are not"
    detail += ", and it draws random numbers" if random else ": its backward gave others, or they were changed after it"
    return [
        Cause(
            "randomness" if random else "computation",
            rank=evidence.placement[stage],
            stage=stage,
            parameter=names[0] if len(names) == 1 else None,
            detail=detail,
        )
    ]


def _of_record(evidence: Evidence) -> bool:
    """Whether nobody saw what ranks did, but for what they hold."""
    return evidence.members is not None and evidence.seen is None


def _coarsely(evidence: Evidence) -> list[Cause]:
    """The causes that attribution names where it takes rounding to be as coarse as that of what is computed."""
    found = None if evidence.due is None else attribute_coarsely(evidence.due.update)
    return [] if found is None else [told_apart(cause, evidence) for cause in found.causes]


def of_gradients(evidence: Evidence) -> list[Cause]:
    """The causes that attribution names for a step that is not ours, as whatever else was seen of it tells them."""
    found = evidence.attribution
    return [] if found is None else [_seen_more(told_apart(cause, evidence), evidence) for cause in found.causes]


def _backwards_each(evidence: Evidence, stages: Iterable[int]) -> float | None:
    """How often every microbatch went backwards through watched stages; None where that is not one number."""
    times = {evidence.backwards(stage).count(m) for stage in stages for m in range(evidence.microbatches)}
    return float(max(times)) if len(times) == 1 and max(times) > 1 else None


def _seen_more(cause: Cause, evidence: Evidence) -> Cause:
    """``cause`` with what losses and watched calls say of it; those of an operation before say nothing."""
    if cause.earlier:
        return cause
    if cause.kind == "missing" and evidence.differs("loss") and evidence.differs("gradient"):
        told = f"{cause.detail}; what follows from them, losses too, is wrong: they took no part in the forward"
        return replace(cause, kind="computation", detail=told)
    where = range(evidence.stages) if cause.stage is None else [cause.stage]
    if cause.kind == "scale" and cause.factor is not None and _backwards_each(evidence, where) == cause.factor:
        return replace(cause, kind="doubled", detail=f"every backward ran {cause.factor:g} times")
    if cause.kind in ("scale", "sign") and evidence.flowed_right(where, cause.factor):
        after = "every output gradient that came in is right: the factor came after that"
        return replace(cause, detail="; ".join(filter(None, (cause.detail, after))))
    watched = {*evidence.passed} - evidence.unseen
    if cause.kind == "swapped-activations" and evidence.differs("loss") and cause.stage in watched:
        return or_wrong_message(replace(cause, kind="mispaired"))
    return cause


def unexplained(evidence: Evidence) -> Sequence[str]:
    """What is left without an explanation, at the boundaries and in gradients."""
    if told := handed_late(evidence):
        return told
    found = evidence.unexplained
    found = (*first_of_backward(evidence), *found) if found else found
    if found and evidence.passed:
        return (*unexplained_passage(evidence), *found)
    wrong = [law for law in ("presence", "gradient") if _of_record(evidence) and evidence.differs(law)]
    return found or tuple(f"{law}: what is wrong with it tells nothing" for law in wrong[:1])


def in_part(evidence: Evidence, causes: Sequence[Cause]) -> tuple[tuple[()], Sequence[str]]:
    """What attribution leaves unexplained, where ``causes`` are those that it names: they give a part alone."""
    found = evidence.attribution
    own = set() if found is None else {(one.stage, one.microbatches, one.parameter) for one in found.causes}
    told = any((one.stage, one.microbatches, one.parameter) in own for one in causes)
    left = found.unknown if found is not None and told else ()
    return (), left


def _clipped(evidence: Evidence, cause: Cause) -> Cause:
    """``cause`` with a word on clipping, where all gradients are a part of what they should be: it does just that."""
    factor, size, most = cause.factor, evidence.expected.norm, evidence.max_norm
    if cause.kind != "scale" or cause.stage is not None or cause.rank is not None:
        return cause
    if factor is None or not 0 < factor < 1 or not size:
        return cause
    text = ""
    if most is not None and near(factor, most / (size + 1e-6)):
        text = f"clipping to {most:g} does that: they were compared after it"
    elif evidence.verdict.law("grad-norm").outcome == "pass":
        text = f"the norm is right, so it was done later, as clipping to {factor * size:.6g} does: compare before that"
    return replace(cause, detail="; ".join(filter(None, (cause.detail, text))))

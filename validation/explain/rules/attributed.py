"""The link that final gradients alone show: their addends, or the one fault that reproduces them."""

import math
from collections.abc import Sequence
from dataclasses import replace

from pipeproof.core.cause import Cause
from pipeproof.core.verdict import Size
from pipeproof.explain.attribution import attribute_coarsely
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.limits import CLOSE
from pipeproof.explain.replay import is_same_loss, replay
from pipeproof.explain.rules.factors import by_loss_scale, is_near, tell_apart
from pipeproof.explain.rules.passages import list_unexplained_passages
from pipeproof.explain.rules.places import or_wrong_message
from pipeproof.explain.rules.update import clip_factor
from pipeproof.pipeline.sizes import some


def note_late_gradients(evidence: Evidence) -> Sequence[str]:
    """Note gradients cleared or clipped too early, if the update matches."""
    laws = {law.name: law for law in evidence.verdict.laws}
    updated = laws.get("updated-parameters")
    if updated is None or updated.outcome == "fail" or not updated.checked:
        return ()
    right = "and the weights after the step are right"
    if updated.outcome == "pass" and evidence.differs("presence") and laws["gradient"].checked == 0:
        return (f"no gradient was handed back, {right}: leave gradients as the update had them",)
    found = [one for one in evidence.verdict.mismatches if one.law == "gradient"]
    factor = clip_factor(evidence, evidence.expected.norm) if found else 1.0
    sizes = [one.observed for one in found if isinstance(one.observed, Size) and one.observed.factor is not None]
    if factor != 1.0 and len(sizes) == len(found) and all(is_near(one.factor, factor) for one in sizes):
        cure = "give the check the gradients from before it"
        return (f"gradients were read after the clipping, {right}: {cure}",)
    return ()


def attribute_gradients(evidence: Evidence) -> list[Cause]:
    """Return attribution's causes; if they leave anything open, the fault that reproduces everything."""
    found = evidence.attribution
    if note_late_gradients(evidence) or found is None or found.right or evidence.alike:
        return []
    causes = [tell_apart(cause, evidence) for cause in found.causes]
    if found.unknown or not causes:  # a fault that reproduces everything says more than one for a part
        whole = evidence.once(replay)
        if not whole and evidence.right is not None:  # rounding may be as coarse as the computation's
            coarse = attribute_coarsely(evidence.right.update)
            whole = [] if coarse is None else [tell_apart(cause, evidence) for cause in coarse.causes]
        causes = whole or causes
        causes = causes or wrong_backward(evidence) or other_forward(evidence)
    causes = [by_loss_scale(cause, evidence) for cause in causes]
    if _of_record(evidence):
        return [_add_clipping(evidence, cause) for cause in causes]
    return [_add_evidence(cause, evidence) for cause in causes]


def wrong_backward(evidence: Evidence) -> list[Cause]:
    """Blame the last stage with wrong gradients, if every tensor to a stage was recorded and matches."""
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
    """True if only the ranks' final state was observed, without actions."""
    return evidence.members is not None and evidence.run is None


def of_gradients(evidence: Evidence) -> list[Cause]:
    """Return attribution's causes for a foreign step, refined by further observations."""
    found = evidence.attribution
    return [] if found is None else [_add_evidence(tell_apart(cause, evidence), evidence) for cause in found.causes]


def _add_evidence(cause: Cause, evidence: Evidence) -> Cause:
    """Refine ``cause`` by losses and watched calls; not for an earlier operation."""
    if cause.earlier:
        return cause
    if cause.kind == "missing" and evidence.differs("loss") and evidence.differs("gradient"):
        detail = f"{cause.detail}; what follows from them, losses too, is wrong: they took no part in the forward"
        return replace(cause, kind="computation", detail=detail)
    where = range(evidence.stages) if cause.stage is None else [cause.stage]
    times = {evidence.backwards(stage).count(m) for stage in where for m in range(evidence.microbatches)}
    if cause.kind == "scale" and times == {cause.factor} and max(times) > 1:
        return replace(cause, kind="doubled", detail=f"every backward ran {cause.factor:g} times")
    if cause.kind in ("scale", "sign") and evidence.is_flow_right(where, cause.factor):
        after = "every output gradient that came in is right: the factor came after that"
        return replace(cause, detail="; ".join(filter(None, (cause.detail, after))))
    watched = {*evidence.passed} - evidence.unseen
    if cause.kind == "swapped-activations" and evidence.differs("loss") and cause.stage in watched:
        return or_wrong_message(replace(cause, kind="mispaired"))
    return cause


def list_unexplained(evidence: Evidence) -> Sequence[str]:
    """Unexplained mismatches, at the boundaries and in gradients."""
    if notes := note_late_gradients(evidence):
        return notes
    found = evidence.unexplained
    found = (*first_of_backward(evidence), *found) if found else found
    if found and evidence.passed:
        return (*list_unexplained_passages(evidence), *found)
    wrong = [law for law in ("presence", "gradient") if _of_record(evidence) and evidence.differs(law)]
    return found or tuple(f"{law}: no known fault explains its mismatches" for law in wrong[:1])


def in_part(evidence: Evidence, causes: Sequence[Cause]) -> tuple[tuple[()], Sequence[str]]:
    """Return attribution's unexplained rest, if ``causes`` come from it: they cover a part."""
    found = evidence.attribution
    own = set() if found is None else {(one.stage, one.microbatches, one.parameter) for one in found.causes}
    named = any((one.stage, one.microbatches, one.parameter) in own for one in causes)
    left = found.unknown if found is not None and named else ()
    return (), left


def _add_clipping(evidence: Evidence, cause: Cause) -> Cause:
    """Add a word on clipping to ``cause``, if all gradients shrink alike: its signature."""
    factor, size, most = cause.factor, evidence.expected.norm, evidence.max_norm
    if cause.kind != "scale" or cause.stage is not None or cause.rank is not None:
        return cause
    if factor is None or not 0 < factor < 1 or not size:
        return cause
    text = ""
    if most is not None and is_near(factor, most / (size + 1e-6)):
        text = f"clipping to {most:g} does that: they were compared after it"
    elif evidence.verdict.law("grad-norm").outcome == "pass":
        text = f"the norm is right, so it was done later, as clipping to {factor * size:.6g} does: compare before that"
    return replace(cause, detail="; ".join(filter(None, (cause.detail, text))))


def other_forward(evidence: Evidence) -> list[Cause]:
    """Blame the only stage's forward, or its data, by elimination.

    Every reported loss is wrong, the weights are all right, and no loss is another's or a multiple: such losses name
    the fault, or say too little.
    """
    losses = [one for one in evidence.verdict.mismatches if one.law == "loss"]
    begun = [one for one in evidence.verdict.laws if one.name == "initial-weights" and one.outcome == "pass"]
    known = evidence.run is not None and any(one.checked and not one.left_out for one in begun)
    besides = any(map(evidence.differs, ("presence", "buffers", "microbatches")))
    if evidence.beside is None or evidence.stages > 1 or not known or besides:
        return []
    rows = enumerate(row[evidence.number] for row in evidence.observed.ranks)
    reported = {(rank, m) for rank, row in rows for m, _ in zip(row.share or (), row.losses, strict=False)}
    numbers = [one.observed for one in losses if isinstance(one.observed, float) and math.isfinite(one.observed)]
    every = bool(reported) and {(one.rank, one.microbatch) for one in losses} == reported
    others = any(is_same_loss(one, other) for one in numbers for other in evidence.expected.losses)
    ratios = [one.ratio for one in losses if one.ratio is not None]
    multiple = all(abs(one / ratios[0] - 1) < CLOSE for one in ratios) if ratios and ratios[0] else True
    if not every or len(numbers) < len(losses) or others or (multiple and evidence.microbatches > 1):
        return []
    if not evidence.beside.plain:
        return []  # numbers drawn otherwise, or another mode, give other losses too
    detail = "every loss is wrong, and none is another microbatch's; weights are right; no factor gives the gradients"
    rank = evidence.placement[0] if evidence.ranks == 1 else None
    data = Cause("swapped-data", rank=rank, stage=0, detail="or its inputs or targets are not its own")
    return [replace(data, kind="computation", detail=detail, instead=(data,))]


def first_of_backward(evidence: Evidence) -> Sequence[str]:
    """The first wrong gradient along the backward, given right losses and right gradients behind it; else empty."""
    used, wrong = evidence.used, evidence.wrong("gradient", "replicas", "presence")
    last = max((used.get(name, 0) for _, name in wrong), default=0)
    if not last or evidence.differs("loss"):
        return ()  # used outside its module, or nowhere
    stage, name = min(site for site in wrong if used.get(site[1], 0) == last)
    later = sum(used.get(name, 0) > last for _, name in evidence.gradients)  # not other names of one
    who = f"{some(later, 'parameter')} that the forward uses later {'is' if later == 1 else 'are'}"
    return (f"the backward first goes wrong at {name} (stage {stage}): the {who} right",) if later else ()

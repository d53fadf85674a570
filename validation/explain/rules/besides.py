"""Faults besides the causes from calls and boundaries, and open questions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from pipeproof.core.cause import Cause
from pipeproof.core.tolerance import error
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.replay import replay
from pipeproof.explain.rules.attributed import of_gradients
from pipeproof.explain.rules.passages import ONE_FAULT, agree, complete
from pipeproof.explain.rules.places import stages_of
from pipeproof.explain.rules.shared import explain_shared, list_apart
from pipeproof.explain.solver import limit_of

Found = tuple[Sequence[Cause], Sequence[str]]
_BEHIND = "later effects were not analysed: there may be more faults, in gradients or in a later stage"


def besides(evidence: Evidence, causes: Sequence[Cause]) -> Found:
    """Further causes, and open questions, from final gradients, if they explain everything and name the same.

    Not for exchanges, which gradients may show as several faults, nor for kinds like those of ``causes``: consequences.
    A fault in a forward changes all gradients: if they do not explain it, it is played, and if all of them come out,
    there is no other fault.
    """
    forward = any(cause.in_forward for cause in causes)
    if evidence.operation != "train":
        return (), ()
    said = complete(evidence)
    same = [one for one in said if any(agree(cause, one) for cause in causes)]
    alike = [group for group in ONE_FAULT for cause in causes if cause.kind in group]
    others = [one for one in said if one not in same and not any(one.kind in group for group in alike)]
    others = [one for one in others if one.stage is not None or one.parameter is not None]
    unlike = {m.stage for m in evidence.verdict.mismatches if m.law == "replicas"}  # of these, it is no one sum
    others = [one for one in others if unlike.isdisjoint(stages_of(one, evidence))]
    if not forward:
        sure = same and all(cause.in_backward and cause.kind not in ONE_FAULT[0] for cause in causes)
        left = evidence.attribution is not None and evidence.attribution.unknown
        return others if sure else (), (_BEHIND,) if left else ()
    if same:
        return others, ()
    played = (one for one in causes if one.kind != "computation")  # no substitution plays it
    whole = any(agree(one, other) for one in played for other in evidence.once(replay))
    return (), () if whole else (_BEHIND,)


def besides_backwards(evidence: Evidence, causes: Sequence[Cause]) -> Found:
    """Faults besides backwards that ran never or twice, and open questions.

    Such backwards have no effect on sums over ranks, or on norms; in gradients they show as microbatches missing or
    repeated, in their own stages and in those before. Forwards affect everything: they leave nothing to say.
    """
    ran = [one.what for one in evidence.verdict.mismatches if one.law == "microbatches"]
    if evidence.playable is not None or {one.kind for one in causes} - _OF_BACKWARDS or {*ran} - {"backward"}:
        return (), ()
    unlike = {m.stage for m in evidence.verdict.mismatches if m.law == "replicas"}
    between = explain_shared(evidence) if unlike else []
    more = [one for said in between for one in _find_unexplained(said, causes, evidence)]
    # A missing reduction may leave the same microbatches on a rank as missing backwards do: then neither is certain.
    sure = more if _OF_BACKWARDS.isdisjoint(one.kind for one in more) else []
    found = None if _give_all(causes, evidence) else evidence.attribution
    sums = (
        [] if found is None else [one for one in of_gradients(evidence) if unlike.isdisjoint(stages_of(one, evidence))]
    )
    rest = [*sure, *(one for said in sums for one in _find_unexplained(said, causes, evidence))]
    left = list_apart(evidence) if unlike and (not between or len(sure) < len(more)) else ()
    unknown = () if found is None else found.unknown
    return rest, (*left, *unknown)


_OF_BACKWARDS = frozenset({"dropped", "doubled"})


def _give_all(causes: Sequence[Cause], evidence: Evidence) -> bool:
    """True if all gradients are right except for the microbatches that ``causes`` took from the sums.

    Attribution may not see that: a stage with only its copy of a tied parameter has no sums of its own.
    """
    found, expected = evidence.attribution, evidence.right
    dropped = all(one.kind == "dropped" and not one.cut for one in causes)
    if found is None or expected is None or not dropped or evidence.differs("presence"):
        return False
    for site in evidence.wrong("gradient"):
        observed, whole = evidence.gradients.get(site), expected.expected.gradients.get(site)
        copies = next((one for one in expected.update.tied if site in one.items()), {site[0]: site[1]})
        parts = [
            (stage, atom.term.activation, gradient.double().cpu())
            for stage, name in copies.items()
            for atom in found.stages[stage].atoms
            if atom.term.nominal and (gradient := atom.gradients.get(name)) is not None
        ]
        lost = [
            part
            for stage, m, part in parts
            if any(m in one.microbatches and stage <= max(stages_of(one, evidence)) for one in causes)
        ]
        if observed is None or whole is None or not lost:
            return False
        limit = limit_of(whole, torch.stack([part for *_, part in parts]).sum(dim=0))
        if error(observed.double().cpu() + torch.stack(lost).sum(dim=0), whole.double().cpu()) > limit:
            return False
    return True


def _find_unexplained(said: Cause, causes: Sequence[Cause], evidence: Evidence) -> Iterator[Cause]:
    """Yield the part of ``said`` beyond ``causes``: a fault flows back through all earlier stages."""
    every = range(evidence.microbatches)
    left = [*(said.microbatches or every)]
    if said.kind in ONE_FAULT[0] and {cause.kind for cause in causes} == _OF_BACKWARDS:
        return  # one ran in the place of another, which may have put others in the place of theirs
    for cause in causes:
        alike = cause.kind == said.kind or any({cause.kind, said.kind} <= group for group in ONE_FAULT)
        reached = max(stages_of(cause, evidence)) >= max(stages_of(said, evidence))
        left = [m for m in left if m not in (cause.microbatches or every)] if alike and reached else left
    if left:
        yield replace(said, microbatches=tuple(left)) if said.microbatches else said

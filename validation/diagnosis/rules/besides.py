"""What is wrong besides the causes that calls and boundaries show, and where nobody can say."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from pipeproof.core.cause import Cause
from pipeproof.core.tolerance import error
from pipeproof.diagnosis.combination import limit_of
from pipeproof.diagnosis.evidence import Evidence
from pipeproof.diagnosis.rules.attributed import of_gradients, played_through
from pipeproof.diagnosis.rules.passages import ONE_FAULT, agree, complete
from pipeproof.diagnosis.rules.replayed import besides_change
from pipeproof.diagnosis.rules.shared import apart, shared, stages_of

Found = tuple[Sequence[Cause], Sequence[str]]
_BEHIND = "later effects were not analysed: there may be more faults, in gradients or in a later stage"


def besides(evidence: Evidence, causes: Sequence[Cause]) -> Found:
    """Further causes, and what stays open. Final gradients say it, where they explain everything and name the same.

    Not of exchanges, of which they may show one as several, nor what is like one of ``causes``: it comes of that. What
    went wrong in a forward, all gradients follow from: where they do not explain that, it is played, and they are held
    against what comes of it.
    """
    forward = any("F" in (cause.action or "") for cause in causes)
    if evidence.playable is not None and (not forward or evidence.operation != "train"):
        return (), ()
    said = complete(evidence)
    same = [one for one in said if any(agree(cause, one) for cause in causes)]
    alike = [group for group in ONE_FAULT for cause in causes if cause.kind in group]
    others = [one for one in said if one not in same and not any(one.kind in group for group in alike)]
    others = [one for one in others if one.stage is not None or one.parameter is not None]
    unlike = {m.stage for m in evidence.verdict.mismatches if m.law == "replicas"}  # of these, it is no one sum
    others = [one for one in others if unlike.isdisjoint(stages_of(one, evidence))]
    if not forward:
        told = same and all("B" in (cause.action or "") and cause.kind not in ONE_FAULT[0] for cause in causes)
        left = evidence.playable is None and evidence.attribution is not None and evidence.attribution.unknown
        return (*(others if told else ()), *_of_ranks(evidence)), (_BEHIND,) if left else ()
    if same:
        return others, ()
    if evidence.playable is not None:  # one thing that gives all that was seen leaves nothing else
        whole = any(agree(one, other) for one in causes for other in played_through(evidence))
        return (), () if whole else (_BEHIND,)
    found = besides_change(evidence, causes[0]) if len(causes) == 1 else None
    if found is None or found.unknown:
        return (() if found is None else found.causes), (_BEHIND,)
    return found.causes, ()


def besides_backwards(evidence: Evidence, causes: Sequence[Cause]) -> Found:
    """What is wrong besides backwards that ran never or twice, and what stays open.

    Of sums over ranks these say nothing, and of norms; of gradients they say which microbatches are there never or
    twice, in their own stages and in those before. From forwards everything follows: nothing is said of these.
    """
    ran = [one.what for one in evidence.verdict.mismatches if one.law == "microbatches"]
    if evidence.playable is not None or {one.kind for one in causes} - _OF_BACKWARDS or {*ran} - {"backward"}:
        return (), ()
    unlike = {m.stage for m in evidence.verdict.mismatches if m.law == "replicas"}
    between = shared(evidence) if unlike else []
    more = [one for said in between for one in _unexplained(said, causes, evidence)]
    # Which microbatches a rank has may be what it did not reduce as well: beside those that did not run, nobody knows.
    sure = more if _OF_BACKWARDS.isdisjoint(one.kind for one in more) else []
    found = None if _give_all(causes, evidence) else evidence.attribution
    sums = (
        [] if found is None else [one for one in of_gradients(evidence) if unlike.isdisjoint(stages_of(one, evidence))]
    )
    rest = [*sure, *(one for said in sums for one in _unexplained(said, causes, evidence))]
    left = apart(evidence) if unlike and (not between or len(sure) < len(more)) else ()
    unknown = () if found is None else found.unknown
    told = _of_ranks(evidence)
    rest = [one for one in rest if one.kind not in {other.kind for other in told}]
    return (*rest, *told), (*left, *unknown)


def _of_ranks(evidence: Evidence) -> list[Cause]:
    """What numbers of ranks tell of a reduction or of a norm, also beside a backward that went wrong: no other link
    does such a thing.

    What is not reduced on a rank with another fault is not known as its own: which ranks it is stays open.
    """
    found = () if evidence.members is None else evidence.members.found
    unmet = [replace(one.cause, rank=None) for one in found if one.law == "replicas" and evidence.differs("replicas")]
    norms = [one.cause for one in found if one.law == "grad-norm" and evidence.differs("grad-norm")]
    return [*unmet, *norms[:1]]


_OF_BACKWARDS = frozenset({"dropped", "doubled"})


def _give_all(causes: Sequence[Cause], evidence: Evidence) -> bool:
    """Whether all gradients are what they should be but for the microbatches that ``causes`` took from the sums.

    Attribution may not see that: a stage that has nothing but its copy of a tied parameter has no sums of its own.
    """
    found, due = evidence.attribution, evidence.due
    dropped = all(one.kind == "dropped" and not one.cut for one in causes)
    if found is None or due is None or not dropped or evidence.differs("presence"):
        return False
    for site in evidence.wrong("gradient"):
        seen, whole = evidence.gradients.get(site), due.expected.gradients.get(site)
        copies = next((one for one in due.update.tied if site in one.items()), {site[0]: site[1]})
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
        if seen is None or whole is None or not lost:
            return False
        limit = limit_of(whole, torch.stack([part for *_, part in parts]).sum(dim=0))
        if error(seen.double().cpu() + torch.stack(lost).sum(dim=0), whole.double().cpu()) > limit:
            return False
    return True


def _unexplained(said: Cause, causes: Sequence[Cause], evidence: Evidence) -> Iterator[Cause]:
    """What gradients say in ``said`` but for what follows from ``causes``: one flows back through all stages before."""
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

"""What is wrong besides the causes that calls and boundaries show, and where nobody can say."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from pipeproof.core.cause import Cause
from pipeproof.core.tolerance import error
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.replay import replayed
from pipeproof.explain.rules.attributed import of_gradients
from pipeproof.explain.rules.passages import ONE_FAULT, agree, complete
from pipeproof.explain.rules.places import stages_of
from pipeproof.explain.rules.shared import apart, shared
from pipeproof.explain.solver import limit_of

Found = tuple[Sequence[Cause], Sequence[str]]
_BEHIND = "later effects were not analysed: there may be more faults, in gradients or in a later stage"


def besides(evidence: Evidence, causes: Sequence[Cause]) -> Found:
    """Further causes, and what stays open. Final gradients say it, where they explain everything and name the same.

    Not of exchanges, of which they may show one as several, nor what is like one of ``causes``: it comes of that. From
    what went wrong in a forward all gradients follow: where they do not explain that, it is played, and where all come
    out there is nothing else.
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
        told = same and all(cause.in_backward and cause.kind not in ONE_FAULT[0] for cause in causes)
        left = evidence.attribution is not None and evidence.attribution.unknown
        return others if told else (), (_BEHIND,) if left else ()
    if same:
        return others, ()
    played = (one for one in causes if one.kind != "computation")  # that, nobody knows how to play
    whole = any(agree(one, other) for one in played for other in evidence.once(replayed))
    return (), () if whole else (_BEHIND,)


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
    return rest, (*left, *unknown)


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

"""Copies of which each has a part of the gradient: along which axis they are apart tells which sum is missing."""

from collections.abc import Mapping, Sequence

import torch

from pipeproof.core.cause import Cause, listed
from pipeproof.core.tolerance import error
from pipeproof.diagnosis.combination import told_within
from pipeproof.diagnosis.evidence import Evidence
from pipeproof.diagnosis.limits import ALIKE
from pipeproof.diagnosis.record_sums import RecordSums
from pipeproof.reference.step import Gradient


def unsummed_copies(evidence: Evidence) -> list[Cause]:
    """Copies of which each has a part of the gradient, and all the whole."""
    found: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
    sums = _of_members(evidence) if evidence.sums is None else evidence.sums
    for (name, stages), by_rank in sums.copies.items():
        due = evidence.expected.gradients.get((stages[0], name))
        given = {rank: one for rank, one in by_rank.items() if one is not None}
        if due is None or len(given) < len(by_rank) or any(one.shape != due.shape for one in given.values()):
            continue
        groups = _alike(given)
        kinds = _unsummed(groups, dict(sums.places[name]))
        if told := _whole(groups, due, replicas=len(given) // len({*stages}) if len(kinds) > 1 else 1):
            for kind in kinds:
                found.setdefault((kind, tuple(sorted({*stages})), told), []).append(name)
    return [_apart(kind, stages, told, names) for (kind, stages, told), names in found.items()]


def _of_members(evidence: Evidence) -> RecordSums:
    """What ranks handed back of parameters that stages share under one name, but for those that any has in parts."""
    copies = dict[tuple[str, tuple[int, ...]], dict[int, Gradient]]()
    places = dict[str, list[tuple[int, int]]]()
    tied = [] if evidence.due is None or evidence.members is None else evidence.due.update.tied
    for names in (one for one in tied if len({*one.values()}) == 1):
        stages = [one for one in evidence.members.stages if one.index in names] if evidence.members else []
        held = [
            (rank, one.index, None if k in part.shards else part.gradients[k])
            for one in stages
            for k, name in one.names.items()
            for rank, part in one.part.members
            if name in names.values() and k not in part.lacks
        ]
        if len({rank for rank, *_ in held}) == len(held):
            (name,) = {*names.values()}
            copies[name, tuple(sorted(names))] = {rank: gradient for rank, _, gradient in held}
            places[name] = [(rank, stage) for rank, stage, _ in held]
    return RecordSums(copies, places=places)


Groups = Sequence[tuple[Sequence[int], torch.Tensor]]  # ranks that have the same, and what they have


def _alike(given: Mapping[int, torch.Tensor]) -> Groups:
    """The ranks of ``given``, those together that have the same."""
    groups: list[tuple[list[int], torch.Tensor]] = []
    for rank, one in sorted(given.items()):
        ranks = next((ranks for ranks, known in groups if torch.equal(known, one)), None)
        if ranks is None:
            groups.append(([rank], one))
        else:
            ranks.append(rank)
    return groups


def _unsummed(groups: Groups, stage_of: Mapping[int, int]) -> Sequence[str]:
    """Along what such groups of ranks are apart: each stage has its own, or ranks of one stage have, or both."""
    stages = {*stage_of.values()}
    held = [{stage_of[rank] for rank in ranks} for ranks, _ in groups]
    if sum(map(len, held)) == len(stages) > 1:
        return ("tied-not-summed",)
    if all(one == stages for one in held):
        return ("not-reduced",)
    return ("tied-not-summed", "not-reduced")


def _whole(groups: Groups, due: torch.Tensor, *, replicas: int) -> str:
    """That what the groups have is ``due`` together, in words; empty if it is not, or if any has that already.

    ``replicas``: how many of each stage have their own, where stages have, too.
    """
    parts = [one.double().cpu() for _, one in groups]
    whole = torch.stack(parts).sum(dim=0)
    made = [("sum", whole), ("mean", whole / len(parts))]
    made += [("sum over stages, averaged over replicas,", whole / replicas)]
    limit, wanted = max(ALIKE, told_within(due.dtype)), due.double().cpu()
    if len(parts) < 2 or not all(one.any() and error(one, wanted) > limit for one in parts):
        return ""
    who = " and ".join(f"ranks {listed(ranks)}" for ranks, _ in groups)
    told = f"{who} each have a gradient of their own"
    if len(groups) == sum(len(ranks) for ranks, _ in groups):
        told = f"ranks {listed(rank for ranks, _ in groups for rank in ranks)} keep gradients of their own"
    for what, one in made:
        if error(one, wanted) < limit:
            return f"{told}, and their {what} is expected"
    return ""


def _apart(kind: str, stages: tuple[int, ...], told: str, names: Sequence[str]) -> Cause:
    parameter, detail = (names[0], told) if len(names) == 1 else (None, f"{', '.join(names)}: {told}")
    if kind == "tied-not-summed":
        return Cause(kind, parameter=parameter, detail=detail)
    if len(stages) == 1:
        return Cause(kind, stage=stages[0], parameter=parameter, detail=detail)
    return Cause(kind, stages=stages, parameter=parameter, detail=detail)

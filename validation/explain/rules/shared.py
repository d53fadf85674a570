"""What is wrong between ranks that have a stage in common, or a copy of one parameter.

What each rank has of a parameter is held against what the microbatches give there. How often each microbatch is in it,
rank by rank, tells the fault: a reduction that was left out, a fault of one rank alone, or parts that were exchanged.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

import torch

from pipeproof.core.cause import Cause, listed
from pipeproof.core.replicas import Replicas
from pipeproof.core.tolerance import error
from pipeproof.explain.copies import Copy, Makeup
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.limits import ALIKE, CLOSE
from pipeproof.explain.members import Members
from pipeproof.explain.microbatch_weights import faults_in_counts
from pipeproof.explain.rules.inside import first_of_backward, other_forward
from pipeproof.explain.rules.places import at
from pipeproof.pipeline.sizes import first_few

Found = dict[Cause, list[str]]  # the parameters that show a cause


def shared(evidence: Evidence) -> list[Cause]:
    """The causes of what is wrong between ranks."""
    members = evidence.members
    if members is None or not _is_between_ranks(evidence, members):
        return []
    made = evidence.makeups
    wrong = {name: one for name, one in made.items() if not one.right}
    found = _not_reduced(wrong, evidence, members) or _of_ranks(wrong, evidence) or _misplaced(wrong, evidence)
    causes = [_with_names(cause, names, made) for cause, names in found.items()]
    return causes or other_forward(evidence)


def apart(evidence: Evidence) -> Sequence[str]:
    """That ranks do not agree, and nothing says why, or that their parts make up no whole; empty where they do."""
    broken = next((one for one in evidence.verdict.mismatches if one.law == "shards"), None)
    if broken is not None:
        cure = "hand back every element once, each with its place in the whole"
        return (f"shards of {broken.parameter}: {broken.seen}: {cure}",)
    if not evidence.differs("replicas") and not (evidence.differs("gradient") and evidence.shards_apart):
        return ()
    told = "gradients differ between ranks that share parameters, and no known fault explains how"
    return (*first_of_backward(evidence), told)


def _is_between_ranks(evidence: Evidence, members: Members) -> bool:
    """Whether copies differ, or shards and copies in other stages may: what a loss follows is no matter of these."""
    if evidence.due is None or evidence.differs("replicas"):
        return evidence.due is not None
    known = {name for _, name in evidence.due.update.shared}  # by each stage's share
    tied = any(len({one.stage for one in every}) > 1 for name, every in members.held.items() if name not in known)
    behind = any(map(evidence.differs, ("loss", "presence")))
    return evidence.differs("gradient") and (members.in_shards or tied) and not behind


def _with_names(cause: Cause, names: Sequence[str], made: Mapping[str, Makeup]) -> Cause:
    """``cause`` of the parameters ``names``: of none by name where it is of all of its stage."""
    sizes = {name: max(float(copy.seen.norm()) for copy in one.copies) for name, one in made.items()}
    own = [name for name, one in made.items() if any(copy.stage == cause.stage for copy in one.copies)]
    faint = CLOSE * max(sizes.values())
    if own and all(name in names or sizes[name] < faint for name in own):
        return replace(cause, parameters=tuple(names))
    others = f"; also: {first_few(names[1:])}" if len(names) > 1 else ""
    return replace(cause, parameter=names[0], parameters=tuple(names), detail=cause.detail + others)


def _not_reduced(wrong: Mapping[str, Makeup], evidence: Evidence, members: Members) -> Found:
    """Copies that have the microbatches of their own ranks, or parts of a sum, and not those of others."""
    found, parts = Found(), set[str]()
    for name, made in wrong.items():
        odd = {(copy.rank, copy.stage): copy for copy in made.copies if not copy.right}
        told = _lacking(made, members.replicas)
        kinds: Sequence[str] = ("not-reduced",)
        if not told:
            kinds, told = _unsummed(made.copies, members.replicas)
            parts.add(name)
        for kind in kinds:
            cause = Cause(kind, stage=None if kind == "tied-not-summed" else min(odd)[1], detail=told)
            found.setdefault(cause if cause.stage is None else at(cause, odd, evidence), []).append(name)
    return _first_of_flow(found, parts, evidence)


def _lacking(made: Makeup, replicas: Replicas) -> str:
    """Which rank lacks which microbatches of others, in words; empty where more than that is between them."""
    odd = [(copy.rank, counts) for copy, counts in zip(made.copies, made.counts, strict=True) if not copy.right]
    if any(counts is None or len(counts) < replicas.microbatches for _, counts in odd):
        return ""
    there = {rank: {m for m, c in enumerate(counts or ()) if c} for rank, counts in odd}
    every = {*range(replicas.microbatches)} if len(odd) < len(made.copies) else set().union(*there.values())
    distinct = {frozenset(some) for some in there.values()}
    each = sum(map(len, distinct)) == len(every)
    own = there if each else {rank: {*replicas.share(rank)} & every for rank in there}
    lacking: dict[tuple[int, ...], set[int]] = {}
    for rank, counts in odd:
        lacks = every - there[rank]
        more = {m for m, c in enumerate(counts or ()) if c not in (0.0, 1.0)}
        if not own[rank] or own[rank] & lacks or not own[rank] >= more or (replicas.count == 1 and not each):
            return ""
        lacking.setdefault(tuple(sorted(lacks)), set()).add(rank)
    return "; ".join(
        f"{_ranks(ranks)} lack{'s' * (len(ranks) == 1)} microbatch{'es' * (len(lacks) > 1)} {first_few(lacks)}"
        for lacks, ranks in lacking.items()
        if lacks
    )


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(sorted(ranks))}"


def _unsummed(copies: Sequence[Copy], replicas: Replicas) -> tuple[tuple[str, ...], str]:
    """The kinds of a sum that was left out, and what adds up to what is due, in words.

    Along which axis copies differ tells the kind: each stage has its own, or ranks of one stage have.
    """
    regions = {copy.where: [one for one in copies if one.where == copy.where] for copy in copies}
    each = [_groups(region) for region in regions.values()]
    stages = {copy.stage for copy in copies}
    divisors = dict.fromkeys((1, len(each[0]), len(regions[copies[0].where]) // len(stages), replicas.count))
    divisor = next((one for one in divisors if all(_add_up(groups, one) for groups in each)), None)
    if divisor is None:
        return (), ""
    groups = [group for region in each for group in region]
    ranks = [sorted({copy.rank for copy in group}) for group in groups]
    what = {1: "the sum", len(each[0]): "the mean"}.get(divisor, f"1/{divisor} of the sum")
    single = all(len(some) == 1 for some in ranks)
    told = _ranks({copy.rank for copy in copies}) if single else " and ".join(map(_ranks, sorted(ranks)))
    told = f"{told} each keep their own part: {what} of these is expected"
    held = [{copy.stage for copy in group} for group in groups]
    if len(stages) > 1 and sum(map(len, held)) == len(stages):
        return ("tied-not-summed",), told
    return (("not-reduced",) if all(one == stages for one in held) else ("tied-not-summed", "not-reduced")), told


def _groups(copies: Sequence[Copy]) -> list[list[Copy]]:
    """``copies``, those together that are the same."""
    groups: list[list[Copy]] = []
    for copy in copies:
        same = next((group for group in groups if torch.equal(group[0].seen, copy.seen)), None)
        if same is None:
            groups.append([copy])
        else:
            same.append(copy)
    return groups


def _add_up(groups: Sequence[Sequence[Copy]], divisor: int) -> bool:
    """Whether what the groups have adds up to what is due, and none of them has that already, or nothing."""
    parts, due = [group[0].seen for group in groups], groups[0][0].due
    room = max(groups[0][0].loose * float(due.norm()), CLOSE * max(float(part.norm()) for part in parts))
    far = [float((part - due).norm()) for part in (*parts, torch.stack(parts).sum(dim=0) / max(1, divisor))]
    return len(parts) > 1 and all(part.any() for part in parts) and far.pop() <= room < min(far)


def _first_of_flow(found: Found, parts: set[str], evidence: Evidence) -> Found:
    """``found``; where other gradients of a stage are wrong, of ``parts`` of sums what the backward comes to first.

    What is wrong of parameters used before may follow; where others are used after these, they may follow themselves.
    """
    used, told, kept = evidence.used, {name for names in found.values() for name in names}, Found()
    wrong = [site for site in evidence.wrong("gradient", "presence", "replicas") if site[1] not in told]
    for cause, names in found.items():
        open_ = [name for stage, name in wrong if stage == cause.stage]
        if not parts.issuperset(names) or not open_:
            kept[_or_of_the_next(cause, names, evidence) if parts.issuperset(names) else cause] = names
            continue
        last = max(used.get(name, 0) for name in names)
        if all(used.get(name, last) < last for name in open_):
            detail = f"{cause.detail}; what is wrong of parameters used before may follow"
            kept[replace(cause, detail=detail)] = [name for name in names if used.get(name, 0) == last]
    return kept


def _or_of_the_next(cause: Cause, names: Collection[str], evidence: Evidence) -> Cause:
    """``cause``, or parts that the next stage handed back: where all of a stage is wrong, gradients do not tell."""
    own = {name for stage, name in evidence.expected.gradients if stage == cause.stage}
    reached = max((stage for stage, _ in evidence.wrong("gradient", "presence", "replicas")), default=0)
    if cause.stage != reached or reached + 1 == evidence.stages or not own <= {*names}:
        return cause
    detail = f"its input gradient is a part on each rank, and stage {reached} is given that"
    return replace(cause, instead=(replace(cause, rank=None, ranks=(), stage=reached + 1, detail=detail),))


def _of_ranks(wrong: Mapping[str, Makeup], evidence: Evidence) -> Found:
    """The faults of single ranks, where copies or shards are not made alike and it is known what each is made of."""
    known = all(count is not None for made in wrong.values() for count in made.counts)
    alike = all(made.alike for made in wrong.values())
    sites = evidence.wrong("gradient", "presence", "replicas")
    if not known or alike or evidence.alike or evidence.left_out or any(name not in wrong for _, name in sites):
        return {}
    assert evidence.due is not None, "asked for only where it is known what is due"
    places: dict[tuple[str, Cause], set[tuple[int, int]]] = {}
    for name, made in wrong.items():
        for copy, counts in zip(made.copies, made.counts, strict=True):
            for fault in faults_in_counts(evidence.due.update, dict(enumerate(counts or ())), ALIKE):
                of, factor = fault.microbatches, fault.factor
                cause = Cause(fault.kind, stage=copy.stage, microbatches=of, factor=factor, detail=fault.detail)
                places.setdefault((name, cause), set()).add((copy.rank, copy.stage))
    found = Found()
    for (name, cause), some in places.items():
        found.setdefault(at(cause, some, evidence), []).append(name)
    return found


def _misplaced(wrong: Mapping[str, Makeup], evidence: Evidence) -> Found:
    """Shards that are what belongs in the place of another."""
    found = Found()
    for name, made in wrong.items():
        for one, other in permutations(made.copies, 2):
            if one.where != other.where and not one.right and _is(one, other):
                cause = Cause("misplaced", stage=one.stage, detail=f"it is the part that rank {other.rank} should have")
                found.setdefault(at(cause, {(one.rank, one.stage)}, evidence), []).append(name)
    return found


def _is(one: Copy, other: Copy) -> bool:
    """Whether ``one`` is what is due in the place of ``other``."""
    return one.seen.shape == other.due.shape and error(one.seen, other.due) < ALIKE

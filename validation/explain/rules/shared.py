"""Faults between ranks that share a stage, or copies by parameter.

Each rank's gradient is compared with the microbatches' contributions. Counts of each microbatch, rank by rank, identify
the fault: a missing reduction, a fault of one rank alone, or exchanged parts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations

import torch

from pipeproof.core.cause import Cause
from pipeproof.core.replicas import Replicas
from pipeproof.core.tolerance import error
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.limits import ALIKE, CLOSE
from pipeproof.explain.members import Copy, Members, are_alike
from pipeproof.explain.microbatch_weights import faults_in_counts
from pipeproof.explain.rules.attributed import first_of_backward, other_forward
from pipeproof.explain.rules.places import at, name_ranks
from pipeproof.pipeline.sizes import first_few

Found = dict[Cause, list[str]]  # the parameters that show a cause


def explain_shared(evidence: Evidence) -> list[Cause]:
    """Find causes between ranks: copies differ, or shards and copies in other stages may, and losses are unaffected."""
    members = evidence.members
    if members is None or evidence.right is None:
        return []
    if not evidence.differs("replicas"):
        known = {name for _, name in evidence.right.update.shared}  # by each stage's share
        tied = any(len({one.stage for one in every}) > 1 for name, every in members.held.items() if name not in known)
        apart = evidence.differs("gradient") and (members.in_shards or tied)
        if not apart or any(map(evidence.differs, ("loss", "presence"))):
            return []
    made = evidence.makeups
    wrong = {name: copies for name, copies in made.items() if not all(one.right for one in copies)}
    found = _not_reduced(wrong, evidence, members) or _of_ranks(wrong, evidence) or _find_misplaced(wrong, evidence)
    sizes = {name: max(float(one.observed.norm()) for one in copies) for name, copies in made.items()}
    causes = []
    for cause, names in found.items():
        own = [name for name, copies in made.items() if any(one.stage == cause.stage for one in copies)]
        faint = CLOSE * max(sizes.values())
        whole = own and all(name in names or sizes[name] < faint for name in own)  # of a whole stage, none by name
        others = f"; also: {first_few(names[1:])}" if len(names) > 1 and not whole else ""
        name = None if whole else names[0]
        causes.append(replace(cause, parameter=name, parameters=tuple(names), detail=cause.detail + others))
    return causes or other_forward(evidence)


def list_apart(evidence: Evidence) -> Sequence[str]:
    """Describe ranks that disagree without an explanation, or parts without a whole; empty if they agree."""
    broken = next((one for one in evidence.verdict.mismatches if one.law == "shards"), None)
    if broken is not None:
        cure = "hand back every element once, each with its place in the whole"
        return (f"shards of {broken.parameter}: {broken.observed_text}: {cure}",)
    if not evidence.differs("replicas") and not (evidence.differs("gradient") and evidence.shards_apart):
        return ()
    text = "gradients differ between ranks that share parameters, and no known fault explains how"
    return (*first_of_backward(evidence), text)


def _not_reduced(wrong: Mapping[str, Sequence[Copy]], evidence: Evidence, members: Members) -> Found:
    """Find copies with their rank's microbatches, or partial sums, without other ranks'."""
    found, parts = Found(), set[str]()
    for name, copies in wrong.items():
        odd = {(copy.rank, copy.stage) for copy in copies if not copy.right}
        detail = _lacking(copies, members.replicas)
        kinds: Sequence[str] = ("not-reduced",)
        if not detail:
            kinds, detail = _find_unsummed(copies, members.replicas)
            parts.add(name)
        for kind in kinds:
            cause = Cause(kind, stage=None if kind == "tied-not-summed" else min(odd)[1], detail=detail)
            found.setdefault(cause if cause.stage is None else at(cause, odd, evidence), []).append(name)
    return _first_of_flow(found, parts, evidence)


def _lacking(copies: Sequence[Copy], replicas: Replicas) -> str:
    """Say which rank lacks which microbatches; empty if copies differ in more."""
    odd = [(copy.rank, copy.counts) for copy in copies if not copy.right]
    if any(counts is None or len(counts) < replicas.microbatches for _, counts in odd):
        return ""
    there = {rank: {m for m, c in enumerate(counts or ()) if c} for rank, counts in odd}
    every = {*range(replicas.microbatches)} if len(odd) < len(copies) else set().union(*there.values())
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
        f"{name_ranks(ranks)} lack{'s' * (len(ranks) == 1)} microbatch{'es' * (len(lacks) > 1)} {first_few(lacks)}"
        for lacks, ranks in lacking.items()
        if lacks
    )


def _find_unsummed(copies: Sequence[Copy], replicas: Replicas) -> tuple[tuple[str, ...], str]:
    """Kinds for a missing sum, and the parts that add up to the expected value, in words.

    The axis along which copies differ determines the kind: each stage has its own, or ranks of one stage have.
    """
    each: list[list[list[Copy]]] = []  # by region, groups of equal copies
    for where in dict.fromkeys(copy.where for copy in copies):
        each.append([])
        for copy in (copy for copy in copies if copy.where == where):
            same = (group for group in each[-1] if torch.equal(group[0].observed, copy.observed))
            if (group := next(same, None)) is None:
                each[-1].append(group := [])
            group.append(copy)
    stages = {copy.stage for copy in copies}
    divisors = dict.fromkeys((1, len(each[0]), sum(map(len, each[0])) // len(stages), replicas.count))

    def add_up(groups: Sequence[Sequence[Copy]], divisor: int) -> bool:
        """True if the groups sum to the expected value, and each group alone differs from it and from zero."""
        parts, expected = [group[0].observed for group in groups], groups[0][0].expected
        room = max(groups[0][0].loose * float(expected.norm()), CLOSE * max(float(part.norm()) for part in parts))
        far = [float((part - expected).norm()) for part in (*parts, torch.stack(parts).sum(dim=0) / max(1, divisor))]
        return len(parts) > 1 and all(part.any() for part in parts) and far.pop() <= room < min(far)

    divisor = next((one for one in divisors if all(add_up(groups, one) for groups in each)), None)
    if divisor is None:
        return (), ""
    groups = [group for region in each for group in region]
    ranks = [sorted({copy.rank for copy in group}) for group in groups]
    what = {1: "the sum", len(each[0]): "the mean"}.get(divisor, f"1/{divisor} of the sum")
    single = all(len(some) == 1 for some in ranks)
    text = name_ranks({copy.rank for copy in copies}) if single else " and ".join(map(name_ranks, sorted(ranks)))
    text = f"{text} each keep their own part: {what} of these is expected"
    held = [{copy.stage for copy in group} for group in groups]
    if len(stages) > 1 and sum(map(len, held)) == len(stages):
        return ("tied-not-summed",), text
    return (("not-reduced",) if all(one == stages for one in held) else ("tied-not-summed", "not-reduced")), text


def _first_of_flow(found: Found, parts: set[str], evidence: Evidence) -> Found:
    """Restrict ``found`` to the first partial sum in backward order, if other gradients on the stage differ.

    Errors in parameters used before may follow; if others are used after these, they may follow themselves. With a
    whole stage wrong, it may have been given parts by the next stage.
    """
    used, named, kept = evidence.used, {name for names in found.values() for name in names}, Found()
    sites = evidence.wrong("gradient", "presence", "replicas")
    reached = max((stage for stage, _ in sites), default=0)
    for cause, names in found.items():
        open_ = [name for stage, name in sites if stage == cause.stage and name not in named]
        if not parts.issuperset(names):
            kept[cause] = names
        elif not open_:
            own = {name for stage, name in evidence.expected.gradients if stage == cause.stage}
            if cause.stage == reached and reached + 1 < evidence.stages and own <= {*names}:
                detail = f"its input gradient is a part on each rank, and stage {reached} is given that"
                other = replace(cause, rank=None, ranks=(), stage=reached + 1, detail=detail)
                cause = replace(cause, instead=(other,))
            kept[cause] = names
        else:
            last = max(used.get(name, 0) for name in names)
            if all(used.get(name, last) < last for name in open_):
                detail = f"{cause.detail}; what is wrong of parameters used before may follow"
                kept[replace(cause, detail=detail)] = [name for name in names if used.get(name, 0) == last]
    return kept


def _of_ranks(wrong: Mapping[str, Sequence[Copy]], evidence: Evidence) -> Found:
    """Faults of single ranks, if copies or shards differ and all their counts are known."""
    known = all(copy.counts is not None for copies in wrong.values() for copy in copies)
    alike = all(map(are_alike, wrong.values()))
    sites = evidence.wrong("gradient", "presence", "replicas")
    if not known or alike or evidence.alike or evidence.left_out or any(name not in wrong for _, name in sites):
        return {}
    assert evidence.right is not None, "asked for only where it is known what is expected"
    places: dict[tuple[str, Cause], set[tuple[int, int]]] = {}
    for name, copies in wrong.items():
        for copy in copies:
            for fault in faults_in_counts(evidence.right.update, dict(enumerate(copy.counts or ())), ALIKE):
                places.setdefault((name, replace(fault, stage=copy.stage)), set()).add((copy.rank, copy.stage))
    found = Found()
    for (name, cause), some in places.items():
        found.setdefault(at(cause, some, evidence), []).append(name)
    return found


def _find_misplaced(wrong: Mapping[str, Sequence[Copy]], evidence: Evidence) -> Found:
    """Shards equal to the expected shard of another rank."""
    found = Found()
    for name, copies in wrong.items():
        for one, other in permutations(copies, 2):
            shape = one.observed.shape == other.expected.shape and one.where != other.where
            if shape and not one.right and error(one.observed, other.expected) < ALIKE:
                cause = Cause("misplaced", stage=one.stage, detail=f"it is the part that rank {other.rank} should have")
                found.setdefault(at(cause, {(one.rank, one.stage)}, evidence), []).append(name)
    return found

"""What is wrong between ranks that have a stage in common, or a copy of one parameter."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from pipeproof.core.cause import Cause, listed
from pipeproof.core.mismatch import Size
from pipeproof.core.tolerance import error, scalar_error
from pipeproof.diagnosis.attribution import attribute
from pipeproof.diagnosis.copies import adding_up, apart_by_rank, of_shards, unreduced
from pipeproof.diagnosis.evidence import Evidence
from pipeproof.diagnosis.limits import ALIKE
from pipeproof.diagnosis.members import Members, Replicas
from pipeproof.diagnosis.naming import of_a_part
from pipeproof.diagnosis.record_sums import RecordSums
from pipeproof.diagnosis.rules.inside import first_of_backward, other_forward, own_parts
from pipeproof.diagnosis.rules.repeated import ordered
from pipeproof.diagnosis.rules.unsummed import unsummed_copies
from pipeproof.observers.recording import GIVEN, HANDED_ON, KEPT, MADE, RECEIVED, Site
from pipeproof.pipeline.action import Kind
from pipeproof.reference.step import Gradient


def shared(evidence: Evidence) -> list[Cause]:
    """The likeliest of what is wrong between ranks; of a record, each that its copies tell."""
    if evidence.members is None:
        return unsummed_copies(evidence) or _of_single_copies(evidence)
    told = [
        _placed(one.cause, evidence)
        for one in evidence.members.found
        if one.law in ("replicas", "gradient") and evidence.differs(one.law) and not _of_losses(one.cause, evidence)
    ]
    unmet = [cause for cause in told if cause.kind == told[0].kind == "not-reduced"]  # each stage by itself
    members = evidence.members
    if unmet or told or not evidence.differs("replicas"):
        return unmet or told[:1] or _of_shards(evidence, members)
    unmet = [] if evidence.due is None else unreduced(members, evidence.expected, evidence.due.update)
    unmet += [one for one in unsummed_copies(evidence) if unmet and one.kind == "tied-not-summed"]
    wrong = evidence.wrong("gradient", "presence", "replicas")
    unmet = unmet or by_sender(adding_up(members, evidence.expected, wrong, evidence.used), members)
    each = {} if unmet else _each_by_itself(evidence, _of_members(evidence, members))
    unmet = unmet or [_on(ranks, cause, evidence) for cause, ranks in each.items()] or _of_shards(evidence, members)
    return unmet or own_parts(evidence) or other_forward(evidence)


def by_sender(causes: list[Cause], members: Members) -> list[Cause]:
    """``causes`` of first stages whose ranks have parts of all gradients, or that these were made from parts that came.

    What ranks put out alike has one gradient: where another came to each, it was not reduced when it was sent. Of one
    stage that nobody watched, either may be so.
    """
    stages = [one.stage for one in causes if one.parameter is None]
    last = len(stages) - 1
    if not causes or stages != list(range(len(causes))) or last + 1 == len(members.stages):
        return causes
    receiver, sender = members.stages[last : last + 2]
    whole = members.alike(receiver, lambda call: call.outputs)
    came = members.alike(receiver, lambda call: call.output_gradients.values())
    ranks = listed(rank for rank, _ in sender.part.members)
    told = f"what it hands back to stage {last} is not reduced over ranks {ranks}; gradients made from it add up"
    sent = Cause("not-reduced", stage=last + 1, detail=f"{told} to what is expected")
    if whole is False or came:
        return causes
    if whole and came is False:
        return [sent]
    return [replace(causes[0], instead=(sent,))] if not last else causes


def _of_shards(evidence: Evidence, members: Members) -> list[Cause]:
    """What is wrong with the shards of some ranks, which together give no one sum of microbatches."""
    wrong = evidence.differs("gradient") or evidence.differs("replicas")
    if not wrong or evidence.differs("presence") or evidence.differs("loss") or evidence.due is None:
        return []  # what a loss follows is no matter of sums
    return of_shards(members, evidence.expected, evidence.due.update)


def of_replicas(causes: Sequence[Cause], evidence: Evidence) -> Sequence[Cause]:
    """``causes``; where one replica's microbatches are missing and another's are there as often more, that is said."""
    replicas = None if evidence.members is None else evidence.members.replicas
    found = {cause.kind: cause for cause in causes}
    if replicas is None or replicas.count < 2 or found.keys() != {"dropped", "doubled"} or len(causes) > 2:
        return causes
    lost, twice = (_whole_shares(found[kind].microbatches, replicas) for kind in ("dropped", "doubled"))
    if not lost or not twice:
        return causes
    theirs = "their" if len(twice) > 1 else "its"
    told = (
        f"those of {_replicas(lost)}, and those of {_replicas(twice)} instead: {theirs} data, or {theirs} gradients, "
        "were taken for them"
    )
    return [
        replace(one, detail="; ".join(filter(None, (one.detail, told * (one.kind == "dropped"))))) for one in causes
    ]


def _whole_shares(microbatches: Sequence[int], replicas: Replicas) -> list[int]:
    """The replicas whose microbatches these are; none if it is only some of any replica's."""
    shares = {number: replicas.share(rank) for rank, number in enumerate(replicas.of)}
    numbers = [number for number, share in sorted(shares.items()) if {*share} & {*microbatches}]
    every = [m for number in numbers for m in shares[number]]
    return numbers if sorted(every) == sorted(microbatches) else []


def _replicas(numbers: Sequence[int]) -> str:
    return f"replica{'s' * (len(numbers) > 1)} {listed(numbers)}"


Turn = tuple[tuple[int, ...], Mapping[Site, Gradient]]  # a rank of every stage, and what these have


def _each_by_itself(evidence: Evidence, turns: Iterable[Turn]) -> Mapping[Cause, set[int]]:
    """What each rank's own gradients are made of, where ranks with one stage differ; none if any of them tells nothing.

    Every cause comes with its ranks.

    Each of ``turns`` takes another rank of every stage.
    """
    if evidence.due is None:
        return {}
    update, found = evidence.due.update, dict[Cause, set[int]]()
    for ranks, own in turns:
        made = attribute(replace(update, observed=own, placement=ranks))
        if made.unknown:
            return {}
        for cause in made.causes:
            instead = tuple(replace(one, rank=None) for one in cause.instead)
            at = (ranks[stage] for stage in stages_of(cause, evidence))
            found.setdefault(replace(cause, rank=None, instead=instead), set()).update(at)
    return found


def _of_members(evidence: Evidence, members: Members) -> Iterator[Turn]:
    """What each rank handed back of its stages; nothing of shards."""
    if evidence.due is None or any(part.shards for stage in members.stages for _, part in stage.part.members):
        return
    update = evidence.due.update
    for turn in range(max(len(stage.part.members) for stage in members.stages)):
        taken = [stage.part.members[min(turn, len(stage.part.members) - 1)] for stage in members.stages]
        own = {
            (stage.index, name): part.gradients[k]
            for stage, (_, part) in zip(members.stages, taken, strict=True)
            for k, name in stage.names.items()
        }
        yield tuple(rank for rank, _ in taken), own | {site: update.observed[site] for site in update.shared}


def _of_single_copies(evidence: Evidence) -> list[Cause]:
    """Copies that are, on some ranks, what is due but for a factor, or for whole parameters.

    Where microbatches are not alike in some copies alone, how ranks reduced them may be why: that is not told here.
    """
    sums, sites = evidence.sums, evidence.gradients
    known = sums is not None and not sums.left_out and not sums.alike and all(name in sums.places for _, name in sites)
    if sums is None or not known or not evidence.differs("replicas"):
        return []
    each = _each_by_itself(evidence, _of_held(evidence, sums))
    if any(cause.microbatches and ranks < _holders(cause, evidence) for cause, ranks in each.items()):
        return []
    return [_on(ranks, cause, evidence) for cause, ranks in each.items()]


def _of_held(evidence: Evidence, sums: RecordSums) -> Iterator[Turn]:
    """What each rank has of its stages, as a record's check kept it; of what it does not hold, what is due."""
    holders = [evidence.holders(stage) for stage in range(evidence.stages)]
    copies, due = {name: each for (name, _), each in sums.copies.items()}, evidence.expected.gradients
    for turn in range(max(map(len, holders))):
        ranks, own = tuple(one[min(turn, len(one) - 1)] for one in holders), dict[Site, Gradient]()
        for site, seen in evidence.gradients.items():
            (stage, name), rank = site, ranks[site[0]]
            has = (rank, stage) in sums.places[name]
            own[site] = copies.get(name, {}).get(rank, seen) if has else due.get(site)
        yield ranks, own


def _on(ranks: Collection[int], cause: Cause, evidence: Evidence) -> Cause:
    """``cause`` on ``ranks``, where these are not all that it may be on."""
    if cause.stage is not None and len({*ranks}) == 1:
        return replace(cause, rank=min(ranks))
    return cause if {*ranks} >= _holders(cause, evidence) else replace(cause, ranks=tuple(sorted({*ranks})))


def _holders(cause: Cause, evidence: Evidence) -> set[int]:
    """All ranks with a stage that ``cause`` is in."""
    return {rank for stage in stages_of(cause, evidence) for rank in evidence.holders(stage)}


def stages_of(cause: Cause, evidence: Evidence) -> Sequence[int]:
    """Where ``cause`` may be."""
    return cause.stages or (range(evidence.stages) if cause.stage is None else (cause.stage,))


def apart(evidence: Evidence) -> Sequence[str]:
    """That ranks do not agree, and nothing says why, or that their parts make up no whole; empty where they do."""
    broken = next((one for one in evidence.verdict.mismatches if one.law == "shards"), None)
    if broken is not None:
        cure = "hand back every element once, each with its place in the whole"
        return (f"shards of {broken.parameter}: {broken.seen}: {cure}",)
    if evidence.members is not None and not evidence.differs("replicas") and evidence.differs("gradient"):
        ranks = apart_by_rank(evidence.members, evidence.expected)
        return () if ranks is None else (f"the shards of ranks {listed(ranks)} are not made of microbatches alike",)
    for one in evidence.verdict.mismatches:
        if isinstance(one.found, Size) and isinstance(one.due, Size) and one.found.shape != one.due.shape:
            told = of_a_part(f"{one.parameter}", f"of {one.found}", f"{one.due}")
            return (f"rank {one.rank}, stage {one.stage}: {told}",)
    told = "what ranks have of one stage does not go together, in a way that tells nothing"
    return (*first_of_backward(evidence), told) if evidence.differs("replicas") else ()


def on_rank(cause: Cause, evidence: Evidence) -> Cause:
    """``cause`` on the rank that had what is wrong, where several hold the stage and its place alone was known."""
    if len(cause.ranks) == 1:  # it is told of this one, of several that hold the stage
        return replace(cause, rank=cause.ranks[0], ranks=())
    single = evidence.differs("replicas") and cause.action is None and cause.kind not in ("mode", "order")
    single |= evidence.differs("initial-weights")
    if (placed := _left_before(cause, evidence) or _in_every_copy(cause, evidence)) is not None:
        return placed
    if cause.stage is None or single or cause.kind in ("not-reduced", "misplaced", "norm", "report"):
        return cause  # told of a rank, not of a stage
    if cause.rank != evidence.placement[cause.stage]:
        return cause
    if evidence.members is None:
        return _on_replica(cause, cause.stage, evidence)
    if (placed := _at_holders(cause, evidence)) is not None:
        return placed
    if len(evidence.members.stages[cause.stage].part.members) < 2:
        return cause
    return replace(cause, rank=_rank_of(cause.stage, cause.microbatches, evidence))


def _left_before(cause: Cause, evidence: Evidence) -> Cause | None:
    """``cause`` of what was there before the step, on the ranks and stages that had something there.

    None where nobody knows of it, and if all had.
    """
    if cause.kind != "stale-gradient" or cause.microbatches:
        return None
    each = [evidence.begun(name) for name in _shown(cause, evidence)]
    ranks, stages = ({one[k] for had in each for one in had} for k in range(2))
    if cause.stage is not None and stages:
        copied = any(len({stage for _, stage in had}) > 1 for had in each)
        told = f"{cause.detail}{', added up over these stages' * copied}"
        moved = cause if stages == {cause.stage} else _of_one(cause, evidence)
        return _on(ranks, _in(stages, replace(moved, detail=told)), evidence)
    if not ranks or ranks >= _holders(cause, evidence):
        return None
    return _on(ranks, cause, evidence)


def _shown(cause: Cause, evidence: Evidence) -> frozenset[str]:
    """The parameters with wrong gradients that ``cause`` is told of."""
    stages, wrong = stages_of(cause, evidence), evidence.wrong("gradient", "presence")
    return frozenset(name for stage, name in wrong if stage in stages and cause.parameter in (None, name))


def _of_one(cause: Cause, evidence: Evidence) -> Cause:
    """``cause`` of the one parameter that shows it, if that is one."""
    shown = _shown(cause, evidence)
    return replace(cause, parameter=min(shown)) if len(shown) == 1 else cause


def _in(stages: Collection[int], cause: Cause) -> Cause:
    """``cause`` in ``stages``, on no rank yet."""
    if len(stages) == 1:
        return replace(cause, rank=None, stage=min(stages), stages=())
    return replace(cause, rank=None, stage=None, stages=tuple(sorted(stages)))


def _in_every_copy(cause: Cause, evidence: Evidence) -> Cause | None:
    """``cause`` in all stages with the same wrong copy, where copies alone show it: none tells which stage it is of."""
    sums, shown = evidence.sums, _shown(cause, evidence)
    told_elsewhere = cause.stage is None or cause.action is not None or cause.kind in ("not-reduced", "norm", "report")
    if sums is None or told_elsewhere or not shown:
        return None
    found = set[tuple[int, int]]()
    for name in shown:
        at, each = sums.places.get(name, ()), next((one for (of, _), one in sums.copies.items() if of == name), {})
        own = [rank for rank, stage in at if stage == cause.stage and rank in (cause.rank, *cause.ranks)]
        own = own or [rank for rank, stage in at if stage == cause.stage]
        if len({stage for _, stage in at}) < 2 or not own or not each:
            return None
        found |= {(rank, stage) for rank, stage in at if _same(each[rank], each[own[0]])}
    stages = {stage for _, stage in found}
    if len(stages) < 2:
        return None
    return _on({rank for rank, _ in found}, _in(stages, _of_one(cause, evidence)), evidence)


def _same(one: Gradient, other: Gradient) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and error(one.double().cpu(), other.double().cpu()) < ALIKE


def _on_replica(cause: Cause, stage: int, evidence: Evidence) -> Cause:
    """``cause`` on the one rank of ``stage`` that ran its microbatches; on none where several did, or nobody says."""
    holders = evidence.holders(stage)
    replicas = None if evidence.sums is None else evidence.sums.replicas
    if replicas is None or replicas.count < 2 or len(holders) < 2:
        return cause
    about = {*(cause.microbatches or range(evidence.microbatches))}
    found = [rank for rank in holders if {*replicas.share(rank)} & about] if replicas.shares else []
    return replace(cause, rank=found[0] if len(found) == 1 else None)


def _at_holders(cause: Cause, evidence: Evidence) -> Cause | None:
    """``cause`` on the rank with the wrong part of a parameter that ranks have in parts; None of any other."""
    assert evidence.members is not None, "asked for only where there are members"
    stage = next((one for one in evidence.members.stages if one.index == cause.stage), None)
    numbers = [] if stage is None else [k for k, name in stage.names.items() if name == cause.parameter]
    if stage is None or not any(k in part.shards for k in numbers for _, part in stage.part.members):
        return None
    site = cause.stage, cause.parameter
    wrong = [m.rank for m in evidence.verdict.mismatches if m.law == "gradient" and (m.stage, m.parameter) == site]
    shards = {rank: part.shards.get(k) for k in numbers for rank, part in stage.part.members}
    holders = [rank for rank, shard in shards.items() if wrong and shard == shards.get(wrong[0] or 0)]
    if len(holders) < 2:
        return replace(cause, rank=holders[0]) if holders else None
    return replace(cause, rank=None, ranks=tuple(holders))


def _rank_of(stage: int, microbatches: Sequence[int], evidence: Evidence) -> int | None:
    """The rank of ``stage``, which several hold: the one that these microbatches were on, if that is one.

    None where further ranks work on the same microbatches, unless it is known that they were not wrong so soon.
    """
    assert evidence.members is not None, "asked for only where there are members"
    replicas, flow = evidence.members.replicas, evidence.passed.get(stage)
    own = _wrong_from(stage, evidence)
    if any(_wrong_from(stage, line) <= own for line in evidence.lines[1:]):
        return None
    members = [rank for rank, _ in evidence.members.stages[stage].part.members]
    ran = {m: rank for rank in reversed(members) for m in replicas.share(rank)} if replicas.count > 1 else {}
    ran |= {} if flow is None else {m: rank for m, rank in flow.ranks.items() if rank is not None}
    found = {ran.get(m) for m in microbatches or range(replicas.microbatches)}
    return found.pop() if len(found) == 1 else None


_WHERES = (GIVEN, MADE, KEPT, RECEIVED, HANDED_ON)  # as data flows through a stage


def _wrong_from(stage: int, line: Evidence) -> float:
    """From where in the flow through ``stage`` on a line of ranks was wrong, or may have been; infinite: nowhere."""
    flow, every = line.passed.get(stage), [*range(line.microbatches)]
    kinds = (Kind.FORWARD,) if stage in line.frozen else (Kind.FORWARD, Kind.BACKWARD)
    if flow is None or any(sorted(ordered(line, stage, kind)) != every for kind in kinds):
        return -1.0
    wrong = {where for where, _ in flow.unplaced} | {one.where for one in flow.crossings if not one.same}
    return min((float(k) for k, where in enumerate(_WHERES) if where in wrong), default=math.inf)


def _of_losses(cause: Cause, evidence: Evidence) -> bool:
    """Whether losses, too, are as many times too large as ``cause`` says of gradients: then no sum of theirs is why."""
    factor = _loss_factor(evidence) if cause.kind == "scale" else None
    return factor is not None and cause.factor is not None and abs(factor / cause.factor - 1) < ALIKE


def _loss_factor(evidence: Evidence) -> float | None:
    """How many times what it should be every loss is; None where that is not one number, or no losses are kept."""
    if evidence.seen is None:
        return None
    rows, due = [row[evidence.number] for row in evidence.observed.ranks], evidence.expected
    pairs = [(one, due.losses[m]) for row in rows for m, one in zip(row.share or (), row.losses, strict=False)]
    pairs += [(row.loss, due.loss) for row in rows if row.loss is not None]
    ratios = [seen / right for seen, right in pairs if right]
    if not ratios or any(scalar_error(ratio, ratios[0]) > ALIKE for ratio in ratios):
        return None
    return ratios[0]


def _placed(cause: Cause, evidence: Evidence) -> Cause:
    if cause.stage is None or cause.rank is not None or evidence.members is None:
        return cause
    several = len(evidence.members.stages[cause.stage].part.members) > 1
    return cause if several else replace(cause, rank=evidence.placement[cause.stage])

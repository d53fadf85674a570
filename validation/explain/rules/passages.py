"""The link that watching shows: what passed the boundaries of stages, and where that broke.

More evidence must not make a name worse. Boundaries and final gradients each explain some of what is wrong: where
gradients are explained to the last, and what passed a boundary is not, they say more; where both name something and
these do not go together, both are told.
"""

from collections.abc import Sequence
from dataclasses import replace

from pipeproof.core.cause import Cause, RuledOut, listed
from pipeproof.core.observe.observed import INPUT, Crossing
from pipeproof.core.observe.recording import FLOWED, GIVEN, HANDED_ON, MADE, RECEIVED
from pipeproof.core.tolerance import scalar_error
from pipeproof.explain.divergence import Divergence
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.limits import ALIKE, CLOSE, MOST
from pipeproof.explain.rules.boundaries import causes_of
from pipeproof.explain.rules.factors import by_loss_scale
from pipeproof.explain.rules.first_wrong import Boundaries, FirstWrong
from pipeproof.explain.rules.place import or_wrong_message, ordered, turn_of
from pipeproof.pipeline.action import Action, Kind

_VAGUE = frozenset({"altered", "computation"})  # that a tensor is another, not what it is
ONE_FAULT: tuple[frozenset[str], ...] = (  # kinds that one fault has where more, or less, of it is seen
    frozenset({"mispaired", "wrong-message", "overwritten", "partition", "stale-tensor"})
    | {"swapped-activations", "swapped-gradients", "swapped-data"},
    frozenset({"dropped", "zero", "missing", "uninitialised"}),
    frozenset({"doubled", "scale", "sign", "unequal-weights"}),
)


def passages(evidence: Evidence) -> list[Cause]:
    """The causes of what was wrong first; none where what is there in its place does not say."""
    boundaries = Boundaries(evidence)
    found = list(boundaries.first_wrong())
    if not found or not found[0].telling:
        return _computed_otherwise(boundaries, evidence)
    if found[0].point.where == FLOWED and boundaries.refined(found[0]) and _attributed(evidence):
        return []  # what the gradients are made of says more than that the loss is another
    rank = evidence.placement
    told = {
        Divergence(rank[one.point.stage], one.point, one.crossing.at, None, one.what, turn=turn): one
        for one in found
        if one.telling
        for turn in (turn_of(evidence, one.crossing.action),)
    }
    causes = causes_of(
        list(told),
        evidence.microbatches,
        refine=lambda one: boundaries.refined(told[one]),
    )
    losses = {one.crossing.at for one in found if one.point.where == FLOWED}
    if said := _of_all_stages(causes, evidence) or _of_one_replica(causes, evidence):
        return [by_loss_scale(cause, evidence) for cause in said]
    causes = [by_loss_scale(informed(cause, evidence), evidence) for cause in causes]
    named = [_with_orders(_as_sent(cause, evidence), evidence) for cause in causes]
    named = [_or_target(cause, evidence) if cause.action in losses else cause for cause in named]
    return [*_beyond(named, evidence), *named]


def _computed_otherwise(boundaries: Boundaries, evidence: Evidence) -> list[Cause]:
    """The stage that made of what was right what the reference never has."""
    found = boundaries.computed_otherwise()
    if found is None:
        return []
    stage, microbatches = found
    detail = "its input is right, and its output is like nothing that the reference computes from it"
    action = min((Action(stage, Kind.FORWARD, m) for m in microbatches), key=lambda one: turn_of(evidence, one))
    place = evidence.placement[stage]
    cause = Cause("computation", place, stage, microbatches=tuple(microbatches), action=str(action), detail=detail)
    return [_of_its_order(cause, stage, evidence)]


def _of_its_order(cause: Cause, stage: int, evidence: Evidence) -> Cause:
    """``cause``, or that the stage was given its inputs in another order than they were made, or the model's own."""
    before, begins = evidence.passed.get(stage - 1), sorted(evidence.passed[stage].begins.items())
    numbers = {} if before is None else {place: number for number, place in before.ends.items()}
    came = [numbers[place] for _, place in begins if place in numbers]
    if stage and all(place.startswith(INPUT) for _, place in begins):
        told = f"its input is the model's own, and not what stage {stage - 1} hands on"
    elif came != sorted(came):
        told = f"its inputs are what stage {stage - 1} made, in another order: outputs {listed(came)}"
    else:
        return cause
    meant = replace(cause, detail="or that is meant, and it computed something else of it")
    return replace(cause, kind="wrong-message", detail=told, instead=(meant,))


def _of_all_stages(causes: list[Cause], evidence: Evidence) -> list[Cause]:
    """What final gradients say of a factor, if that is in every stage: then it came to no boundary between two first.

    Coarse types show it late, and as another factor for each microbatch. That microbatches are weighted by a number
    shows at the last stage, too, and gradients say by which.
    """
    found = evidence.attribution if all(one.kind in ("scale", "unequal-weights") for one in causes) else None
    between = all(one.stage != evidence.stages - 1 for one in causes)
    kinds = ("scale", "unequal-weights") if between else ("unequal-weights",)
    if found is None or found.unknown or len(found.causes) != 1 or not causes:
        return []
    (one,) = found.causes
    every = (one.stage, one.rank) == (None, None) or evidence.stages == 1
    return [one] if one.kind in kinds and every else []


def _of_one_replica(causes: list[Cause], evidence: Evidence) -> list[Cause]:
    """What final gradients say of a factor that is the number of replicas, or one over it.

    Gradients may pass as those of a replica or as those of all: so boundaries do not tell whose are wrong.
    """
    count = 1 if evidence.members is None else evidence.members.replicas.count
    factors = [one.factor for one in causes if one.kind == "scale" and one.factor is not None]
    either = all(any(abs(factor / due - 1) < ALIKE for due in (count, 1 / count)) for factor in factors)
    said = complete(evidence)
    if count == 1 or not either or len(factors) < len(causes) or any(one.kind != "scale" for one in said):
        return []
    if any(abs((other.factor or 0.0) / factor - 1) < ALIKE for other in said for factor in factors):
        return []  # both tell one factor, and boundaries where it came in
    return list(said)


def _beyond(causes: Sequence[Cause], evidence: Evidence) -> list[Cause]:
    """What is everywhere, or at stages nearer to the loss than any of ``causes``, all of which are in backwards."""
    if not all(cause.in_backward and cause.stage is not None for cause in causes):
        return []
    reached = max(cause.stage or 0 for cause in causes)
    wrong = {m.stage for m in evidence.verdict.mismatches if m.law in ("gradient", "presence") and m.stage is not None}
    if not any(stage > reached for stage in wrong):
        return []
    return [one for one in _attributed(evidence) if max(one.stages, default=one.stage or 0) > reached or _whole(one)]


def _whole(cause: Cause) -> bool:
    """Whether it is the step's own, and at no stage or parameter alone."""
    return cause.stage is None and not cause.stages and cause.rank is None and cause.parameter is None


def _attributed(evidence: Evidence) -> Sequence[Cause]:
    """The causes that attribution names."""
    return evidence.attribution.causes if evidence.attribution is not None else ()


def _as_sent(cause: Cause, evidence: Evidence) -> Cause:
    """``cause`` of zeros that came: the messages tell whether they were sent so, where it is known which these were."""
    flow = evidence.passed.get(-1 if cause.stage is None else cause.stage)
    if cause.kind != "uninitialised" or cause.action is None or flow is None:
        return cause
    kind = Kind.BACKWARD if cause.in_backward else Kind.FORWARD
    came = [flow.came.get(Action(cause.stage or 0, kind, m), {}).values() for m in cause.microbatches]
    sent = {None if one.sent is None else one.sent.empty for messages in came for one in messages}
    if len(sent) != 1 or None in sent or not all(came):
        return cause
    if sent == {False}:
        return replace(cause, detail=f"{cause.detail}, and was not when it was sent", instead=())
    instead = () if kind is Kind.FORWARD else cause.instead  # which says no more
    return replace(cause, kind="altered", detail=f"{cause.detail}, and was so when it was sent", instead=instead)


def _or_target(cause: Cause, evidence: Evidence) -> Cause:
    """A loss that is another though its output is right, or one with another target: nobody sees targets.

    The losses may show whose they are.
    """
    if cause.kind != "computation":
        return cause
    whose = _targets(cause, evidence)
    if not whose:
        return replace(cause, instead=(replace(cause, kind="swapped-data", detail="or its target is not its own"),))
    told = f"the output of microbatch{'es' * (len(whose) > 1)} {listed(whose)} is right, and the loss is that with"
    return replace(cause, kind="swapped-data", detail=f"{told} the target of {listed(whose.values())} ({cause.action})")


def _targets(cause: Cause, evidence: Evidence) -> dict[int, int]:
    """Whose target gives each loss that was seen, with the output of its own microbatch; empty if any tells none."""
    every, beside = range(evidence.microbatches), evidence.beside
    if beside is None or cause.stage is None or len(every) * len(cause.microbatches) > MOST:
        return {}
    found: dict[int, int] = {}
    for microbatch in cause.microbatches:
        seen = _seen_loss(evidence, cause.stage, microbatch)
        made = {
            other: beside.loss_with(microbatch, beside.batches[other].target) for other in every if other != microbatch
        }
        like = [other for other, loss in made.items() if seen and loss and scalar_error(seen, loss) < CLOSE]
        if len(like) != 1:
            return {}
        found[microbatch] = like[0]
    return found


def _seen_loss(evidence: Evidence, stage: int, microbatch: int) -> float | None:
    """A microbatch's loss, as the rank reports it that it was on; None where it reports none."""
    rank = evidence.passed[stage].ranks.get(microbatch)
    row = evidence.observed.ranks[evidence.placement[stage] if rank is None else rank][evidence.number]
    share = range(evidence.microbatches) if row.share is None else row.share
    return dict(zip(share, row.losses, strict=False)).get(microbatch)


def _with_orders(cause: Cause, evidence: Evidence) -> Cause:
    """A wrong pairing with the orders in which tensors were made and used.

    Those that were used in the order in which they were made arrived right. Others may as well have come as each other.
    """
    if cause.kind != "mispaired" or cause.stage is None:
        return cause
    backward = cause.in_backward
    sender, kind = (cause.stage + 1, Kind.BACKWARD) if backward else (cause.stage - 1, Kind.FORWARD)
    ran = {stage: order for stage in (sender, cause.stage) if (order := ordered(evidence, stage, kind))}
    told = "; ".join(f"stage {stage}: {listed(order)}" for stage, order in ran.items())
    apart = len({*map(tuple, ran.values())}) > 1  # of one order nobody learns anything
    words = f"order of {'backwards' if backward else 'forwards'}: {told}" if apart else ""
    found = replace(cause, detail="; ".join(filter(None, (cause.detail, words))))
    used = _used(evidence, cause.stage, RECEIVED if backward else GIVEN, ran.get(cause.stage, []))
    return found if used and used == ran.get(sender) else or_wrong_message(found)


def _used(evidence: Evidence, stage: int, where: str, order: Sequence[int]) -> list[int]:
    """Whose tensors came in at a stage, in the order in which it used them; empty where that is not known of all."""
    found: dict[int, set[int]] = {}
    for one in evidence.observed.crossings(evidence.number):
        if one.action.stage == stage and one.where == where:
            label = None if one.really is None else one.really.label
            here = label is not None and label.point[::2] == (stage, where)
            owner = label.point.microbatch if label and here else one.action.microbatch
            found.setdefault(one.action.microbatch, set()).add(owner)
            if not one.same and not here:
                return []
    whole = found.keys() >= set(order) and all(len(owners) == 1 for owners in found.values())
    return [owner for m in order for owner in found[m]] if whole else []


def sound(evidence: Evidence) -> RuledOut | None:
    """What the boundaries rule out: of every stage and microbatch something passed each of them, and all was right."""
    if evidence.members is not None and evidence.members.replicas.count > 1 and evidence.differs("gradient"):
        return None  # gradients may pass as those of a replica, or as those of all: a factor shows there not at all
    lines = evidence.lines
    if not all(map(_all_right, lines)):
        return None
    count = sum(len(_judged(line)) for line in lines)
    return RuledOut(("wrong-message",), "every tensor between stages is right, to half of its digits", count)


def _judged(evidence: Evidence) -> list[Crossing]:
    return [one for one in evidence.observed.crossings(evidence.number) if one.judged]


def _all_right(evidence: Evidence) -> bool:
    """Whether that is so of one line of ranks."""
    judged = _judged(evidence)
    seen = {(one.action.stage, one.action.microbatch, one.where) for one in judged}
    last, every = evidence.stages - 1, range(evidence.microbatches)
    due = {(stage, m, GIVEN) for stage in range(last + 1) for m in every}
    due |= {(stage, m, where) for stage in range(last) for m in every for where in (MADE, RECEIVED)}
    due |= {(stage, m, HANDED_ON) for stage in range(1, last + 1) for m in every}
    if evidence.differs("loss"):  # what the last stage puts out may be right only where it was compared
        due |= {(last, m, MADE) for m in every}
    return seen >= due and all(one.same for one in judged) and Boundaries(evidence).right


def unexplained_passage(evidence: Evidence) -> tuple[str, ...]:
    """What was wrong first at the boundaries, and what nobody could judge before it; empty where all is right."""
    rank, boundaries = evidence.placement, Boundaries(evidence)
    wrong = [_first_wrong(one, boundaries, rank) for one in boundaries.first_wrong() if boundaries.is_first(one)]
    unjudged = [
        f"unjudged: rank {rank[point.stage]}, stage {point.stage}: {point.where} matches no tensor of the reference"
        for point in boundaries.unjudged
    ]
    return (*(wrong or _inexact(boundaries, rank))[:1], *unjudged[:1])


def _inexact(boundaries: Boundaries, rank: Sequence[int]) -> list[str]:
    """Where bits first differ: what is wrong behind that may be too little to say where it began.

    Not where ranks add up what each has a part of: there they differ in what is right, too.
    """
    found = boundaries.first_inexact()
    if found is None or boundaries.in_parts(found.action.stage):
        return []
    stage = found.action.stage
    return [f"first not bit for bit: rank {rank[stage]}, stage {stage}, {found.at}: {found.what}"]


def _first_wrong(root: FirstWrong, boundaries: Boundaries, rank: Sequence[int]) -> str:
    """Where ``root`` is; between two stages, if what one of them handed on was right."""
    point = root.point
    here = f"rank {rank[point.stage]}, stage {point.stage}"
    seen = f"{root.crossing.at}: {point.where} is {root.what.text}"
    if not boundaries.is_known_before(point):
        return f"first compared wrong: {here}, {seen}"
    sender = point.stage + {GIVEN: -1, RECEIVED: 1}.get(point.where, 0)
    between = f"between rank {rank[sender]}, stage {sender} and " if 0 <= sender != point.stage else ""
    return f"first seen wrong: {between}{here}, {seen}"


def complete(evidence: Evidence) -> Sequence[Cause]:
    """The causes that final gradients name, where they explain every one of them; else none."""
    found = evidence.attribution
    return () if found is None or found.unknown else found.causes


def informed(cause: Cause, evidence: Evidence) -> Cause:
    """``cause``, or what final gradients say that it was, where boundaries show no more than that a tensor is another.

    What a stage computed wrongly in a backward shows in the gradients of the one before.
    """
    if cause.kind not in _VAGUE or cause.stage is None or not cause.in_backward:
        return cause
    place = cause.stage - (cause.kind == "computation")
    for one in complete(evidence):
        if one.stage == place and one.parameter is None and set(one.microbatches) == set(cause.microbatches):
            return replace(one, rank=cause.rank, stage=cause.stage, action=cause.action)
    return cause


def agree(one: Cause, other: Cause) -> bool:
    """Whether boundaries and final gradients may mean the same by these."""
    alike = one.kind == other.kind or one.kind in _VAGUE or any({one.kind, other.kind} <= group for group in ONE_FAULT)
    apart = None not in (one.stage, other.stage) and one.stage != other.stage
    some = set(one.microbatches), set(other.microbatches)
    return alike and not apart and (not all(some) or some[0] <= some[1] or some[1] <= some[0])

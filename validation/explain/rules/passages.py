"""The link that watching shows: tensors across stage boundaries, and the first to go wrong.

More evidence must not make a name worse. Boundaries and final gradients each explain a part: if gradients are fully
explained, and a crossing is not, they say more; if both name faults that do not match, both are listed.
"""

from collections.abc import Sequence
from dataclasses import replace

from pipeproof.core.cause import Cause, RuledOut, join_numbers
from pipeproof.core.observe.observed import INPUT
from pipeproof.core.observe.recording import FLOWED, GIVEN, HANDED_ON, MADE, RECEIVED
from pipeproof.core.tolerance import scalar_error
from pipeproof.explain.divergence import Divergence
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.limits import ALIKE, CLOSE, MOST
from pipeproof.explain.rules.boundaries import causes_of
from pipeproof.explain.rules.factors import by_loss_scale
from pipeproof.explain.rules.first_wrong import Boundaries
from pipeproof.explain.rules.places import or_wrong_message, order_of, turn_of
from pipeproof.pipeline.action import Action, Kind

_VAGUE = frozenset({"altered", "computation"})  # a changed tensor without an identity
ONE_FAULT: tuple[frozenset[str], ...] = (  # kinds that one fault has where more, or less, of it is observed
    frozenset({"mispaired", "wrong-message", "overwritten", "partition", "stale-tensor"})
    | {"swapped-activations", "swapped-gradients", "swapped-data"},
    frozenset({"dropped", "zero", "missing", "uninitialised"}),
    frozenset({"doubled", "scale", "sign", "unequal-weights"}),
)


def passages(evidence: Evidence) -> list[Cause]:
    """Name causes for the first wrong tensors, if their likeness identifies a fault."""
    boundaries = Boundaries(evidence)
    found = list(boundaries.first_wrong())
    if not found or not found[0].telling:
        return _find_computed_otherwise(boundaries, evidence)
    if found[0].point.where == FLOWED and boundaries.refine(found[0]):
        if evidence.attribution is not None and evidence.attribution.causes:
            return []  # the gradients' composition says more than a changed loss
    roots = {}
    for one in (one for one in found if one.telling):
        rank, turn = evidence.placement[one.point.stage], turn_of(evidence, one.crossing.action)
        roots[Divergence(rank, one.point, one.crossing.at, None, one.what, turn=turn)] = one
    causes = causes_of(list(roots), evidence.microbatches, refine=lambda one: boundaries.refine(roots[one]))
    losses = {one.crossing.at for one in found if one.point.where == FLOWED}
    if said := _of_all_stages(causes, evidence) or _of_one_replica(causes, evidence):
        return [by_loss_scale(cause, evidence) for cause in said]
    causes = [by_loss_scale(inform(cause, evidence), evidence) for cause in causes]
    named = [_with_orders(_as_sent(cause, evidence), evidence) for cause in causes]
    named = [_or_target(cause, evidence) if cause.action in losses else cause for cause in named]
    if not all(cause.in_backward and cause.stage is not None for cause in named):
        return named
    # Causes everywhere, or nearer to the loss than all these in backwards.
    reached = max(cause.stage or 0 for cause in named)
    wrong = [m.stage for m in evidence.verdict.mismatches if m.law in ("gradient", "presence")]
    if not any(stage is not None and stage > reached for stage in wrong):
        return named
    more = () if evidence.attribution is None else evidence.attribution.causes
    nearer = [one for one in more if max(one.stages, default=one.stage or 0) > reached]
    every = [one for one in more if (one.stage, one.stages, one.rank, one.parameter) == (None, (), None, None)]
    return [*(one for one in more if one in nearer or one in every), *named]


def _find_computed_otherwise(boundaries: Boundaries, evidence: Evidence) -> list[Cause]:
    """The stage that computed an output unknown to the reference from right inputs, or from ones in another order."""
    found = boundaries.find_computed_otherwise()
    if found is None:
        return []
    stage, microbatches = found
    detail = "its input is right, and its output is like nothing that the reference computes from it"
    action = min((Action(stage, Kind.FORWARD, m) for m in microbatches), key=lambda one: turn_of(evidence, one))
    place = evidence.placement[stage]
    cause = Cause("computation", place, stage, microbatches=tuple(microbatches), action=str(action), detail=detail)
    before, begins = evidence.passed.get(stage - 1), [one for _, one in sorted(evidence.passed[stage].begins.items())]
    numbers = {} if before is None else {place: number for number, place in before.ends.items()}
    came = [numbers[place] for place in begins if place in numbers]
    if stage and all(place.startswith(INPUT) for place in begins):
        detail = f"its input is the model's own, and not what stage {stage - 1} hands on"
    elif came != sorted(came):
        detail = f"its inputs are what stage {stage - 1} made, in another order: outputs {join_numbers(came)}"
    else:
        return [cause]
    meant = replace(cause, detail="or that is meant, and it computed something else of it")
    return [replace(cause, kind="wrong-message", detail=detail, instead=(meant,))]


def _of_all_stages(causes: list[Cause], evidence: Evidence) -> list[Cause]:
    """Name a factor's cause from final gradients, if every stage has it: then no boundary caused it.

    Coarse types show it late, and as another factor for each microbatch. A weighting of microbatches by a number shows
    at the last stage, too, and gradients say by which.
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
    """Name a factor's cause from final gradients, if it equals the number of replicas or its reciprocal.

    Gradients may cross as a replica's or as the sum of all: so boundaries do not show which are wrong.
    """
    count = 1 if evidence.members is None else evidence.members.replicas.count
    factors = [one.factor for one in causes if one.kind == "scale" and one.factor is not None]
    either = all(any(abs(factor / expected - 1) < ALIKE for expected in (count, 1 / count)) for factor in factors)
    said = complete(evidence)
    if count == 1 or not either or len(factors) < len(causes) or any(one.kind != "scale" for one in said):
        return []
    if any(abs((other.factor or 0.0) / factor - 1) < ALIKE for other in said for factor in factors):
        return []  # both tell one factor, and boundaries where it came in
    return list(said)


def _as_sent(cause: Cause, evidence: Evidence) -> Cause:
    """Refine ``cause`` for received zeros: matched messages show if zeros were sent."""
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
    """Refine a wrong loss beside a right output: targets are not observed, but losses may identify them."""
    if cause.kind != "computation":
        return cause
    whose = _targets(cause, evidence)
    if not whose:
        return replace(cause, instead=(replace(cause, kind="swapped-data", detail="or its target is not its own"),))
    text = (
        f"the output of microbatch{'es' * (len(whose) > 1)} {join_numbers(whose)} is right, and the loss is that with"
    )
    return replace(
        cause, kind="swapped-data", detail=f"{text} the target of {join_numbers(whose.values())} ({cause.action})"
    )


def _targets(cause: Cause, evidence: Evidence) -> dict[int, int]:
    """By microbatch, whose target gives the loss that its rank reports.

    Empty if any loss matches none.
    """
    every, beside = range(evidence.microbatches), evidence.beside
    if beside is None or cause.stage is None or len(every) * len(cause.microbatches) > MOST:
        return {}
    found: dict[int, int] = {}
    for microbatch in cause.microbatches:
        rank = evidence.passed[cause.stage].ranks.get(microbatch)
        row = evidence.observed.ranks[evidence.placement[cause.stage] if rank is None else rank][evidence.number]
        observed = dict(zip(every if row.share is None else row.share, row.losses, strict=False)).get(microbatch)
        targets = {other: beside.batches[other].target for other in every if other != microbatch}
        made = {other: beside.loss_with(microbatch, target) for other, target in targets.items()}
        like = [other for other, loss in made.items() if observed and loss and scalar_error(observed, loss) < CLOSE]
        if len(like) != 1:
            return {}
        found[microbatch] = like[0]
    return found


def _with_orders(cause: Cause, evidence: Evidence) -> Cause:
    """Add the orders of making and use to a wrong pairing.

    Tensors used in the order of their making arrived right. Others may have arrived as each other.
    """
    if cause.kind != "mispaired" or cause.stage is None:
        return cause
    backward = cause.in_backward
    sender, kind = (cause.stage + 1, Kind.BACKWARD) if backward else (cause.stage - 1, Kind.FORWARD)
    ran = {stage: order for stage in (sender, cause.stage) if (order := order_of(evidence, stage, kind))}
    text = "; ".join(f"stage {stage}: {join_numbers(order)}" for stage, order in ran.items())
    apart = len({*map(tuple, ran.values())}) > 1  # one order shows nothing
    words = f"order of {'backwards' if backward else 'forwards'}: {text}" if apart else ""
    found = replace(cause, detail="; ".join(filter(None, (cause.detail, words))))
    used = _used(evidence, cause.stage, RECEIVED if backward else GIVEN, ran.get(cause.stage, []))
    return found if used and used == ran.get(sender) else or_wrong_message(found)


def _used(evidence: Evidence, stage: int, where: str, order: Sequence[int]) -> list[int]:
    """List tensor owners at a stage, in order; empty unless all known."""
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
    """Exclude kinds by the boundaries: a tensor of every stage and microbatch crossed each, and all were right."""
    if evidence.members is not None and evidence.members.replicas.count > 1 and evidence.differs("gradient"):
        return None  # gradients may pass as a replica's, or as the sum of all: no factor shows there
    last, every = evidence.stages - 1, range(evidence.microbatches)
    expected = {(stage, m, GIVEN) for stage in range(last + 1) for m in every}
    expected |= {(stage, m, where) for stage in range(last) for m in every for where in (MADE, RECEIVED)}
    expected |= {(stage, m, HANDED_ON) for stage in range(1, last + 1) for m in every}
    if evidence.differs("loss"):  # the last stage's output counts as right only after a comparison
        expected |= {(last, m, MADE) for m in every}
    count = 0
    for line in evidence.lines:
        judged = [one for one in line.observed.crossings(line.number) if one.judged]
        observed = {(one.action.stage, one.action.microbatch, one.where) for one in judged}
        if not observed >= expected or not all(one.same for one in judged) or not Boundaries(line).right:
            return None
        count += len(judged)
    return RuledOut(("wrong-message",), "every tensor between stages is right, to half of its digits", count)


def list_unexplained_passages(evidence: Evidence) -> tuple[str, ...]:
    """The first wrong tensor at the boundaries, and the first unjudged one; empty if all are right.

    Without a wrong one, the first difference in bits, as a hint for errors too small to locate; not between ranks that
    add up parts, where right tensors differ, too.
    """
    boundaries, found = Boundaries(evidence), list[str]()

    def place(stage: int) -> str:
        return f"rank {evidence.placement[stage]}, stage {stage}"

    for one in (one for one in boundaries.first_wrong() if boundaries.is_first(one)):
        point = one.point
        observed = f"{one.crossing.at}: {point.where} is {one.what.text}"
        sender = point.stage + {GIVEN: -1, RECEIVED: 1}.get(point.where, 0)
        between = f"between {place(sender)} and " if 0 <= sender != point.stage else ""
        if boundaries.is_known_before(point):
            found.append(f"first observed wrong: {between}{place(point.stage)}, {observed}")
        else:
            found.append(f"first compared wrong: {place(point.stage)}, {observed}")
    exact = None if found else boundaries.first_inexact()
    if exact is not None and not boundaries.in_parts(exact.action.stage):
        found = [f"first not bit for bit: {place(exact.action.stage)}, {exact.at}: {exact.what}"]
    unjudged = [
        f"unjudged: {place(point.stage)}: {point.where} matches no tensor of the reference"
        for point in boundaries.unjudged
    ]
    return (*found[:1], *unjudged[:1])


def complete(evidence: Evidence) -> Sequence[Cause]:
    """Return causes from final gradients, if they explain everything."""
    found = evidence.attribution
    return () if found is None or found.unknown else found.causes


def inform(cause: Cause, evidence: Evidence) -> Cause:
    """``cause``, or its name from final gradients, if boundaries show only a changed tensor.

    A wrong computation in a backward shows in the gradients of the stage before.
    """
    if cause.kind not in _VAGUE or cause.stage is None or not cause.in_backward:
        return cause
    place = cause.stage - (cause.kind == "computation")
    for one in complete(evidence):
        if one.stage == place and one.parameter is None and set(one.microbatches) == set(cause.microbatches):
            return replace(one, rank=cause.rank, stage=cause.stage, action=cause.action)
    return cause


def agree(one: Cause, other: Cause) -> bool:
    """True if boundaries and final gradients may mean the same by these."""
    alike = one.kind == other.kind or one.kind in _VAGUE or any({one.kind, other.kind} <= group for group in ONE_FAULT)
    apart = None not in (one.stage, other.stage) and one.stage != other.stage
    some = set(one.microbatches), set(other.microbatches)
    return alike and not apart and (not all(some) or some[0] <= some[1] or some[1] <= some[0])

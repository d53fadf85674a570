"""Compare watched boundary tensors with the reference, call by call."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeproof.core.limits import precision_of
from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.likeness import ROUNDED_TO, Label, Likeness
from pipeproof.core.observe.observed import INPUT, OF_ANOTHER_PLACE, UNKNOWN_MICROBATCH, Crossing, Passed
from pipeproof.core.observe.posted_messages import Came
from pipeproof.core.observe.recording import FORWARD_POINTS, GIVEN, HANDED_ON, KEPT, MADE, RECEIVED, Point
from pipeproof.core.observe.sketch import Sketch
from pipeproof.explain.limits import LEFT
from pipeproof.explain.sketches import is_far_nearer, is_rounded_sketch, nearest_sketch, of_sketches
from pipeproof.pipeline.action import Action, Kind
from pipeproof.whitebox.boundary_places import Cuts, place_by_structure
from pipeproof.whitebox.call_matching import CallOrder, Column, columns_of, drop_extra, may_add, orders
from pipeproof.whitebox.tensor_index import Both, is_part

_FAINT = 10.0  # times the rounding limit: a stage may amplify an earlier error so far


Stages = Mapping[int, tuple[Sequence[Call], Sequence[Column]]]


def find_passages(
    lines: Sequence[Mapping[int, Sequence[Call]]],
    microbatches: int,
    places: Both,
    note_handed_on: Callable[[Cuts], None] = lambda cuts: None,
    *,
    scaled: float = 1.0,
) -> list[dict[int, Passed]]:
    """Return boundary observations by stage, per line. ``places``: tensor and gradient places in the reference.

    note_handed_on: records partial gradients there. scaled: declared loss scale.
    """
    watched = []
    for k, line in enumerate(lines):
        own = {stage: drop_extra(calls, microbatches, places) for stage, calls in sorted(line.items())}
        observed = {stage: list(columns_of(calls, places)) for stage, calls in own.items()}
        placed = place_by_structure(observed, places, (lambda cuts: None) if k else note_handed_on)  # note once
        stages = {stage: (calls, placed[stage]) for stage, calls in own.items()}
        watched.append((line, stages, orders(stages, microbatches)))
    factors = [_late(stages, order, scaled) for _, stages, order in watched]
    found = []
    for (line, stages, order), factor in zip(watched, factors, strict=True):
        sent, passed = collect_sent(stages, order), dict[int, Passed]()
        late = factors[0] if is_near(factor, factors[0]) else None  # ranks on one stage divide alike
        for stage, (calls, columns) in stages.items():
            kept = set(map(id, calls))
            others = [call for call in line[stage] if id(call) not in kept]
            passed[stage] = replace(
                passages_of(stage, calls, columns, Context(stage, order[stage], sent, late)),
                detached=find_detached(stages.get(stage - 1, ((), ()))[0], calls, order[stage]),
                extra=(len(others), sum(map(may_add, others))),
            )
        found.append(passed)
    return found


def _late(stages: Stages, orders: Mapping[int, CallOrder], scaled: float) -> float | None:
    """Return the common factor between gradients and the reference's, where a runtime may still divide them.

    None if any gradient's content has a known place, or without a common factor. With losses declared ``scaled``, one
    gradient at that scale suffices: a gradient with a known place then lacks it.
    """
    flowing = [
        (stage, column)
        for stage, (_, observed) in stages.items()
        for column in observed
        if column.where in (RECEIVED, HANDED_ON)
    ]
    factors = [
        factor
        for stage, column in flowing
        for observed, number in zip(column.observed, orders[stage].numbers, strict=True)
        if observed is not None
        and number in column.known
        and (factor := observed.factor(column.known[number])) is not None
    ]
    if any(column.judged for _, column in flowing):
        return scaled if scaled != 1.0 and any(is_near(factor, scaled) for factor in factors) else None
    common = statistics.median_low(factors) if factors else None
    return common if sum(is_near(factor, common) for factor in factors) * 2 > len(factors) else None


def find_detached(before: Sequence[Call], calls: Sequence[Call], order: CallOrder) -> Mapping[int, frozenset[int]]:
    """Return inputs that lost their gradient requirement on the way, by microbatch.

    Excludes tensors that the previous stage also returned without one.
    """
    made = {call.outputs[number].digest for call in before for number in call.giving}
    made -= {one.digest for call in before for number, one in enumerate(call.outputs) if number not in call.giving}
    cut = {
        number: frozenset(
            k for k, one in enumerate(call.inputs) if k not in call.needing | call.given_again and one.digest in made
        )
        for call, number in zip(calls, order.numbers, strict=True)
    }
    return {number: inputs for number, inputs in cut.items() if inputs and number != UNKNOWN_MICROBATCH}


def is_near(one: float | None, other: float | None) -> bool:
    """True if two factors agree up to rounding."""
    return one is not None and other is not None and abs(one - other) <= LEFT * abs(other)


_FROM = {GIVEN: (-1, MADE), RECEIVED: (1, HANDED_ON)}  # sender for each received tensor: stages away, and its point
Sent = Mapping[bytes, tuple[Point, str]]  # sent tensors by digest: point and words


def collect_sent(stages: Stages, orders: Mapping[int, CallOrder]) -> Sent:
    """Return each stage's sent tensors, right or wrong: a wrong input may be another's output.

    Excludes passed-through tensors, and tensors shared by several microbatches: they identify no origin.
    """
    found: dict[bytes, dict[str, tuple[Point, str]]] = {}
    for stage, (calls, columns) in stages.items():
        for column in (one for one in columns if one.where in (MADE, HANDED_ON)):
            for k, (call, observed, number) in enumerate(
                zip(calls, column.observed, orders[stage].numbers, strict=True), 1
            ):
                came = call.inputs if column.where == MADE else call.output_gradients.values()
                own = observed is not None and observed.norm and observed.digest not in {one.digest for one in came}
                if observed is not None and own:
                    whose = f"call {k}" if number == UNKNOWN_MICROBATCH else f"microbatch {number}"
                    words = f"stage {stage}'s {column.what} of {whose}"
                    found.setdefault(observed.digest, {})[whose] = Point(stage, number, column.where), words
    return {digest: next(iter(those.values())) for digest, those in found.items() if len(those) == 1}


def passages_of(stage: int, calls: Sequence[Call], columns: Sequence[Column], context: "Context") -> Passed:
    """Return a stage's observations from its ``calls`` and ``columns``."""
    order = context.order
    numbered = list(zip(order.numbers, calls, strict=True))
    backs = sorted((end, number) for number, call in numbered for end in call.ran)
    forwards = [Action(stage, Kind.FORWARD, number) for number, _ in numbered]
    every = [(column, k) for column in columns for k in range(len(calls)) if column.observed[k] is not None]
    passing = [(column, k) for column, k in every if column.where != KEPT]
    began = [call.began for call in calls if call.began is not None]
    came: dict[Action, dict[int, Came]] = {}
    for number, call in numbered:
        for (kind, tensor), one in call.came.items():
            came.setdefault(Action(stage, kind, number), {})[tensor] = one
    return Passed(
        (*forwards, *(Action(stage, Kind.BACKWARD, number) for _, number in backs)),
        tuple((action, call.training) for action, call in zip(forwards, calls, strict=True)),
        tuple(one for column in columns for k, call in enumerate(calls) for one in _crossing(column, k, call, context)),
        {one.number: one.place for one in columns if one.where == GIVEN and one.place},
        {one.number: one.place for one in columns if one.where == MADE and one.place},
        order.left,
        order.complete,
        frozenset((one.where, order.numbers[k]) for one, k in passing if order.numbers[k] not in one.known),
        sum(not column.judged for column, _ in passing),
        {number: call.rank for number, call in numbered},
        {
            number: [o for one in columns if one.where == MADE and not one.place and (o := one.observed[k]) is not None]
            for k, number in enumerate(order.numbers)
        },
        any(call.mixed for call in calls),
        stacks={Action(stage, kind, m): stack for m, call in numbered for kind, stack in call.stacks.items()},
        came=came,
        cleared={number: call.cleared for number, call in numbered if call.cleared},
        cut=frozenset(m for m, call in numbered if call.flowed and not call.backwards and m != UNKNOWN_MICROBATCH),
        times=(*began, *(end for end, _ in backs)) if len(began) == len(calls) else (),
    )


@dataclass(frozen=True)
class Context:
    """Conditions for judging a stage's boundary tensors. ``late``: factor still to be divided out; None: none.

    limits: rounding limits by point, tensor number and call; absent ones must agree bit for bit. None: half the digits,
    as other kernels need.
    """

    stage: int
    order: CallOrder
    sent: Sent
    late: float | None
    limits: Mapping[tuple[str, int, int], float] | None = None


def _crossing(column: Column, k: int, call: Call, context: Context) -> Iterator[Crossing]:
    observed, microbatch = column.observed[k], context.order.numbers[k]
    place = column.place if column.where == GIVEN else ""
    crossing = Crossing(
        Action(context.stage, column.kind, microbatch),
        column.what,
        False,
        False,
        None,
        column.where,
        column.judged,
        k + 1,
        place,
        call.rank,
        number=column.number,
    )
    if observed is not None and microbatch == UNKNOWN_MICROBATCH and column.place:
        yield replace(crossing, really=_of_unknown(column, observed, context))
    # An input that still equals the call's own was not overwritten, right or wrong.
    expected = call.inputs[column.number] if column.where == KEPT else column.known.get(microbatch)
    if expected is None or microbatch == UNKNOWN_MICROBATCH:
        return
    if observed is None:
        # An input freed before the backward was not needed by it.
        if column.where != KEPT and call.ran and not column.own and expected.norm:
            yield replace(crossing, really=Likeness("missing"))
        return
    limits, narrow = context.limits, ROUNDED_TO.get(observed.narrow)
    limit = expected.limit if limits is None else limits.get((column.where, column.number, k), 0.0)
    error, exact = observed.distance(expected), observed.is_same(expected)
    little = error <= limit and (limit > 0 or limits is None)
    # Half the digits exceed a narrower type, but a cast shows in each element; in a coarse one rounding is as large.
    coarse = limit == math.inf or (narrow is not None and limit >= precision_of(narrow).unit)
    same = exact or (little and (coarse or not is_rounded_sketch(observed, expected)))
    if context.late is not None and column.where in (RECEIVED, HANDED_ON):
        same = (same and (is_near(context.late, 1.0) or not expected.norm)) or is_near(
            observed.factor(expected), context.late
        )
        exact = exact and same
    # If the call returns its received tensor unchanged, later places show it too.
    out = {GIVEN: call.outputs, RECEIVED: [*call.input_gradients.values()]}.get(column.where, [])
    passed_on = observed.digest in {one.digest for one in out}
    really = None if same else _really(column, observed, expected, k, context, passed_on=passed_on)
    faint = not same and error <= _FAINT * limit
    other_form = limits is not None and really is not None and really.kind == "shape"
    if other_form and not column.place.startswith(INPUT):  # data keep their form
        crossing = replace(crossing, judged=False)  # stages may have padded or trimmed it
    yield replace(crossing, same=same, exact=exact, really=really, faint=faint, error=error, limit=limit)


def _really(
    column: Column, observed: Sketch, expected: Sketch, k: int, context: Context, *, passed_on: bool
) -> Likeness:
    """Identify ``observed`` in call ``k``, beside its expectation. ``passed_on``: the call also returns it."""
    observed = observed.widen(expected.dtype)
    microbatch, inferred = context.order.numbers[k], context.order.inferred.get(k, "")
    hint = f" (taken for microbatch {microbatch}: {inferred})" if inferred else ""
    late = context.late if column.where in (RECEIVED, HANDED_ON) else None
    owners = sorted(
        m for m in column.owners(observed) - {microbatch} if is_far_nearer(observed, column.known[m], expected)
    )
    if math.prod(observed.shape) == 1:  # chance makes single numbers match
        owners = [one for one in owners if column.known[one].digest == observed.digest]
    made = _empty(observed, hint)
    if made is None and late is not None:  # a cast through a narrower type, beside the factor
        cast = of_sketches(observed, expected.times(late))
        made = cast if cast is not None and cast.kind == "rounded" else None
    made = made or _times(observed, expected, late)
    if owners and not is_rounded_sketch(observed, expected):
        return Likeness(
            "other", label=Label(Point(context.stage, owners[0], column.where)), words=f"microbatch {owners[0]}'s"
        )
    if observed.shape != expected.shape:
        return Likeness("shape", forms=(f"shape {list(observed.shape)}", f"{list(expected.shape)}"))
    if made is not None:
        return made
    point, words = _find_sender(column, observed, context)
    if point is None or point[:2] == (context.stage, microbatch):
        point = None
    elif point.microbatch != microbatch:  # a known sender outweighs places in the model
        return Likeness("other", label=Label(point), words=words)
    # A stage's own output is no message, even if it resembles another tensor in the model.
    kind = "different" if column.where in (MADE, HANDED_ON) else "other"
    for place, owner, of, known in _anywhere(column, observed):
        if not is_far_nearer(observed, known, expected):
            continue  # coarse types match many tensors
        if (place, owner) == (column.place, microbatch) or (passed_on and owner == microbatch):
            continue  # nearly its own, or derived from it
        if owner == microbatch and is_part(place, column.place):
            return Likeness("different", words=f"a part of its own alone: {place}")
        whose = f"the {of}{place}{OF_ANOTHER_PLACE}" if owner == microbatch else f"microbatch {owner}'s {of}{place}"
        return Likeness(kind, words=whose)
    if point is not None:
        return Likeness("other", label=Label(point), words=words)
    if nearest_sketch(observed, column.known) == microbatch:
        return Likeness("noisy")
    return Likeness("different", words=f"no microbatch's{hint}", error=None if hint else observed.distance(expected))


def _find_sender(column: Column, observed: Sketch, context: Context) -> tuple[Point | None, str]:
    """Return the stage output behind an input, with words.

    None for an unknown tensor from the right stage: it is expected.
    """
    point, words = context.sent.get(observed.digest, (None, ""))
    if point is None or column.where not in _FROM:
        return None, ""
    expected = _FROM[column.where] == (point.stage - context.stage, point.where)
    return (None, "") if expected and point.microbatch == UNKNOWN_MICROBATCH else (point, words)


def _anywhere(column: Column, observed: Sketch) -> Iterator[tuple[str, int, str, Sketch]]:
    """Yield reference places, microbatches and tensors that match ``observed``, gradients included."""
    flows = (column.places, column.elsewhere)
    activation, gradient = flows if column.where in (*FORWARD_POINTS, KEPT) else reversed(flows)
    for flow, of in ((activation, ""), (gradient, "gradient of ")) if observed.norm else ():
        yield from ((place, owner, of, flow[place][owner]) for place, owner in flow.find(observed))


def _times(observed: Sketch, expected: Sketch, late: float | None) -> Likeness | None:
    """Identify ``observed`` as a change of ``expected``, beside the ``late`` factor common to all gradients."""
    what, times = of_sketches(observed, expected), late
    if what is None and late is not None:  # it may lack that factor
        what, times = of_sketches(observed, expected.times(late)), 1.0
    if late is None or times is None or what is None or what.factor is None:
        return what
    factor = what.factor / times
    return replace(what, words=f"{factor:.6g} times the expected, beside {late:.6g} in every stage", factor=factor)


def _of_unknown(column: Column, observed: Sketch, context: Context) -> Likeness:
    """Identify a tensor with an unknown microbatch."""
    point, words = _find_sender(column, observed, context)
    if (made := _empty(observed)) is not None:
        return made
    if point is not None:
        return Likeness("other", label=Label(point), words=words)
    found = (f"microbatch {owner}'s {of}{place}" for place, owner, of, _ in _anywhere(column, observed))
    unknown = "like no module output or gradient of the reference, so its microbatch is not known"
    return Likeness("different", words=next(found, unknown))


def _empty(observed: Sketch, hint: str = "") -> Likeness | None:
    """Identify a tensor without content; ``hint``: the reason for its number."""
    if not math.isfinite(observed.norm):
        return Likeness("not-finite", words=f"not finite{hint}")
    return None if observed.norm else Likeness("zero", words=f"zero{hint}")

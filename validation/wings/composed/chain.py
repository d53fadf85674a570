"""The chain of a step: a stage received what another sent, and sends the same when it runs again.

The structure is known: outputs belong to their stage, and inputs are outputs of other stages, or data. Content that
calls share tells the microbatch of each call.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from pipeproof.core.limits import precision_of
from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.elements import is_rounded
from pipeproof.core.observe.observed import INPUT, UNKNOWN_MICROBATCH, Crossing, Passed
from pipeproof.core.observe.recording import GIVEN, HANDED_ON, KEPT, MADE, RECEIVED
from pipeproof.core.observe.sketch import Sketch
from pipeproof.core.reason import Reason
from pipeproof.pipeline.action import Kind
from pipeproof.whitebox.call_matching import CallOrder, Column, columns_at
from pipeproof.whitebox.crossings import Context, collect_sent, find_detached, passages_of
from pipeproof.whitebox.tensor_index import TOGETHER, Both, Places
from pipeproof.wings.composed.link import (
    TARGETS,
    Data,
    Input,
    Link,
    Output,
    Source,
    Sources,
    StageCalls,
    as_sent,
    is_target,
)

_AS_SENT = "its call came in the order of those before it"
_UNNAMED = frozenset({"different", "noisy"})  # a gradient with further addends looks like these
_OUTSIDE = (
    "a backward of one number{}, as of a loss, comes to what stage {} gave, and what came there is not what was sent, "
    "so what is expected is not known; let the stage itself add such a loss, or hand it on for the last stage's to add"
)
_SEVERAL = "stage {} gives several tensors and cannot be rerun, so gradients between its outputs are not checked"
Limits = defaultdict[tuple[str, int, int], float]  # by where, the tensor's number, and its call's


class Chain:
    """Calls of all ``stages``, by number; ``data`` is each microbatch's content.

    ``sources``: where inputs come from. ``orders``: by stage, the microbatch of each call.
    """

    def __init__(self, stages: Mapping[int, StageCalls], data: Data) -> None:
        self.stages = as_sent(dict(sorted(stages.items())))
        self.data = data
        self.sources = Sources(self.stages, data)
        self.orders: dict[int, CallOrder] = {}
        for stage in self.stages:
            self.orders[stage] = self._order(stage)

    @property
    def microbatches(self) -> int:
        return len(self.data)

    @property
    def last(self) -> int:
        """Number of the last stage."""
        return max(self.stages)

    def calls(self, stage: int) -> list[tuple[int, Call]]:
        """Return the calls of ``stage``, each with its microbatch."""
        return [*zip(self.orders[stage].numbers, self.stages[stage].calls, strict=True)]

    def with_flowing_gradients(self) -> "Chain":
        """Return the chain with gradients asked for exactly the inputs through which they should flow.

        A gradient that is lost, or asked for in vain, is followed through stages that train nothing.
        """
        chain = self
        for stage, here in self.stages.items():
            pairs = list(zip(here.calls, chain.flowing(stage), strict=True))
            if all(flowing == call.needing for call, flowing in pairs):
                continue
            giving = list[frozenset[int]]()
            for call, flowing in pairs:
                made = {n for n, one in enumerate(call.outputs) if is_rounded(one.dtype)} - call.repeated.keys()
                more = made if flowing - call.needing else frozenset[int]()
                giving.append(call.giving | more if flowing or here.trains else frozenset())
            calls = tuple(replace(call, giving=one) for call, one in zip(here.calls, giving, strict=True))
            chain = Chain({**chain.stages, stage: replace(here, calls=calls)}, self.data)
        return chain

    def flowing(self, stage: int) -> list[frozenset[int]]:
        """Return, for each call, the inputs to which a gradient should flow: to a weight, or to an unknown end.

        A call that needs none, though its sender does, lost it on the way.
        """
        found = [set[int]() for _ in self.stages[stage].calls]
        for number in (number for of, number in self.sources.inputs if of == stage):
            of, n = self.sources.of_inputs.get((stage, number), (None, 0))
            sent = {c.outputs[n].digest for c in (() if of is None else self.stages[of].calls) if n in c.giving}
            for own, call in zip(found, self.stages[stage].calls, strict=True):
                if number in call.needing:
                    own |= {number} if of is None or sent else set()
                elif (
                    number < len(call.inputs) and number not in call.given_again and call.inputs[number].digest in sent
                ):
                    own.add(number)
        return [frozenset(own) for own in found]

    def as_meant(self, pairs: Mapping[int, int]) -> "Chain | None":
        """Return the chain with calls meant for other microbatches, behind a crossing between two stages.

        ``pairs``: these microbatches. The crossing is at the first stage whose gradients came back to other
        microbatches, in agreement with the targets of the loss. None without such a stage.
        """
        for stage in [one for one in self.stages if one - 1 in self.stages]:
            handed = {one.digest: m for m, c in self.calls(stage) for one in c.input_gradients.values() if one.norm}
            flows = [(m, one.digest) for m, call in self.calls(stage - 1) for one in call.output_gradients.values()]
            came = {handed[digest]: m for m, digest in flows if digest in handed}
            if any(of != m for of, m in came.items()) and all(pairs.get(of, of) == m for of, m in came.items()):
                return Chain({**self.stages, stage: replace(self.stages[stage], meant=pairs)}, self.data)
        return None

    def _order(self, stage: int) -> CallOrder:
        """Number the calls of ``stage`` by most of their inputs; an input of unknown origin counts for none."""
        numbers, meant = list[int](), self.stages[stage].meant
        for call in self.stages[stage].calls:
            votes = Counter[int]()
            for number, one in enumerate(call.inputs):
                source = self.sources.of_inputs.get((stage, number))
                brought = [] if source is None else self._sketches_from(source)
                votes.update({m for m, sent in brought if sent.digest == one.digest})
            those = {meant.get(m, m) for m, count in votes.items() if count == max(votes.values())}
            numbers.append(min(those - {*numbers} or those, default=UNKNOWN_MICROBATCH))
        usual = self.orders[stage - 1].numbers if stage - 1 in self.orders else ()
        left = [
            m for m in dict.fromkeys((*usual, *range(self.microbatches))) if m not in {*numbers, UNKNOWN_MICROBATCH}
        ]
        inferred: dict[int, str] = {}
        for k, number in enumerate(numbers):
            if number == UNKNOWN_MICROBATCH and left:
                numbers[k], inferred[k] = left.pop(0), _AS_SENT
        return CallOrder(tuple(numbers), tuple(sorted(left)), inferred)

    def _sketches_from(self, source: Source) -> list[tuple[int, Sketch]]:
        """Return the tensors from this source, each with its microbatch if known."""
        of, at = source
        if of is None:
            return [(m, those[at]) for m, those in enumerate(self.data) if at in those]
        made = [(m, call.outputs[at]) for m, call in self.calls(of) if at < len(call.outputs)]
        return [(m, one) for m, one in made if m != UNKNOWN_MICROBATCH]

    @cached_property
    def consumers(self) -> dict[Output, list[Input]]:
        """Map each output to the inputs that return, or may return, gradients to it."""
        found: dict[Output, list[Input]] = {}
        for at, source in self.sources.of_inputs.items():
            for of, n in {source, *self.sources.unsure.get(at, ())} if self.sources.flows(at) else ():
                if of is not None and any(n in call.giving or n in call.output_gradients for _, call in self.calls(of)):
                    found.setdefault((of, n), []).append(at)
        return found

    def passages(self, links: Mapping[int, Sequence[Link]]) -> dict[int, Passed]:
        """Return the flow through every stage, given the ``links`` of rerun calls."""
        again, sent = (Places(), Places()), (Places(), Places())  # of the rerun stages, and of the messages
        limits = {stage: Limits(float) for stage in links}
        for source in self.sources.sent:
            for m, one in self._sketches_from(source):
                sent[0].add(place_of(source), m, one)
        for stage in self.stages:
            for k, ((m, call), link) in enumerate(zip(self.calls(stage), links[stage], strict=True)):
                limits[stage].update({(*at, k): limit for at, limit in link.allowed.items()})
                if m == UNKNOWN_MICROBATCH:
                    continue
                for number, one in call.input_gradients.items():
                    sent[1].add(input_of(stage, number), m, one)
                for where, number in link.gives.keys() - link.strange:  # strange places have no expected value
                    name = input_of(stage, number) if where == HANDED_ON else place_of((stage, number))
                    again[where != MADE].add(name, m, link.gives[where, number])
        self._add_sums(sent[1], limits)
        columns = {stage: list(self._columns(stage, again, sent, limits[stage])) for stage in self.stages}
        content = collect_sent(
            {stage: (here.calls, columns[stage]) for stage, here in self.stages.items()}, self.orders
        )
        found: dict[int, Passed] = {}
        for stage, here in self.stages.items():
            context = Context(stage, self.orders[stage], content, None, limits[stage])
            before = self.stages[stage - 1].calls if stage - 1 in self.stages else ()
            lost = find_detached(before, here.calls, self.orders[stage])
            flow = replace(passages_of(stage, here.calls, columns[stage], context), detached=lost)
            if stage != self.last and why_unsure(stage, here, links[stage]):  # more may have come
                flow = replace(flow, crossings=tuple(map(_as_known, flow.crossings)))
            found[stage] = flow
        return found

    def _add_sums(self, handed: Places, limits: Mapping[int, Limits]) -> None:
        """Sum the gradients that inputs ``handed`` back to an output with several consumers, and add the sums.

        Enters into ``limits`` how far rounding may put each sum, and each gradient that came in parts.
        """
        for (stage, number), those in self.consumers.items():
            parts = [handed.get(input_of(*one), {}) for one in those]
            for m in set(parts[0]).intersection(*parts[1:]):
                whole, *others = [part[m] for part in parts]
                alike = all((one.shape, one.dtype) == (whole.shape, whole.dtype) for one in others)
                if not alike or not (others or self._in_parts(those[0], m)):
                    continue
                size = sum(self._in_parts(at, m) or part[m].norm for at, part in zip(those, parts, strict=True))
                for one in (part for part in others if part.norm):  # zeros change nothing
                    whole = whole.plus(one) if whole.norm else one
                rounding = precision_of(whole.dtype).least * size
                if others:  # if they cancel, the rest may be pure rounding
                    whole = replace(whole, norm=max(whole.norm, rounding))
                    handed.add(_sum_of(those), m, whole)
                for k, of in enumerate(self.orders[stage].numbers):
                    if of == m:
                        limits[stage][RECEIVED, number, k] += rounding / (whole.norm or math.inf)

    def _in_parts(self, at: Input, m: int) -> float:
        """Size of the parts of an input's gradient; 0 if it came whole."""
        return sum(one.norm for of, call in self.calls(at[0]) if of == m for one in call.in_parts.get(at[1], ()))

    def _columns(self, stage: int, again: Both, sent: Both, limits: Limits) -> Iterator[Column]:
        """Yield the flow through a stage, by place and number; enter rounding on arrival into ``limits``."""
        calls = self.stages[stage].calls
        given = {n: place_of(source) for (of, n), source in self.sources.of_inputs.items() if of == stage}
        made = {n: place_of((stage, n)) for n in range(max((len(call.outputs) for call in calls), default=0))}
        known = {at: those for at, those in self.consumers.items() if at not in self.sources.untold}
        came = {n: _sum_of(those) for (of, n), those in known.items() if of == stage}
        handed = {n: input_of(of, n) for of, n in self.sources.inputs if of == stage}
        for where, named, flows in (
            (GIVEN, given, sent),
            (MADE, made, again),
            (KEPT, given, sent),
            (RECEIVED, *((came, sent) if stage != self.last else (made, again))),
            (HANDED_ON, handed, again),
        ):
            expected = {n for n, place in named.items() if place in flows[where in (RECEIVED, HANDED_ON)]}
            for column in columns_at(where, calls, flows, expected):
                place = named.get(column.number, "")
                own = (place,) if place and column.kind is Kind.FORWARD else ()
                column = replace(column, own=own, place=place, judged=where == KEPT or bool(place))
                yield self._round(column, stage, limits) if where == RECEIVED else column

    def _round(self, column: Column, stage: int, limits: Limits) -> Column:
        """Cast gradients of ``column`` to the narrower type in which they arrived.

        A gradient has the type of its output. Enters its rounding into ``limits``: infinite if numbers may be too large
        for the type, because overflow then looks like a fault.
        """
        found = list(column.observed)
        for k, (m, call) in enumerate(self.calls(stage)):
            came, sent = found[k], column.known.get(m)
            if came is None or sent is None or column.number >= len(call.outputs):
                continue
            wide = came.widen(sent.dtype)
            if wide is not came and came.dtype == call.outputs[column.number].dtype and not came.is_same(sent):
                found[k], narrow = wide, torch.finfo(came.dtype)
                fits = math.isfinite(came.norm) or sent.norm <= narrow.max  # no element is above the norm
                limits[RECEIVED, column.number, k] += narrow.eps if fits else math.inf
        return replace(column, observed=tuple(found))


def together(chain: Chain, own: Mapping[int, Sequence[Call]]) -> tuple[Chain, dict[int, list[Call]]]:
    """Merge several backwards of a stage into one, in ``chain`` and in this rank's ``own`` calls.

    Consumers, outputs and terms of a loss may each have their own. The last stage comes first: parts that it hands on
    arrive as parts elsewhere.
    """
    stages, calls = dict(chain.stages), {stage: list(those) for stage, those in own.items()}
    for stage, here in sorted(stages.items(), reverse=True):
        sent: dict[int, dict[int, list[Sketch]]] = {}  # what consumers, sure or possible, sent back, by microbatch
        for number, inputs in ((number, inputs) for (of, number), inputs in chain.consumers.items() if of == stage):
            for consumer, at in sorted(inputs):
                for m, call in zip(chain.orders[consumer].numbers, stages[consumer].calls, strict=True):
                    if at in call.input_gradients:
                        back = sent.setdefault(m, {}).setdefault(number, [])
                        back += [call.input_gradients[at], *call.in_parts.get(at, ())]
        numbered = zip(calls.get(stage, here.calls), chain.orders[stage].numbers, strict=True)
        both = [call.together(sent.get(m, {})) for call, m in numbered]
        stages[stage] = replace(here, calls=tuple(replace(call, again=None) for call in both))
        calls |= {stage: both} if stage in own else {}
    return Chain(stages, chain.data), calls


def why_unsure(stage: int, here: StageCalls, links: Sequence[Link]) -> str:
    """Say why an inner ``stage``'s outputs may get other gradients than the messages; empty without a reason.

    Reasons: a loss outside; or another output made of this output, which only a rerun of the stage shows.
    """
    if here.outside is not None:
        where = f" at {here.outside[0].place}" if here.outside else ""
        return Reason.OWN_BACKWARD.doubt(_OUTSIDE.format(where, stage))
    again = all(link.gives for link in links)
    several = not again and any(len(call.giving) > 1 for call in here.calls)
    return Reason.LINK.doubt(_SEVERAL.format(stage)) if several else ""


def _as_known(one: Crossing) -> Crossing:
    unnamed = one.where == RECEIVED and one.really is not None and one.really.kind in _UNNAMED
    return replace(one, same=True, judged=False) if unnamed and one.judged else one


def place_of(source: Source) -> str:
    """Name of a source among the places of tensors."""
    stage, number = source
    if stage is not None:
        return f"output {number} of stage {stage}"
    return f"{INPUT} (target {number - TARGETS})" if is_target(source) else f"{INPUT} {number}"


def _sum_of(inputs: Sequence[Input]) -> str:
    return TOGETHER.join(input_of(*one) for one in inputs)


def input_of(stage: int, number: int) -> str:
    """Name of an input among the places of gradients."""
    return f"input {number} of stage {stage}"

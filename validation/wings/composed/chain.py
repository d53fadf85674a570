"""The chain of a step: what each stage received is what another sent, and what it sent is what it gives again.

Structure is known here and not looked for: a stage's outputs are its own, and its inputs are what other stages sent, or
data. By what they have in common, call by call, it is known which microbatch each call is about.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from pipeproof.core.limits import precision_of
from pipeproof.foreign.call_matching import Column, Order
from pipeproof.foreign.crossings import Context, detached, passed_of, sent_by
from pipeproof.foreign.survey import TOGETHER, Places
from pipeproof.observers.calls import Call
from pipeproof.observers.elements import is_rounded
from pipeproof.observers.observed import INPUT, UNKNOWN_MICROBATCH, Passed
from pipeproof.observers.recording import GIVEN, HANDED_ON, KEPT, MADE, RECEIVED
from pipeproof.pipeline.action import Kind
from pipeproof.wings.composed.link import Link
from pipeproof.wings.composed.outside import as_far_as_known, why_unsure
from pipeproof.wings.composed.own_calls import Limited, StageSeen, as_sent, in_types_of_outputs
from pipeproof.wings.composed.sources import TARGETS, Data, Source, Sources, is_target

_AS_SENT = "its call came in the order of those before it"


class Chain:
    """The calls of all ``stages``, by number; ``data`` is what each microbatch brings."""

    def __init__(self, stages: Mapping[int, StageSeen], data: Data) -> None:
        self.stages = as_sent(dict(sorted(stages.items())))
        self.data = data
        self.sources = Sources(self.stages, data)

    @property
    def microbatches(self) -> int:
        return len(self.data)

    def with_due_gradients(self) -> "Chain":
        """The same, where outputs bring a gradient as if each input were asked for the one that is due, and no other.

        So a gradient that is lost, or asked for in vain, is followed through stages that train nothing.
        """
        chain = self
        for stage, seen in self.stages.items():
            due = chain.due(stage)
            if any(inputs != call.needing for call, inputs in zip(seen.calls, due, strict=True)):
                calls = (
                    _giving(call, inputs, trains=seen.trains) for call, inputs in zip(seen.calls, due, strict=True)
                )
                chain = Chain({**chain.stages, stage: replace(seen, calls=tuple(calls))}, self.data)
        return chain

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return max(self.stages)

    @cached_property
    def orders(self) -> dict[int, Order]:
        """The microbatch of every call."""
        found: dict[int, Order] = {}
        for stage in self.stages:
            found[stage] = self._order(stage, found)
        return found

    def lost(self, stage: int) -> list[frozenset[int]]:
        """Of each call, the inputs that lost on their way that a gradient flows to them: it does to what was sent."""
        return [due - call.needing for due, call in zip(self.due(stage), self.stages[stage].calls, strict=True)]

    def due(self, stage: int) -> list[frozenset[int]]:
        """Of each call, the inputs to which a gradient should flow: it leads to a weight, or nobody knows where to."""
        flowing = {number: self._flowing(stage, number) for number in range(self.sources.inputs(stage))}

        def is_due(number: int, call: Call) -> bool:
            those = flowing[number]
            if number in call.needing:
                return those is None or bool(those)
            return those is not None and number not in call.given_again and call.inputs[number].digest in those

        return [frozenset(n for n in range(len(call.inputs)) if is_due(n, call)) for call in self.stages[stage].calls]

    def _flowing(self, stage: int, number: int) -> set[bytes] | None:
        """What was sent as this input and brings a gradient; None where no stage is known to have sent it."""
        of, at = self.sources.of_inputs.get((stage, number), (None, 0))
        return None if of is None else {one.outputs[at].digest for one in self.stages[of].calls if at in one.giving}

    @property
    def meant(self) -> int | None:
        """The stage from which on calls are of other microbatches than their inputs; None if there is none."""
        return next((stage for stage, seen in self.stages.items() if seen.meant), None)

    def as_meant(self, pairs: Mapping[int, int]) -> "Chain | None":
        """The same, where messages between two stages crossed: from there on, calls are meant for other microbatches.

        ``pairs`` has these. That is at the first stage whose gradients came back to other microbatches, as the
        targets of the loss agree. None where there is no such stage.
        """
        for stage in [one for one in self.stages if one - 1 in self.stages]:
            calls = zip(self.stages[stage].calls, self.orders[stage].numbers, strict=True)
            before = zip(self.stages[stage - 1].calls, self.orders[stage - 1].numbers, strict=True)
            handed = {one.digest: m for call, m in calls for one in call.input_gradients.values() if one.norm}
            flows = [(m, one.digest) for call, m in before for one in call.output_gradients.values()]
            came = {handed[digest]: m for m, digest in flows if digest in handed}
            if any(of != m for of, m in came.items()) and all(pairs.get(of, of) == m for of, m in came.items()):
                return Chain({**self.stages, stage: replace(self.stages[stage], meant=pairs)}, self.data)
        return None

    def passed(self, links: Mapping[int, Sequence[Link]]) -> dict[int, Passed]:
        """What passed every stage, where its calls give ``links`` when they are run again."""
        again, sent = self._places(links)
        sums = self._add_sums(sent[1])
        stages, narrowed = dict[int, tuple[Sequence[Call], list[Column]]](), dict[int, dict[Limited, float]]()
        for stage, seen in self.stages.items():
            columns = self._columns(stage, again, sent)
            read = [in_types_of_outputs(column, seen.calls, self.orders[stage].numbers) for column in columns]
            stages[stage] = seen.calls, [column for column, _ in read]
            narrowed[stage] = {at: limit for _, limits in read for at, limit in limits.items()}
        content = sent_by(stages, self.orders)
        found: dict[int, Passed] = {}
        for stage, (calls, seen_there) in stages.items():
            limits = {(*at, k): limit for k, link in enumerate(links[stage]) for at, limit in link.allowed.items()}
            limits |= narrowed[stage]
            for k, m in enumerate(self.orders[stage].numbers):
                for number in {at for of, at, whose in sums if (of, whose) == (stage, m)}:
                    at = (RECEIVED, number, k)
                    limits[at] = limits.get(at, 0.0) + sums[stage, number, m]
            context = Context(stage, self.orders[stage], content, None, limits)
            before = self.stages[stage - 1].calls if stage - 1 in self.stages else ()
            lost = detached(before, calls, self.orders[stage])
            found[stage] = replace(passed_of(stage, calls, seen_there, context), detached=lost)
            if stage != self.last and why_unsure(stage, self.stages[stage], links[stage]):
                found[stage] = as_far_as_known(found[stage])
        return found

    @cached_property
    def consumers(self) -> dict[Source, list[tuple[int, int]]]:
        """The inputs from which gradients flow back to each output, as stages and numbers."""
        found: dict[Source, list[tuple[int, int]]] = {}
        for (stage, number), source in self.sources.of_inputs.items():
            of, at = source
            if of is None or not any(
                at in call.giving or at in call.output_gradients for call in self.stages[of].calls
            ):
                continue
            if any(number in call.needing for call in self.stages[stage].calls):
                found.setdefault(source, []).append((stage, number))
        return found

    def _add_sums(self, handed: Places) -> dict[tuple[int, int, int], float]:
        """Add what flows together to outputs that several inputs are of, to the places of what was ``handed`` back.

        By stage, number and microbatch: how far rounding may put each sum, and what came back in parts.
        """
        limits: dict[tuple[int, int, int], float] = {}
        for (stage, number), those in self.consumers.items():
            parts = [handed.get(_handed(*one), {}) for one in those]
            for m in set(parts[0]).intersection(*parts[1:]):
                whole, *others = [part[m] for part in parts]
                alike = all((one.shape, one.dtype) == (whole.shape, whole.dtype) for one in others)
                if stage is None or not alike or not (others or self._in_parts(*those[0], m)):
                    continue
                size = sum(self._in_parts(*one, m) or part[m].norm for one, part in zip(those, parts, strict=True))
                for one in (part for part in others if part.norm):  # zeros change nothing
                    whole = whole.plus(one) if whole.norm else one
                rounding = precision_of(whole.dtype).least * size
                if others:  # where they cancel, what is left is as large as rounding of what came
                    whole = replace(whole, norm=max(whole.norm, rounding))
                    handed.add(_sum_of(those), m, whole)
                limits[stage, number, m] = rounding / (whole.norm or math.inf)
        return limits

    def _in_parts(self, stage: int, number: int, m: int) -> float:
        """The sizes of the parts in which the gradient of an input came; 0 where it came whole."""
        pairs = zip(self.stages[stage].calls, self.orders[stage].numbers, strict=True)
        return sum(one.norm for call, of in pairs if of == m for one in call.in_parts.get(number, ()))

    def _order(self, stage: int, before: Mapping[int, Order]) -> Order:
        calls, meant = self.stages[stage].calls, self.stages[stage].meant
        numbers: list[int | None] = [None] * len(calls)
        owners = [{meant.get(m, m) for m in self._owners(stage, call, before)} for call in calls]
        for k, those in enumerate(owners):
            free = sorted(those - {number for number in numbers if number is not None})
            if those:
                numbers[k] = (free or sorted(those))[0]
        usual = [n for one in [before.get(stage - 1)] if one is not None for n in one.numbers if n >= 0]
        left = [m for m in dict.fromkeys((*usual, *range(self.microbatches))) if m not in numbers]
        inferred: dict[int, str] = {}
        for k, number in enumerate(numbers):
            if number is None and left:
                numbers[k], inferred[k] = left.pop(0), _AS_SENT
        told = tuple(UNKNOWN_MICROBATCH if number is None else number for number in numbers)
        return Order(told, tuple(sorted(set(range(self.microbatches)) - set(told))), inferred)

    def _owners(self, stage: int, call: Call, before: Mapping[int, Order]) -> set[int]:
        """The microbatches of which all that ``call`` was given may be; of one that is nobody's, nothing is told."""
        told = []
        for number, one in enumerate(call.inputs):
            other, at = self.sources.of_inputs.get((stage, number), (None, -1))
            if other is not None:
                pairs = zip(self.stages[other].calls, before[other].numbers, strict=True)
                told.append(
                    {m for sent, m in pairs if at < len(sent.outputs) and sent.outputs[at].digest == one.digest}
                )
            elif at >= 0:
                brought = [(m, those[at]) for m, those in enumerate(self.data) if at in those]
                told.append({m for m, its in brought if its.digest == one.digest})
        known = [own for those in told if (own := those - {UNKNOWN_MICROBATCH})]
        common = set.intersection(*known) if known else set()
        if common or not known:
            return common
        said = Counter(m for those in known for m in those)
        most = max(said.values())
        return {m for m, count in said.items() if count == most}

    def _places(self, links: Mapping[int, Sequence[Link]]) -> tuple[tuple[Places, Places], tuple[Places, Places]]:
        """What stages give again, and what they sent: tensors, and what flows back."""
        again, sent = (Places(), Places()), (Places(), Places())
        for m, brought in enumerate(self.data):
            for number, one in brought.items():
                sent[0].add(place_of((None, number)), m, one)
        for stage, seen in self.stages.items():
            for call, m, link in zip(seen.calls, self.orders[stage].numbers, links[stage], strict=True):
                if m == UNKNOWN_MICROBATCH:
                    continue
                for number, one in enumerate(call.outputs):
                    sent[0].add(_output(stage, number), m, one)
                for number, one in call.input_gradients.items():
                    sent[1].add(_handed(stage, number), m, one)
                for where, number in link.gives.keys() - link.strange:  # of what is strange nobody knows what is due
                    one = link.gives[where, number]
                    name = _handed(stage, number) if where == HANDED_ON else _output(stage, number)
                    again[where != MADE].add(name, m, one)
        return again, sent

    def _columns(self, stage: int, again: tuple[Places, Places], sent: tuple[Places, Places]) -> Iterator[Column]:
        calls = self.stages[stage].calls
        for where, what, part in _PARTS:
            rows = [getattr(call, part) for call in calls]
            members = [row if isinstance(row, dict) else dict(enumerate(row)) for row in rows]
            places, elsewhere, named = self._flow(stage, where, again=again, sent=sent)
            due = {number for number, place in named.items() if place in places}
            for number in sorted(set().union(due, *members)):
                seen = tuple(member.get(number) for member in members)
                place = named.get(number, "")
                kind = Kind.FORWARD if where in (GIVEN, MADE) else Kind.BACKWARD
                name = f"{what} {number}" if number else what
                own = (place,) if place and kind is Kind.FORWARD else ()
                judged = where == KEPT or bool(place)
                yield Column(kind, where, name, number, seen, places, elsewhere, own, place, judged)

    def _flow(
        self,
        stage: int,
        where: str,
        *,
        again: tuple[Places, Places],
        sent: tuple[Places, Places],
    ) -> tuple[Places, Places, dict[int, str]]:
        """What should pass there, what flows the other way, and the place of each tensor by its number."""
        inputs = {number: source for (of, number), source in self.sources.of_inputs.items() if of == stage}
        if where in (GIVEN, KEPT):
            return sent[0], sent[1], {n: place_of(source) for n, source in inputs.items()}
        if where == MADE:
            count = max((len(call.outputs) for call in self.stages[stage].calls), default=0)
            return again[0], again[1], {n: _output(stage, n) for n in range(count)}
        if where == HANDED_ON:
            return again[1], again[0], {n: _handed(stage, n) for n in range(self.sources.inputs(stage))}
        if stage == self.last:
            count = max((len(call.outputs) for call in self.stages[stage].calls), default=0)
            return again[1], again[0], {n: _output(stage, n) for n in range(count)}
        known = self.consumers.keys() - self.sources.untold
        came = {n: self.consumers[of, n] for of, n in known if of == stage}
        return sent[1], sent[0], {n: _sum_of(those) for n, those in came.items()}


def _giving(call: Call, due: frozenset[int], *, trains: bool) -> Call:
    """``call``, were gradients ``due`` to these of its inputs. ``trains``: its stage has weights to be trained."""
    if due - call.needing:
        made = {n for n, one in enumerate(call.outputs) if is_rounded(one.dtype)}
        return replace(call, giving=call.giving | made - call.repeated.keys())
    return call if due or trains else replace(call, giving=frozenset())


_PARTS = (
    (GIVEN, "input", "inputs"),
    (MADE, "output", "outputs"),
    (KEPT, "input when the backward begins", "kept"),
    (RECEIVED, "output gradient", "output_gradients"),
    (HANDED_ON, "input gradient", "input_gradients"),
)


def place_of(source: Source) -> str:
    """What it is called among the places of tensors."""
    stage, number = source
    if stage is not None:
        return _output(stage, number)
    return f"{INPUT} (target {number - TARGETS})" if is_target(source) else f"{INPUT} {number}"


def _output(stage: int, number: int) -> str:
    return f"output {number} of stage {stage}"


def _sum_of(inputs: Sequence[tuple[int, int]]) -> str:
    return TOGETHER.join(_handed(*one) for one in inputs)


def _handed(stage: int, number: int) -> str:
    return f"input {number} of stage {stage}"  # among gradients

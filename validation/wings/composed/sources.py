"""Where the inputs of stages come from: an output of another stage, or data; content tells, and else their form."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

import torch

from pipeproof.observers.elements import is_rounded
from pipeproof.observers.sketch import Sketch
from pipeproof.wings.composed.own_calls import StageSeen

Data = Sequence[Mapping[int, Sketch]]  # of each microbatch, its tensors by number: its inputs, then its targets
Source = tuple[int | None, int]  # the stage that a tensor is an output of, and its number; None: of the data
TARGETS = 1 << 16  # the number of a microbatch's first target


class Sources:
    """Where each input of ``stages`` comes from, as far as that is known; ``data`` is what each microbatch brings."""

    def __init__(self, stages: Mapping[int, StageSeen], data: Data) -> None:
        self.stages, self.data = stages, data

    @property
    def of_inputs(self) -> dict[tuple[int, int], Source]:
        """Where each stage's inputs come from, by their numbers, as far as that is known."""
        return self._wired[0]

    @property
    def unsure(self) -> Mapping[tuple[int, int], Sequence[tuple[int, int]]]:
        """The inputs that may be any of these equal outputs."""
        return self._wired[1]

    @property
    def untold(self) -> Collection[tuple[int, int]]:
        """The outputs of which nobody knows what should have flowed back to them."""
        return {output for those in self.unsure.values() for output in those}

    @cached_property
    def _wired(self) -> tuple[dict[tuple[int, int], Source], Mapping[tuple[int, int], Sequence[tuple[int, int]]]]:
        found: dict[tuple[int, int], Source] = {}
        for source_of in (self._as_sent, self._of_its_form):  # what came as it was sent leaves less to guess from
            for stage, number in self.places_in:
                if (stage, number) in found:
                    continue
                if (source := source_of(stage, number, set(found.values()))) is not None:
                    found[stage, number] = self._first_of(source)
        equal = self._equal(found)
        forced = _one_each(equal, {source for at, source in found.items() if at not in equal and self._flows(*at)})
        found |= forced
        for stage, at in self._unreceived(found):
            if (due := self._due_at(stage, at, found)) is not None:
                found[stage + 1, due] = stage, at
        return found, {} if forced else equal

    def _equal(self, sources: Mapping[tuple[int, int], Source]) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """Of inputs that gradients flow through, and that may be any of several equal outputs: these.

        What was found comes first.
        """
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for (stage, number), source in sources.items():
            votes = self._votes(stage, number)
            if not votes[source] or not self._flows(stage, number):
                continue
            equal = [source, *(self._first_of(one) for one, count in votes.items() if count == votes[source])]
            others = {(of, at): None for of, at in equal if of is not None}
            those = list(others)
            if source[0] is not None and len(those) > 1:
                found[stage, number] = those
        return found

    def _flows(self, stage: int, number: int) -> bool:
        """Whether a gradient is to flow through an input."""
        return any(number in call.needing for call in self.stages[stage].calls)

    def _first_of(self, source: Source) -> Source:
        """``source``, or where it is the very tensor of another output, that."""
        stage, number = source
        calls = self.stages[stage].calls if stage is not None else ()
        return stage, next((call.repeated[number] for call in calls if number in call.repeated), number)

    def unreceived(self) -> list[tuple[int, int]]:
        """The outputs through which gradients should flow that no stage is known to have received, by stage."""
        return self._unreceived(self.of_inputs)

    def _unreceived(self, sources: Mapping[tuple[int, int], Source]) -> list[tuple[int, int]]:
        giving = {(s, at) for s, seen in self.stages.items() for call in seen.calls for at in call.giving}
        return sorted(one for one in giving - {*sources.values()} if one[0] != max(self.stages))

    def _due_at(self, stage: int, at: int, sources: Mapping[tuple[int, int], Source]) -> int | None:
        """The input of the next stage at which an output is due that nobody received: one of its form, of another."""
        sent = {call.outputs[at].shape for call in self.stages[stage].calls if at < len(call.outputs)}
        calls = self.stages[stage + 1].calls if stage + 1 in self.stages else ()
        fitting = [
            number
            for number in range(max((len(call.inputs) for call in calls), default=0))
            if sources.get((stage + 1, number), (None, 0))[0] != stage
            and sent >= {call.inputs[number].shape for call in calls if number < len(call.inputs)}
            and any(number in call.needing for call in calls)
        ]
        return at if at in fitting else next(iter(fitting), None)

    @property
    def places_in(self) -> Iterator[tuple[int, int]]:
        """Every stage's inputs, by their numbers."""
        for stage in self.stages:
            yield from ((stage, number) for number in range(self.inputs(stage)))

    def _came(self, stage: int, number: int) -> list[Sketch]:
        return [call.inputs[number] for call in self.stages[stage].calls if number < len(call.inputs)]

    def _as_sent(self, stage: int, number: int, taken: set[Source]) -> Source | None:
        """Where most of what came as this input was sent from. Of tensors that are equal, each is some input's."""
        votes = self._votes(stage, number)
        most = max(votes.values(), default=0)
        best = [source for source, count in votes.items() if count == most]
        found = max(best, default=None, key=lambda source: (source not in taken, source[1] == number))
        return found if 2 * most > len(self._came(stage, number)) else None

    def _of_its_form(self, stage: int, number: int, taken: set[Source]) -> Source | None:
        """What has the form of this input, and is nothing that came elsewhere as it was sent.

        Only what a gradient flows through must have been sent: positions, masks and noise a rank makes itself. What is
        the same in every call, and nobody's, is such.
        """
        came, votes = self._came(stage, number), self._votes(stage, number)
        forms = _forms(came)
        alike = [s for s, sent in self._sent(stage) if not is_target(s) and forms <= _forms(sent)]
        beside = [source for source in alike if source not in taken]
        flows = self._flows(stage, number)
        if not flows and len(came) > 1 and len({one.digest for one in came}) == 1:
            beside = [source for source in beside if votes[source]]
        fitting = [source for source in beside if source[0] is not None] or beside or (alike if flows else [])
        if stage == max(self.stages) and not flows:
            # Some targets must be as given: a rank that makes no loss may have none.
            fitting += [one for one, count in votes.items() if count and is_target(one) and one not in taken]
        return max(fitting, default=None, key=lambda source: (votes[source], source[1] == number))

    def _votes(self, stage: int, number: int) -> dict[Source, int]:
        """How much of what came as this input each source sent."""
        came = Counter(one.digest for one in self._came(stage, number))
        return {source: (came & Counter(one.digest for one in sent)).total() for source, sent in self._sent(stage)}

    def _sent(self, stage: int) -> Iterator[tuple[Source, list[Sketch]]]:
        """What can come into a stage: outputs of those before it, the nearest first, and data; for the first, data."""
        return ((source, those) for source, those in self.sent.items() if source[0] is None or source[0] < stage)

    @cached_property
    def sent(self) -> dict[Source, list[Sketch]]:
        """The outputs of stages, the last one's first, then data."""
        found: dict[Source, list[Sketch]] = {}
        for stage in sorted(self.stages, reverse=True):
            calls = self.stages[stage].calls
            for number in range(max((len(call.outputs) for call in calls), default=0)):
                found[stage, number] = [call.outputs[number] for call in calls if number < len(call.outputs)]
        for number in sorted(set().union(*self.data)):
            found[None, number] = [one[number] for one in self.data if number in one]
        return found

    def forms(self, source: Source) -> set[tuple[tuple[int, ...], torch.dtype]]:
        """The shapes and types of what it sent."""
        return {(one.shape, one.dtype) for one in self.sent[source]}

    def inputs(self, stage: int) -> int:
        """How many inputs a stage has."""
        return max((len(call.inputs) for call in self.stages[stage].calls), default=0)


def _one_each(
    equal: Mapping[tuple[int, int], Sequence[tuple[int, int]]], used: Collection[Source]
) -> dict[tuple[int, int], tuple[int, int]]:
    """The one way in which each of ``equal`` outputs goes to one input, but for those that are ``used``; else none."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for at in sorted(equal):
        free = [output for output in equal[at] if output not in used and output not in found.values()]
        if len(free) != 1:
            return {}
        found[at] = free[0]
    left = {output for those in equal.values() for output in those} - {*used, *found.values()}
    return {} if left else found


def _forms(tensors: Sequence[Sketch]) -> set[tuple[tuple[int, ...], bool]]:
    """Their shapes, and whether their numbers are rounded: a type may become another of its kind on its way."""
    return {(one.shape, is_rounded(one.dtype)) for one in tensors}


def is_target(source: Source) -> bool:
    """Whether it is a target of the microbatches."""
    stage, number = source
    return stage is None and number >= TARGETS

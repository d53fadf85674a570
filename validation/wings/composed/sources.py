"""Origins of stage inputs: an output of another stage, or data; recognized by content, else by form."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.elements import is_rounded
from pipeproof.core.observe.sketch import Sketch
from pipeproof.wings.composed.link import StageCalls

Data = Sequence[Mapping[int, Sketch]]  # each microbatch's tensors by number: inputs, then targets
Input = tuple[int, int]  # a stage, and the number of the input there
Output = tuple[int, int]
Source = tuple[int | None, int]  # an output; or None, and the number of a datum
TARGETS = 1 << 16  # the number of a microbatch's first target


class Sources:
    """Origins of the inputs of ``stages``, as far as known; ``data`` is each microbatch's content.

    ``sent``: each source's tensors, data first; an output that is the same tensor as another counts as it. ``votes``:
    by input and earlier source, the number of equal tensors. ``of_inputs``: each input's source, if known. ``unsure``:
    inputs with several equal outputs. ``untold``: outputs with unknown expected gradients.
    """

    def __init__(self, stages: Mapping[int, StageCalls], data: Data) -> None:
        self.stages = stages
        self.sent: dict[Source, list[Sketch]] = {}
        for brought in data:
            for number, one in sorted(brought.items()):
                self.sent.setdefault((None, number), []).append(one)
        for stage, call in ((stage, call) for stage, here in stages.items() for call in here.calls):
            for number, one in enumerate(call.outputs):
                if number not in call.repeated:
                    self.sent.setdefault((stage, number), []).append(one)
        again = {(stage, n, of) for stage, here in stages.items() for c in here.calls for n, of in c.repeated.items()}
        self._times = Counter[Source]([*self.sent, *((stage, of) for stage, _, of in again)])  # outputs of each
        counts = {stage: max((len(call.inputs) for call in here.calls), default=0) for stage, here in stages.items()}
        self.inputs = [(stage, number) for stage, count in counts.items() for number in range(count)]
        self.votes = {at: self._votes_of(at) for at in self.inputs}
        self.of_inputs, self.unsure = self._wire()
        self.untold = {output for those in self.unsure.values() for output in those}

    def _wire(self) -> tuple[dict[Input, Source], dict[Input, list[Output]]]:
        found: dict[Input, Source] = {}
        for fits in (self._was_sent, self._has_form):  # exact matches leave fewer guesses
            for at in [one for one in self.inputs if one not in found]:
                taken = Counter(found.values())
                fitting = {
                    source: (count, free, source[0] is not None, source[1] == at[1], source[0] or 0)
                    for source, count in self.votes[at].items()
                    if fits(at, source, free := taken[source] < self._times[source])
                }
                if fitting:  # among equal tensors, prefer the nearest stage
                    found[at] = max(fitting, key=fitting.__getitem__)
        equal = self._equal(found)
        forced = self._one_each(equal, {source for at, source in found.items() if at not in equal and self.flows(at)})
        found |= forced
        for output in [one for one in self.sent if self.gives(one) and one not in found.values()]:
            if (at_last := self._expecting_input(output, found)) is not None:
                found[at_last] = output
        return found, {} if forced else equal

    def _was_sent(self, at: Input, source: Source, free: bool) -> bool:
        """True if the source sent most tensors of this input."""
        return 2 * self.votes[at][source] > len(self.came(at))

    def _has_form(self, at: Input, source: Source, free: bool) -> bool:
        """True if a source matches this input's form, and is ``free``: unused by other inputs.

        Only inputs with a gradient must come from a source: a rank makes positions, masks and noise itself. So do
        inputs equal in every call and of unknown origin. Targets must match in the last stage alone.
        """
        came, known, flows = self.came(at), self.votes[at][source] > 0, self.flows(at)
        if is_target(source):
            return known and at[0] == max(self.stages) and free
        own = not flows and len({one.digest for one in came}) == 1 < len(came)
        return forms(came) <= forms(self.sent[source]) and (flows or free) and (known or not own)

    def _equal(self, sources: Mapping[Input, Source]) -> dict[Input, list[Output]]:
        """Return inputs with a gradient and several equal outputs as possible sources."""
        found: dict[Input, list[Output]] = {}
        for at, source in sources.items():
            votes = self.votes[at]
            those = [(of, number) for (of, number), count in votes.items() if of is not None and count == votes[source]]
            if source in those and len(those) > 1 and votes[source] and self.flows(at):
                found[at] = those
        return found

    @staticmethod
    def _one_each(equal: Mapping[Input, Sequence[Output]], used: set[Source]) -> dict[Input, Output]:
        """Match ``equal`` outputs with one input each, without ``used`` ones, if only one way exists."""
        found: dict[Input, Output] = {}
        for at in sorted(equal):
            free = [output for output in equal[at] if output not in {*used, *found.values()}]
            if len(free) != 1:
                return {}
            found[at] = free[0]
        return found

    def _expecting_input(self, output: Source, sources: Mapping[Input, Source]) -> Input | None:
        """Find the input of the next stage, of the same form, that lacks an unused output."""
        shapes = {one.shape for one in self.sent[output]}
        fitting = [
            at
            for at in self.inputs
            if at[0] - 1 == output[0] != sources.get(at, (None, 0))[0]
            and self.flows(at)
            and shapes >= {one.shape for one in self.came(at)}
        ]
        return max(fitting, default=None, key=lambda at: at[1] == output[1])

    def gives(self, source: Source) -> bool:
        """True if it is an output with a gradient, before the last stage."""
        inner = () if source[0] in (None, max(self.stages)) else self.stages[source[0]].calls
        return any(source[1] in call.giving for call in inner)

    def flows(self, at: Input) -> bool:
        """Whether a gradient is to flow through an input."""
        return any(at[1] in call.needing for call in self.stages[at[0]].calls)

    def came(self, at: Input) -> list[Sketch]:
        """Tensors that arrived at an input."""
        return [call.inputs[at[1]] for call in self.stages[at[0]].calls if at[1] < len(call.inputs)]

    def _votes_of(self, at: Input) -> dict[Source, int]:
        """Count how many tensors of this input each earlier source sent."""
        came = Counter(one.digest for one in self.came(at))
        before = {source: those for source, those in self.sent.items() if source[0] is None or source[0] < at[0]}
        return {source: (came & Counter(one.digest for one in those)).total() for source, those in before.items()}


def forms(tensors: Iterable[Sketch]) -> set[tuple[tuple[int, ...], bool]]:
    """Return shapes, and whether numbers are rounded: casts within a kind are allowed on the way."""
    return {(one.shape, is_rounded(one.dtype)) for one in tensors}


def is_target(source: Source) -> bool:
    """True if it is a target."""
    stage, number = source
    return stage is None and number >= TARGETS


def as_sent(stages: Mapping[int, StageCalls]) -> dict[int, StageCalls]:
    """Undo casts of inputs in ``stages`` if every number survived."""
    calls = [call for here in stages.values() for call in here.calls]
    activation = _in_its_type(one for call in calls for one in call.outputs)
    gradient = _in_its_type(one for call in calls for one in call.input_gradients.values())

    def read(call: Call) -> Call:
        kept = {n: activation(one) for n, one in call.kept.items()}
        flows = {n: gradient(one) for n, one in call.output_gradients.items()}
        return replace(call, inputs=[*map(activation, call.inputs)], kept=kept, output_gradients=flows)

    return {stage: replace(here, calls=tuple(map(read, here.calls))) for stage, here in stages.items()}


def _in_its_type(sent: Iterable[Sketch]) -> Callable[[Sketch], Sketch]:
    """Build a function from an arrived tensor to the ``sent`` one, if they differ only in type."""
    every = [one for one in sent if one.digest]  # a sum has none
    known = {said: one for one in every for said in one.said} | {one.digest: one for one in every}
    return lambda came: next((known[one] for one in (came.digest, *came.said) if one in known), came)

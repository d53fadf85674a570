"""Facts about stages: their calls, a link of the chain for each call's rerun, and where their inputs come from.

An input is an output of another stage, or data; it is recognized by content, else by form.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.elements import is_rounded
from pipeproof.core.observe.recording import MADE, RECEIVED
from pipeproof.core.observe.sketch import Sketch
from pipeproof.core.observe.stack import Stack

Data = Sequence[Mapping[int, Sketch]]  # each microbatch's tensors by number: inputs, then targets
Input = tuple[int, int]  # a stage, and the number of the input there
Output = tuple[int, int]
Source = tuple[int | None, int]  # an output; or None, and the number of a datum
TARGETS = 1 << 16  # the number of a microbatch's first target
Point = tuple[str, int]  # where at a call, and the tensor's number there


@dataclass(frozen=True)
class Link:
    """Results of a call's rerun, by place and number: tensors made, and gradients handed back.

    ``received``: gradients of outputs, without the part that came through other outputs. ``limits``: how far rounding
    may put what differs. ``strange``: places that differ in each run. ``loss``: the last stage's, undivided, of this
    ``loss_type``; its runs are ``loss_apart``. ``owes``: the call lacks a backward, though its loss trains something.
    ``obstacle``: why the call cannot be rerun. ``mode_matters``: training mode changes its results.
    """

    gives: Mapping[Point, Sketch] = field(default_factory=dict)
    received: Mapping[int, Sketch] = field(default_factory=dict)
    limits: Mapping[Point, float] = field(default_factory=dict)
    strange: frozenset[Point] = frozenset()
    loss: float | None = None
    loss_type: torch.dtype | None = None
    loss_apart: float = 0.0
    owes: bool = False
    obstacle: str = ""
    mode_matters: bool = False

    @property
    def allowed(self) -> Mapping[Point, float]:
        """Return ``limits``; infinite everywhere if the call differs in each run."""
        return dict.fromkeys(self.gives, math.inf) if self.strange else self.limits

    @property
    def closed(self) -> bool:
        """True if the call's results are known."""
        return not self.strange and not self.obstacle

    @property
    def endless(self) -> bool:
        """True if a result is infinite or NaN, and differs: order decides where numbers overflow."""
        return not self.strange and math.inf in self.limits.values()

    def is_right(self, at: Point, observed: Sketch | None) -> bool:
        """True if ``observed`` equals the call's result, up to rounding."""
        return observed is not None and observed.distance(self.gives[at]) <= self.allowed.get(at, 0.0)


@dataclass(frozen=True)
class StageCalls:
    """Calls of a stage on its ``rank``. ``trains``: it has trainable weights.

    ``meant``: the microbatch that a call was about, by the microbatch of its inputs. ``outside``: the place of a call
    to backward of a loss that reached its outputs; None without one.
    """

    rank: int
    calls: tuple[Call, ...]
    meant: Mapping[int, int] = field(default_factory=dict)
    outside: Stack | None = None
    trains: bool = True


def sketch_at(call: Call, at: Point) -> Sketch | None:
    """Return the tensor at a place in ``call``; None without one."""
    where, number = at
    if where == MADE:
        return call.outputs[number] if number < len(call.outputs) else None
    return (call.output_gradients if where == RECEIVED else call.input_gradients).get(number)


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
        digests = {source: Counter(one.digest for one in those) for source, those in self.sent.items()}
        self.votes = {
            at: {
                source: (Counter(one.digest for one in self.came(at)) & those).total()
                for source, those in digests.items()
                if source[0] is None or source[0] < at[0]
            }
            for at in self.inputs
        }
        self.of_inputs, self.unsure = self._wire()
        self.untold = {output for those in self.unsure.values() for output in those}

    def _wire(self) -> tuple[dict[Input, Source], dict[Input, list[Output]]]:
        found: dict[Input, Source] = {}
        for fits in (  # the source of most of its tensors leaves fewer guesses
            lambda at, source, free: 2 * self.votes[at][source] > len(self.came(at)),
            self._has_form,
        ):
            for at in [one for one in self.inputs if one not in found]:
                taken = Counter(found.values())
                fitting = {
                    source: (count, free, source[0] is not None, source[1] == at[1], source[0] or 0)
                    for source, count in self.votes[at].items()
                    if fits(at, source, free := taken[source] < self._times[source])
                }
                if fitting:  # among equal tensors, prefer the nearest stage
                    found[at] = max(fitting, key=fitting.__getitem__)
        equal: dict[Input, list[Output]] = {}  # of inputs with a gradient, several equal outputs as possible sources
        for at, source in found.items():
            votes = self.votes[at]
            those = [(of, number) for (of, number), count in votes.items() if of is not None and count == votes[source]]
            if source in those and len(those) > 1 and votes[source] and self.flows(at):
                equal[at] = those
        forced: dict[Input, Output] = {}  # one unused output each, if only one way exists
        used = {source for at, source in found.items() if at not in equal and self.flows(at)}
        for at in sorted(equal):
            unused = [output for output in equal[at] if output not in {*used, *forced.values()}]
            if len(unused) != 1:
                forced.clear()
                break
            forced[at] = unused[0]
        found |= forced
        for output in [one for one in self.sent if self.gives(one) and one not in found.values()]:
            shapes = {one.shape for one in self.sent[output]}
            lacking = [  # inputs of the next stage, of the same form, without an output from there
                at
                for at in self.inputs
                if at[0] - 1 == output[0] != found.get(at, (None, 0))[0]
                and self.flows(at)
                and shapes >= {one.shape for one in self.came(at)}
            ]
            if lacking:
                found[max(lacking, key=lambda at: at[1] == output[1])] = output
        return found, {} if forced else equal

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

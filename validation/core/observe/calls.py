"""Watched module calls, and gradients through them."""

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor

from pipeproof.core.observe.own_losses import goes_on
from pipeproof.core.observe.posted_messages import Came
from pipeproof.core.observe.shards import InShards
from pipeproof.core.observe.sketch import Sketch, sketch
from pipeproof.core.observe.stack import Stack
from pipeproof.pipeline.action import Kind
from pipeproof.reference.again import Called
from pipeproof.reference.graph import hook_at, hook_first

Note = Callable[[Tensor], Callable[[], None]]  # reads a gradient, and returns a function that stores the reading


@dataclass
class Flows:
    """Backwards through one call: those that reach its outputs.

    A runtime's receive buffer may enter many calls, and a hook on it sees all their gradients. A call's own outputs
    belong to no other call, so backwards through them are its own. first: note gradients before the outputs' own hooks
    change them. around: wraps hooks.
    """

    around: Callable[[Callable[[Tensor], None]], Callable[[Tensor], None]] = lambda hook: hook
    first: bool = False
    _own: set[int] = field(default_factory=set)
    _ended: bool = False  # after a backward reached an input
    _early: list[tuple[int, Callable[[], None]]] = field(default_factory=list)

    def note_made(self, tensor: Tensor, note: Note, came: Callable[[], None] = lambda: None) -> None:
        """Note gradients into the call's own ``tensor``, and onward.

        A backward that asks for the gradient there ends there. After a write into a view, gradients arrive through its
        base: ``came`` reports it.
        """
        last = -1  # latest backward that reached the tensor itself
        waiting = dict[int, Callable[[], None]]()  # effects due if a backward ends here

        def note_flow(gradient: Tensor) -> None:
            nonlocal last
            last = torch._C._current_graph_task_id()
            waiting[last] = note(gradient)
            if not runs:
                goes_through()

        def goes_through(*_: object) -> None:
            backward = torch._C._current_graph_task_id()
            if (write := waiting.pop(backward, None)) is None:
                return
            self._own.add(backward)
            for one in (write, *(early for other, early in self._early if other == backward)):
                one()
            self._early = [one for one in self._early if one[0] != backward]

        if self.first:
            hook_first(tensor, self.around(note_flow))
        else:
            hook_at(tensor, self.around(note_flow))
        runs = tensor.grad_fn is not None  # its grad_fn then reports backwards that continue
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(self.around(goes_through))
        if (part_of := _read_behind(tensor)) is not None and tensor._base is not None:

            def note_flow_behind(gradient: Tensor) -> None:
                if torch._C._current_graph_task_id() != last and (part := part_of(gradient)) is not None:
                    came()
                    note_flow(part)
                    goes_through()

            hook_at(tensor._base, self.around(note_flow_behind))

    def note_borrowed(self, tensor: Tensor, note: Note, *, handed_on: bool) -> None:
        """Note gradients into a ``tensor`` that other calls may share, within this call's backwards.

        A ``handed_on`` tensor may receive its gradient before the call's own outputs.
        """

        def note_flow(gradient: Tensor) -> None:
            backward = torch._C._current_graph_task_id()
            if backward in self._own or (self._own and not self._ended and goes_on()):
                self._ended = True
                note(gradient)()
            elif handed_on:
                self._early.append((backward, note(gradient)))

        hook_at(tensor, self.around(note_flow))


def _read_behind(tensor: Tensor) -> Callable[[Tensor], Tensor | None] | None:
    """Return a function from the gradient of a view's base to the view's part; None for other tensors.

    A write into a view replaces its graph node: gradients then arrive through the base's, and a hook on the view stays
    silent. A linear layer with bias on three-dimensional input returns a view. Without a write there is no such part.
    """
    base = tensor._base if tensor._is_view() and not isinstance(tensor, InShards) else None
    if base is None or base.grad_fn is None or not base.is_contiguous() or tensor.numel() > base.numel():
        return None
    written, version = weakref.ref(base), base._version  # keep neither alive
    size, stride, start = tensor.size(), tensor.stride(), tensor.storage_offset() - base.storage_offset()

    def part_of(gradient: Tensor) -> Tensor | None:
        now = written()
        if now is None or now._version == version:
            return None
        whole = gradient.contiguous()
        return whole.as_strided(size, stride, whole.storage_offset() + start)

    return part_of


Place = tuple[bool, int]  # at a call: is it an output, and which tensor?


@dataclass(frozen=True)
class BackwardPart:
    """One backward's gradient at a tensor. ``counts``: the call counts its backwards there."""

    observed: Sketch
    backward: int
    counts: bool


@dataclass
class Call:
    """A watched module call. Tensor numbers key its gradients.

    backwards: times of completed backwards, on a counter shared by the rank's calls. mixed: parts of the module were in
    training mode, others not. needing: inputs that require a gradient. giving: outputs that carry one; unread: as
    DTensors, which stay unread. silent: ran without gradients; it counts as a forward only if a backward repeated it,
    whose gradients it then gets. rank: its rank, where several share the stage. stacks: user code lines for forward and
    backward. came: messages behind input tensors. cleared: line that cleared its added gradients. began: start on the
    counter. asked: by output, the first gradient with a copy, even if its backward ended there. trained: counted
    backwards reached module weights. flowed: by backward, time at the call's outputs; it may not have reached an input.
    parts: by place, gradients per backward; in_parts: by input, the parts behind a joint gradient. again: data for a
    repeated run, if requested; then repeated: outputs identical to an earlier output, with its number; given_again:
    inputs likewise. hidden: type of an object with unobserved tensors. attribute: input that the module kept instead of
    receiving it.
    """

    training: bool
    inputs: list[Sketch] = field(default_factory=list)
    outputs: list[Sketch] = field(default_factory=list)
    output_gradients: dict[int, Sketch] = field(default_factory=dict)
    input_gradients: dict[int, Sketch] = field(default_factory=dict)
    kept: dict[int, Sketch] = field(default_factory=dict)  # inputs needed in backward, at its start
    backwards: list[int] = field(default_factory=list)
    rank: int | None = None
    silent: bool = False
    mixed: bool = False
    stacks: dict[Kind, Stack] = field(default_factory=dict)
    came: dict[tuple[Kind, int], Came] = field(default_factory=dict)
    cleared: Stack = ()
    needing: frozenset[int] = frozenset()
    giving: frozenset[int] = frozenset()
    unread: bool = False
    began: int | None = None
    flowed: dict[int, int] = field(default_factory=dict)
    parts: dict["Place", list["BackwardPart"]] = field(default_factory=dict)
    in_parts: Mapping[int, Sequence[Sketch]] = field(default_factory=dict)
    again: Called | None = None
    repeated: Mapping[int, int] = field(default_factory=dict)
    given_again: frozenset[int] = frozenset()
    hidden: str = ""
    attribute: str = ""
    trained: bool = False
    asked: dict[int, tuple[Sketch, Tensor | None]] = field(default_factory=dict)

    def settle(self) -> None:
        """Finish observation: unanswered requests become output gradients."""
        for number, (observed, kept) in self.asked.items():
            self.output_gradients.setdefault(number, observed)
            if kept is not None and self.again is not None:
                self.again.flows.setdefault(number, kept)
        self.asked = {}

    def count(self, time: int, *, trains: bool) -> None:
        """Count a finished backward. Without weight gradients it may be a half, or a mere look at a gradient.

        So it counts only if no other reaches weights.
        """
        if trains and not self.trained:
            self.backwards.clear()
        if trains or not self.trained:
            self.backwards.append(time)
        self.trained = self.trained or trains

    @property
    def ran(self) -> list[int]:
        """Times of finished backwards. Without any input gradient, only the first counts: others may be halves."""
        return self.backwards or [*self.flowed.values()][:1]

    @property
    def is_idle(self) -> bool:
        """True if only zeros flowed back, as to padding."""
        return bool(self.output_gradients) and not any(one.norm for one in self.output_gradients.values())

    def note_part(self, at: "Place", observed: Sketch, kept: Tensor | None, *, counts: bool) -> None:
        """Note the current backward's gradient at a tensor; ``kept`` copies it.

        counts: the call counts its backwards there.
        """
        is_output, number = at
        if is_output and kept is not None and self.again is not None:
            self.again.parts.setdefault(number, {}).setdefault(observed.digest, kept)
        self.parts.setdefault(at, []).append(BackwardPart(observed, torch._C._current_graph_task_id(), counts))

    def together(self, sent: Mapping[int, Sequence[Sketch]]) -> "Call":
        """Merge backwards from several consumers, outputs or loss terms into one.

        sent: gradients returned per output. Equal parts count as often as sent; any others are halves, or extra
        backwards.
        """
        outputs = {n: _of_each(those, sent.get(n, ()))[0] for (is_output, n), those in self.parts.items() if is_output}
        backwards = {one.backward for those in outputs.values() for one in those}
        inputs = dict[int, list[BackwardPart]]()
        for (is_output, number), those in self.parts.items():
            if not is_output:
                once, again = _of_each(those, ())
                inputs[number] = [*once, *again[: max(0, len(backwards) - len(once))]]
        flows, back = ({n: one for n, one in those.items() if len(one) > 1} for those in (outputs, inputs))
        if not flows and not back:
            return self
        more = sum(one[0].counts * (len(one) - 1) for one in (*flows.values(), *back.values()))
        whole = {} if self.again is None else {n: self.again.sum_of(n, map(_digest, one)) for n, one in flows.items()}
        return replace(
            self,
            output_gradients=self.output_gradients | _sums(flows) | {n: sketch(one) for n, one in whole.items()},
            input_gradients=self.input_gradients | _sums(back),
            backwards=self.backwards[: len(self.backwards) - more],
            in_parts={number: [part.observed for part in one] for number, one in back.items()},
            again=self.again and replace(self.again, flows=self.again.flows | whole),
            parts={},
        )

    def without_own_gradients(self, received: Mapping[int, Sketch]) -> "Call":
        """Keep, for outputs in ``received``, only gradients from outside the call.

        Other gradients there came from tensors derived within it.
        """
        parts = {at: those for at, those in self.parts.items() if not (at[0] and at[1] in received)}
        return replace(self, output_gradients={**self.output_gradients, **received}, parts=parts) if received else self

    def later(self, time: int, *, rank: int) -> "Call":
        """Shift the call by ``time``, on ``rank``."""
        began = None if self.began is None else self.began + time
        flowed = {backward: time + end for backward, end in self.flowed.items()}
        return replace(self, backwards=[time + end for end in self.backwards], flowed=flowed, began=began, rank=rank)


def _of_each(parts: Sequence[BackwardPart], sent: Sequence[Sketch]) -> tuple[list[BackwardPart], list[BackwardPart]]:
    """Split ``parts``: equal ones as often as ``sent``, at least once, and the rest."""
    taken, found = Counter[bytes](), (list[BackwardPart](), list[BackwardPart]())
    for part in parts:
        taken[part.observed.digest] += 1
        found[taken[part.observed.digest] > max(1, sum(map(part.observed.says, sent)))].append(part)
    return found


def _sums(parts: Mapping[int, Sequence[BackwardPart]]) -> dict[int, Sketch]:
    return {number: reduce(Sketch.plus, (one.observed for one in those)) for number, those in parts.items()}


def _digest(part: BackwardPart) -> bytes:
    return part.observed.digest

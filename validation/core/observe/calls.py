"""Calls of a watched module, and the gradients that flow through them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import reduce
from itertools import combinations

import torch
from torch import Tensor

from pipeproof.core.observe.own_losses import goes_on
from pipeproof.core.observe.posted_messages import Came
from pipeproof.core.observe.sketch import Sketch, sketch
from pipeproof.core.observe.stack import Stack
from pipeproof.core.observe.written_views import WrittenView
from pipeproof.pipeline.action import Kind
from pipeproof.reference.again import Called
from pipeproof.reference.graph import hook_first

Note = Callable[[Tensor], Callable[[], None]]  # looks at a gradient; what it returns writes down what was seen


@dataclass
class Flows:
    """The backwards through one call: those that bring a gradient to what the call made.

    A tensor that a runtime receives into may come into many calls, and a hook at it is told of the gradients of all.
    What a call itself made is no other's, so the backwards that reach that are its own. ``first``: gradients are noted
    as they came to what it made, before its own hooks there make others of them. ``around``: what hooks are within.
    """

    around: Callable[[Callable[[Tensor], None]], Callable[[Tensor], None]] = lambda hook: hook
    first: bool = False
    _own: set[int] = field(default_factory=set)
    _ended: bool = False  # whether any came to what the call was given
    _early: list[tuple[int, Callable[[], None]]] = field(default_factory=list)

    def made(self, tensor: Tensor, note: Note, came: Callable[[], None] = lambda: None) -> None:
        """``tensor`` is the call's own: note the gradients that flow to it, and on from there.

        A backward that is only asked for the gradient there ends there. Where it is a view to which somebody has
        written, gradients come by what it was a view of: ``came`` is told so.
        """
        last = -1  # the backward that came to it as it is
        waiting = dict[int, Callable[[], None]]()  # what backwards brought that may end there

        def flowed(gradient: Tensor) -> None:
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
            hook_first(tensor, self.around(flowed))
        else:
            tensor.register_hook(self.around(flowed))  # type: ignore[no-untyped-call]  # in torch
        runs = tensor.grad_fn is not None  # what computed it is then told of backwards, if they go through it
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(self.around(goes_through))
        if (view := WrittenView.of(tensor)) is not None and tensor._base is not None:

            def flowed_behind(gradient: Tensor) -> None:
                if torch._C._current_graph_task_id() != last and view.was_written:
                    came()
                    flowed(view.part_of(gradient))
                    goes_through()

            tensor._base.register_hook(self.around(flowed_behind))  # type: ignore[no-untyped-call]  # in torch

    def borrowed(self, tensor: Tensor, note: Note, *, handed_on: bool) -> None:
        """``tensor`` may belong to other calls as well: note what flows to it in this one's backwards.

        One that is ``handed_on`` as it is may have its gradient before anything that the call made.
        """

        def flowed(gradient: Tensor) -> None:
            backward = torch._C._current_graph_task_id()
            if backward in self._own or (self._own and not self._ended and goes_on()):
                self._ended = True
                note(gradient)()
            elif handed_on:
                self._early.append((backward, note(gradient)))

        tensor.register_hook(self.around(flowed))  # type: ignore[no-untyped-call]  # in torch


class Mode(Enum):
    """What a call of a module is to a training step."""

    FORWARD = "forward"
    SILENT = "without gradients"  # a trial, a metric, or a forward that a backward will run again
    AGAIN = "recompute"  # inside a backward


Place = tuple[bool, int]  # at a call: whether it is an output, and the number of the tensor


@dataclass(frozen=True)
class BackwardPart:
    """What one backward, by its number, brought to a tensor. ``counts``: there backwards of the call are counted."""

    seen: Sketch
    backward: int
    counts: bool


@dataclass
class Call:
    """One call of a watched module. Gradients are by the number of the tensor that they belong to.

    ``backwards`` has an entry, a count over all that this rank's calls do, for each time that gradients came out of it.
    ``mixed``: parts of the module were in training mode, and others were not. ``needing`` are the inputs that want a
    gradient, ``giving`` the outputs that bring one; ``unread``: those are DTensors, which nobody reads.
    A ``silent`` one ran without gradients: it is a forward only if a backward ran it again, and then has what that had.
    ``rank`` is the one that it was on, where several hold its stage. ``stacks`` are where the user's code called for
    its forward and its backward, ``came`` the messages that these were given, by the tensor that each was. ``cleared``:
    where the gradients were cleared that its backward had added to. ``began``: when, by the count of ``backwards``.
    ``asked``: by output, the first gradient that came to it, and a copy of that, whether or not the backward went on.
    ``trained``: those of ``backwards`` came to weights of the module.
    ``flowed``: by backward, when one ran through the end of the call, by that count; it may not have come to an input.
    ``parts``: by place, what its backwards brought there; ``in_parts``: by input, those of its gradient, where they
    were put ``together``.
    ``again``: what it takes to run it again, where somebody wants that; then, ``repeated`` are the outputs that are the
    very tensor of another one, with that one's number; and ``given_again`` the inputs that are so;
    ``hidden``: the type of an object at the call that has tensors which nobody sees; ``attribute``: where the module
    has an input that it was not called with.
    """

    training: bool
    inputs: list[Sketch] = field(default_factory=list)
    outputs: list[Sketch] = field(default_factory=list)
    output_gradients: dict[int, Sketch] = field(default_factory=dict)
    input_gradients: dict[int, Sketch] = field(default_factory=dict)
    kept: dict[int, Sketch] = field(default_factory=dict)  # the inputs that it needs, when the backward begins
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
        """All is seen: what was ``asked`` for is what came to outputs from which no backward went on."""
        for number, (seen, kept) in self.asked.items():
            self.output_gradients.setdefault(number, seen)
            if kept is not None and self.again is not None:
                self.again.flows.setdefault(number, kept)
        self.asked = {}

    def count(self, time: int, *, trains: bool) -> None:
        """Count a backward that is over. One that ``trains`` no weights is a half of another, or looked at a gradient.

        So it counts where none does that trains some.
        """
        if trains and not self.trained:
            self.backwards.clear()
        if trains or not self.trained:
            self.backwards.append(time)
        self.trained = self.trained or trains

    @property
    def ran(self) -> list[int]:
        """When its backwards were over. Of those that came to no input the first alone: halves may be several."""
        return self.backwards or [*self.flowed.values()][:1]

    @property
    def is_idle(self) -> bool:
        """Whether it adds nothing: zeros alone flowed back to it, as to padding that no loss counts."""
        return bool(self.output_gradients) and not any(one.norm for one in self.output_gradients.values())

    def note_part(self, at: "Place", seen: Sketch, kept: Tensor | None, *, counts: bool) -> None:
        """Note what the backward that runs brought to a tensor, beside what others did; ``kept`` is a copy of it.

        ``counts``: there this call's backwards are counted.
        """
        is_output, number = at
        if is_output and kept is not None and self.again is not None:
            self.again.parts.setdefault(number, {}).setdefault(seen.digest, kept)
        self.parts.setdefault(at, []).append(BackwardPart(seen, torch._C._current_graph_task_id(), counts))

    def received(self, number: int, sent: Sequence[Sketch]) -> list[Sketch]:
        """What backwards brought to an output: of equal parts as many as were ``sent``, or one."""
        if those := self.parts.get((True, number)):
            return [one.seen for one in _of_each(those, sent)[0]]
        return [one for one in [self.output_gradients.get(number)] if one is not None]

    @property
    def apart(self) -> bool:
        """Whether a backward came to some outputs and not to others: each may have its own."""
        own = [{one.backward for one in those} for (is_output, _), those in self.parts.items() if is_output]
        return any(one != other for one, other in combinations(own, 2))

    def together(self, sent: Mapping[int, Sequence[Sketch]]) -> "Call":
        """The same, where several consumers, outputs or terms of a loss had a backward each: as if these were one.

        ``sent``: by output, what they handed back. Of equal parts so many count as they sent; what is left are halves
        of a backward, or backwards too many.
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
            in_parts={number: [part.seen for part in one] for number, one in back.items()},
            again=self.again and replace(self.again, flows=self.again.flows | whole),
            parts={},
        )

    def without_own(self, received: Mapping[int, Sketch]) -> "Call":
        """The same, where of the gradients of some outputs only these came from behind the call.

        What else came to them, others brought that it made of them.
        """
        parts = {at: those for at, those in self.parts.items() if not (at[0] and at[1] in received)}
        return replace(self, output_gradients={**self.output_gradients, **received}, parts=parts) if received else self

    def later(self, time: int, *, rank: int) -> "Call":
        """The same on ``rank``, by so much later."""
        began = None if self.began is None else self.began + time
        flowed = {backward: time + end for backward, end in self.flowed.items()}
        return replace(self, backwards=[time + end for end in self.backwards], flowed=flowed, began=began, rank=rank)


def _of_each(parts: Sequence[BackwardPart], sent: Sequence[Sketch]) -> tuple[list[BackwardPart], list[BackwardPart]]:
    """Of equal ``parts`` as many as were ``sent``, or one, and the others."""
    taken, found = Counter[bytes](), (list[BackwardPart](), list[BackwardPart]())
    for part in parts:
        taken[part.seen.digest] += 1
        found[taken[part.seen.digest] > max(1, sum(map(part.seen.says, sent)))].append(part)
    return found


def _sums(parts: Mapping[int, Sequence[BackwardPart]]) -> dict[int, Sketch]:
    return {number: reduce(Sketch.plus, (one.seen for one in those)) for number, those in parts.items()}


def _digest(part: BackwardPart) -> bytes:
    return part.seen.digest

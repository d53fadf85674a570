"""Calls of a watched module, and the gradients that flow through them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from torch import Tensor

from pipeproof.observers.sketch import Sketch, sketch
from pipeproof.pipeline.action import Kind
from pipeproof.reference.again import Called
from pipeproof.worlds.posted_messages import Came
from pipeproof.worlds.stack import Stack

Note = Callable[[Tensor], Callable[[], None]]  # looks at a gradient; what it returns writes down what was seen


@dataclass
class Flows:
    """The backwards through one call: those that bring a gradient to what the call made.

    A tensor that a runtime receives into may come into many calls, and a hook at it is told of the gradients of all.
    What a call itself made is no other's, so the backwards that reach that are its own.
    """

    _own: set[int] = field(default_factory=set)
    _early: list[tuple[int, Callable[[], None]]] = field(default_factory=list)

    def made(self, tensor: Tensor, note: Note) -> None:
        """``tensor`` is the call's own: note the gradients that flow to it."""

        def flowed(gradient: Tensor) -> None:
            backward = torch._C._current_graph_task_id()
            self._own.add(backward)
            note(gradient)()
            for other, write in self._early:
                if other == backward:
                    write()
            self._early = [one for one in self._early if one[0] != backward]

        tensor.register_hook(flowed)  # type: ignore[no-untyped-call]  # in torch

    def borrowed(self, tensor: Tensor, note: Note, *, handed_on: bool) -> None:
        """``tensor`` may belong to other calls as well: note what flows to it in this one's backwards.

        One that is ``handed_on`` as it is may have its gradient before anything that the call made.
        """

        def flowed(gradient: Tensor) -> None:
            backward = torch._C._current_graph_task_id()
            if backward in self._own:
                note(gradient)()
            elif handed_on:
                self._early.append((backward, note(gradient)))

        tensor.register_hook(flowed)  # type: ignore[no-untyped-call]  # in torch


class Mode(Enum):
    """What a call of a module is to a training step."""

    FORWARD = "forward"
    SILENT = "without gradients"  # a trial, a metric, or a forward that a backward will run again
    AGAIN = "recompute"  # inside a backward


Place = tuple[bool, int]  # at a call: whether it is an output, and the number of the tensor


@dataclass(frozen=True)
class Parts:
    """What flowed to one tensor of a call in several backwards: their sum, their sizes added up, and who they are.

    ``more``: how many of them were counted as backwards of the call, after the first.
    """

    whole: Sketch
    size: float
    digests: frozenset[bytes]
    more: int = 0


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
    ``flowed``: by backward, when one ran through the end of the call, by that count; it may not have come to an input.
    ``parts``: by place, what its backwards brought there; ``in_parts``: by input, the sizes of those of its gradient,
    where they were put ``together``.
    ``again``: what it takes to run it again, where somebody wants that; then, ``repeated`` are the outputs that are the
    very tensor of another one, with that one's number; and ``given_again`` the inputs that are so;
    ``hidden``: the type of an object at the call that has tensors which nobody sees.
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
    parts: dict["Place", "Parts"] = field(default_factory=dict)
    in_parts: Mapping[int, float] = field(default_factory=dict)
    again: Called | None = None
    repeated: Mapping[int, int] = field(default_factory=dict)
    given_again: frozenset[int] = frozenset()
    hidden: str = ""

    @property
    def ran(self) -> list[int]:
        """When its backwards were over. Of those that came to no input the first alone: halves may be several."""
        return self.backwards or [*self.flowed.values()][:1]

    def note_part(self, at: "Place", seen: Sketch, kept: Tensor | None, *, counts: bool) -> None:
        """Note what a backward brought to a tensor, beside what others brought; ``kept`` is a copy of it.

        ``counts``: there this call's backwards are counted.
        """
        assert self.again is not None, "parts are of use where calls are run again"
        known, (is_output, number) = self.parts.get(at), at
        if known is not None and seen.digest in known.digests:
            return  # it is a half of a backward, or the same once more
        if is_output and kept is not None:
            own = self.again.sums.get(number)
            self.again.sums[number] = kept if own is None else own + kept
        if known is None:
            self.parts[at] = Parts(seen, seen.norm, frozenset({seen.digest}))
            return
        whole = sketch(self.again.sums[number]) if is_output and kept is not None else known.whole.plus(seen)
        self.parts[at] = Parts(whole, known.size + seen.norm, known.digests | {seen.digest}, known.more + counts)

    def together(self) -> "Call":
        """The same, where each of several consumers of what it made had a backward of its own: as if it were one."""
        several = {at: one for at, one in self.parts.items() if len(one.digests) > 1}
        if not several:
            return self
        outputs = {number: one.whole for (is_output, number), one in several.items() if is_output}
        inputs = {number: one for (is_output, number), one in several.items() if not is_output}
        again = self.again
        if again is not None:
            again = replace(again, flows=again.flows | {number: again.sums[number] for number in outputs})
        return replace(
            self,
            output_gradients=self.output_gradients | outputs,
            input_gradients=self.input_gradients | {number: one.whole for number, one in inputs.items()},
            backwards=self.backwards[: len(self.backwards) - sum(one.more for one in several.values())],
            in_parts={number: one.size for number, one in inputs.items()},
            again=again,
            parts={},
        )

    def later(self, time: int, *, rank: int) -> "Call":
        """The same on ``rank``, by so much later."""
        began = None if self.began is None else self.began + time
        flowed = {backward: time + end for backward, end in self.flowed.items()}
        return replace(self, backwards=[time + end for end in self.backwards], flowed=flowed, began=began, rank=rank)

"""A stage's calls in a step that is held against itself."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from pipeproof.foreign.call_matching import Column
from pipeproof.observers.calls import Call
from pipeproof.observers.elements import is_rounded
from pipeproof.observers.recording import RECEIVED
from pipeproof.observers.sketch import Sketch
from pipeproof.wings.composed.link import Link
from pipeproof.worlds.stack import Stack

_PASS = "pass plain tensors, in tuples, lists or mappings, or register its class with torch.utils._pytree"
_ARGUMENT = "what is passed on there is not seen; call the stage's module with it, or make it a parameter"
Limited = tuple[str, int, int]  # where, the tensor's number there, its call's


@dataclass(frozen=True)
class StageSeen:
    """A stage on its rank, and its calls. ``trains``: it has weights to be trained.

    ``meant``: by the microbatch that a call's inputs are of, the one that it was about all the same. ``outside``: where
    the backward of a loss was called for that came to what it gave; None where none did.
    """

    rank: int
    calls: tuple[Call, ...]
    meant: Mapping[int, int] = field(default_factory=dict)
    outside: Stack | None = None
    trains: bool = True

    def without_own(self, links: Sequence[Link]) -> "StageSeen":
        """The same, where only what came from behind the stage is the gradient of an output, as ``links`` know it."""
        pairs = zip(self.calls, links, strict=True)
        return replace(self, calls=tuple(call.without_own(link.received) for call, link in pairs))


def counting(calls: Sequence[Call], microbatches: int) -> list[Call]:
    """The calls that are about microbatches: where there are too many, those that gradients came back to."""
    trained = [call for call in calls if call.ran]
    return trained if len(trained) >= microbatches or len(calls) > microbatches else list(calls)


def with_own_loss(call: Call, *, apart: bool) -> Call:
    """``call`` of a stage with a loss of its own, if nobody saw what it handed back: as in a backward ``apart``.

    Or an input's gradient was asked for before, as for a loss that punishes it: which was handed back is not known.
    """
    several = any(len(those) > 1 for (is_output, _), those in call.parts.items() if not is_output)
    parts = {at: those for at, those in call.parts.items() if at[0]}
    return replace(call, input_gradients={}, in_parts={}, parts=parts) if apart or several else call


def hidden(stages: Mapping[int, Sequence[Call]]) -> str:
    """Why it is not known what passes one of ``stages``: nobody looks into an object, or an input is no argument."""
    for stage, call in ((stage, call) for stage, calls in stages.items() for call in calls):
        if call.hidden:
            return f"stage {stage} is given or gives {call.hidden}, in which tensors are not seen: {_PASS}"
        if call.attribute:
            return f"stage {stage} has a tensor that wants a gradient in its attribute {call.attribute}: {_ARGUMENT}"
    return ""


def on_its_own(calls: Sequence[Call]) -> bool:
    """Whether a module was called on what another call of it made."""
    made = {one.digest for call in calls for one in call.outputs if one.norm and one not in call.inputs}
    return any(one.digest in made for call in calls for one in call.inputs)


def as_sent(stages: Mapping[int, StageSeen]) -> dict[int, StageSeen]:
    """``stages``, where what came in another type than it was sent in is what was sent, if every number is the same."""
    calls = [call for seen in stages.values() for call in seen.calls]
    came = [one for call in calls for one in (*call.inputs, *call.kept.values())]
    activations = _in_other_types([one for call in calls for one in call.outputs], came)
    flows = [one for call in calls for one in call.output_gradients.values()]
    gradients = _in_other_types([one for call in calls for one in call.input_gradients.values()], flows)

    def read(call: Call) -> Call:
        inputs = [activations.get(one.digest, one) for one in call.inputs]
        kept = {n: activations.get(one.digest, one) for n, one in call.kept.items()}
        flows = {n: gradients.get(one.digest, one) for n, one in call.output_gradients.items()}
        return replace(call, inputs=inputs, kept=kept, output_gradients=flows)

    return {stage: replace(seen, calls=tuple(map(read, seen.calls))) for stage, seen in stages.items()}


def _in_other_types(sent: Sequence[Sketch], came: Sequence[Sketch]) -> dict[bytes, Sketch]:
    """What was ``sent``, by the digests under which it ``came`` in a wider or a narrower type."""
    known = {one.digest: one for one in sent}
    narrowed = {said: one for one in sent for said in one.said}
    found: dict[bytes, Sketch] = {}
    for one in came:
        those = [known[said] for said in one.said if said in known] or [
            narrowed[d] for d in [one.digest] if d in narrowed
        ]
        if one.digest not in known and those:
            found[one.digest] = those[0]
    return found


def in_types_of_outputs(
    column: Column, calls: Sequence[Call], numbers: Sequence[int]
) -> tuple[Column, dict[Limited, float]]:
    """``column``, and how far rounding put gradients that came in a narrower type than they were sent in.

    A gradient has the type of its output and can have no other. ``numbers`` are the microbatches of ``calls``. How far
    is infinite where numbers may be too large for that type: then nothing tells what came from a fault.
    """
    found, limits = list(column.seen), dict[Limited, float]()
    for k, (call, number) in enumerate(zip(calls, numbers, strict=True)):
        seen, due = found[k], column.known.get(number)
        if column.where != RECEIVED or seen is None or due is None or column.number >= len(call.outputs):
            continue
        forced = seen.dtype == call.outputs[column.number].dtype
        if forced and seen.digest != due.digest and _narrower(seen, due):
            found[k] = replace(seen, dtype=due.dtype, narrow=due.narrow)
            limits[column.where, column.number, k] = (
                math.inf if _may_overflow(due, seen) else torch.finfo(seen.dtype).eps
            )
    return replace(column, seen=tuple(found)), limits


def _may_overflow(sent: Sketch, came: Sketch) -> bool:
    """Whether what ``came`` may be without end for the type that it came in alone: no element is above the norm."""
    return not math.isfinite(came.norm) and not sent.norm <= torch.finfo(came.dtype).max


def _narrower(one: Sketch, other: Sketch) -> bool:
    both = is_rounded(one.dtype) and is_rounded(other.dtype)
    return both and torch.finfo(one.dtype).eps > torch.finfo(other.dtype).eps

"""Faults of messages: exchanged, early, old, damaged or lost; and of memory still in use.

Most need a model of which one fp32 tensor crosses a boundary.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pipeproof.core.observe.wrappers import AroundTransport
from pipeproof.own.case import Case
from pipeproof.own.faults import Plant
from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.boundary import Gradients, Tensors
from pipeproof.pipeline.program import lower
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.transport import Message, Transport
from pipeproof.wings.specimens.families.order import exchange, hangs, other_of_two
from pipeproof.wings.specimens.planting import (
    Arrived,
    Call,
    Changes,
    To,
    middle,
    on_arrival,
    on_stages,
    on_transport,
    round_through,
    second,
)
from pipeproof.wings.specimens.specimen import Entry, Needs

_ACTIVATIONS, _ACTIVATION = To(Kind.RECV_F, 1), To(Kind.RECV_F, 1, (0,))
_PAIR_FORWARD, _PAIR_BACKWARD = To(Kind.RECV_F, 1, (0, 1)), To(Kind.RECV_B, 0, (0, 1))


def _repeat(arrived: Tensor, message: Arrived) -> Tensor:
    """Repeat the first message's bytes in the second: its sender's buffer was still in use, or reused."""
    if 0 in message.kept:
        return message.kept.pop(0)
    message.kept[0] = arrived.clone()
    return arrived


def _partly_old(arrived: Tensor, message: Arrived) -> Tensor:
    """Wait only for the first half of the message; the rest of the buffer is old."""
    half = len(arrived) // 8 * 4
    return torch.cat([arrived[:half], _repeat(arrived, message)[half:]])


def _of_other_stage(arrived: Tensor, message: Arrived) -> Tensor:
    """Repeat the second stage's message as the next one to its rank."""
    if message.stage == 1:
        message.kept[0] = arrived.clone()
        return arrived
    return message.kept.pop(0, arrived)


def _of_step_before(arrived: Tensor, message: Arrived) -> Tensor:
    before = message.kept.get(0, arrived)
    message.kept[0] = arrived.clone()
    return before


def _in_bf16(arrived: Tensor, message: Arrived) -> Tensor:
    whole = len(arrived) // 4 * 4  # a byte after a gradient marks its presence
    numbers = round_through(arrived[:whole].view(torch.float32), torch.bfloat16)
    return torch.cat([numbers.view(torch.uint8), arrived[whole:]])


def _damage(arrived: Tensor, message: Arrived) -> Tensor:
    """Change one number's exponent."""
    arrived = arrived.clone()
    arrived[7] ^= 1
    return arrived


def _cross(pair: To) -> Plant:
    """Exchange two messages on arrival."""

    class Crossed(AroundTransport):
        def __init__(self, inner: Transport, schedule: Schedule) -> None:
            super().__init__(inner)
            self._links = schedule.n_stages

        def post(self, message: Message, nbytes: int) -> None:
            self.inner.post(self._as_other(message), nbytes)

        def receive(self, message: Message) -> Tensor:
            return self.inner.receive(self._as_other(message))

        def _as_other(self, message: Message) -> Message:
            action = message.name
            if message not in pair or not isinstance(action, Action):
                return message
            other = action._replace(microbatch=other_of_two(action.microbatch))
            # Tags count links within microbatches, three to a link.
            further = (other.microbatch - action.microbatch) * 3 * self._links
            return message._replace(name=other, tag=message.tag + further)

    return on_transport(Crossed)


class _Lost(AroundTransport):
    """The last microbatch's message to the second stage is never sent."""

    def __init__(self, inner: Transport, schedule: Schedule) -> None:
        super().__init__(inner)
        self._lost = Action(0, Kind.SEND_F, schedule.microbatches - 1)

    def send(self, message: Message, buffer: Tensor) -> None:
        if message.name != self._lost:
            self.inner.send(message, buffer)


def _crossing(kind: Kind, stage: int) -> Needs:
    """Require two messages whose exchange causes no deadlock."""

    def also(case: Case) -> str:
        one, other = (Action(stage, kind, m) for m in (0, 1))
        waits = hangs(exchange(lower(case.built), one, other))
        return "needs both messages under way at once" if waits else ""

    return Needs(also=also)


def _round_further(case: Case) -> str:
    looped = case.virtual > 1 and case.built.placement[1 + case.ranks : 2 + case.ranks] == case.built.placement[1:2]
    return "" if looped else "needs two rounds of stages over the ranks"


def _one_buffer(arrived: Tensor, message: Arrived) -> Tensor:
    """Receive everything on this rank into one buffer, overwriting messages in use."""
    if 0 not in message.kept or len(message.kept[0]) < len(arrived):
        message.kept[0] = torch.empty_like(arrived)
    # .data: a network card does not tell autograd that it writes, and neither does this.
    view = message.kept[0].data[: len(arrived)]
    return view.copy_(arrived)


def _spoil(spoil: Callable[[Tensor], object], *, microbatches: tuple[int, ...] = ()) -> Plant:
    """Write into the middle stage's saved input by ``spoil`` before a backward."""

    def own(inputs: Tensors, call: Call) -> Tensors:
        # A copy of its own: on one rank, the stage before may still need what it handed on.
        return tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs)

    def spoiled(gradients: Gradients, call: Call) -> Gradients:
        if call.microbatch in (microbatches or [call.microbatch]):
            spoil(call.inputs[0].data)
        return gradients

    return on_stages(Changes(inputs=own, given=spoiled), middle)


def _overwrite_half(kept: Tensor) -> None:
    flat = kept.view(-1)
    half = len(flat) // 2
    flat[half:] = flat[: len(flat) - half].clone()


def _not_a_number(inputs: Tensors, call: Call) -> Tensors:
    """Replace microbatch 1's inputs by NaN."""
    if call.microbatch != 1:
        return inputs
    return tuple(torch.full_like(x, torch.nan, requires_grad=True) if x.is_floating_point() else x for x in inputs)


PLANTS: Mapping[str, Plant | Entry] = {
    "activation-repeated": on_arrival(_repeat, _PAIR_FORWARD),
    "gradient-repeated": on_arrival(_repeat, _PAIR_BACKWARD),
    "activations-crossed": Entry(plant=_cross(_PAIR_FORWARD), needs=_crossing(Kind.SEND_F, 0)),
    "gradients-crossed": Entry(plant=_cross(_PAIR_BACKWARD), needs=_crossing(Kind.SEND_B, 1)),
    "activation-of-other-stage": Entry(
        plant=on_arrival(_of_other_stage, To(Kind.RECV_F, microbatches=(0,))), needs=Needs(also=_round_further)
    ),
    "activation-read-early": on_arrival(lambda arrived, message: torch.zeros_like(arrived), _ACTIVATION),
    "activation-partly-old": on_arrival(_partly_old, _PAIR_FORWARD),
    "activation-of-step-before": on_arrival(_of_step_before, _ACTIVATION),
    "activations-rounded": on_arrival(_in_bf16, _ACTIVATIONS),
    "gradients-travel-rounded": on_arrival(_in_bf16, To(Kind.RECV_B, 0)),
    "activation-damaged": on_arrival(_damage, _ACTIVATION),
    "message-lost": Entry(plant=on_transport(_Lost), timeout_s=2.0),
    "receive-buffer-reused": on_arrival(_one_buffer),
    "activation-nan": on_stages(Changes(inputs=_not_a_number), second),
    "input-let-go": _spoil(Tensor.zero_),
    "input-poisoned": _spoil(lambda kept: kept.fill_(torch.nan)),
    "input-partly-overwritten": _spoil(_overwrite_half, microbatches=(0,)),
}

"""Faults of messages between ranks: taken for one another, early, old, rounded, damaged or lost."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pipeproof.cases.case import Case
from pipeproof.cases.specimens.order import exchanged, hangs, other_of_two
from pipeproof.cases.specimens.planting import Arrived, To, first, on_arrival, on_transport, rounded, second
from pipeproof.cases.specimens.specimen import Fault, Needs, Plant, Specimen
from pipeproof.observers.wrappers import AroundTransport
from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.lower import lower
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.transport import Message, Transport

_ACTIVATIONS, _ACTIVATION = To(Kind.RECV_F, 1), To(Kind.RECV_F, 1, (0,))
_PAIR_FORWARD, _PAIR_BACKWARD = To(Kind.RECV_F, 1, (0, 1)), To(Kind.RECV_B, 0, (0, 1))

_ACTIVATIONS_OR_DATA = ("swapped-activations", "swapped-data")
_PLAIN = ("gpt", "gpt-tied", "mlp", "twice", "frozen", "batchnorm")  # one fp32 tensor crosses a boundary
_ACROSS = Needs(ranks=2, models=_PLAIN)
_TWO_ACROSS = Needs(ranks=2, microbatches=2, one_size=True)


def _repeated(arrived: Tensor, message: Arrived) -> Tensor:
    """The second of two holds the first one's bytes: its sender's buffer was not free yet, or was used again."""
    if 0 in message.kept:
        return message.kept.pop(0)
    message.kept[0] = arrived.clone()
    return arrived


def _partly_old(arrived: Tensor, message: Arrived) -> Tensor:
    """Only the first half of the message has been waited for; the buffer is one that held another before."""
    half = len(arrived) // 8 * 4
    return torch.cat([arrived[:half], _repeated(arrived, message)[half:]])


def _of_other_stage(arrived: Tensor, message: Arrived) -> Tensor:
    """The bytes of the message to the second stage are also those of the next one that comes to its rank."""
    if message.stage == 1:
        message.kept[0] = arrived.clone()
        return arrived
    return message.kept.pop(0, arrived)


def _of_step_before(arrived: Tensor, message: Arrived) -> Tensor:
    before = message.kept.get(0, arrived)
    message.kept[0] = arrived.clone()
    return before


def _in_bf16(arrived: Tensor, message: Arrived) -> Tensor:
    whole = len(arrived) // 4 * 4  # a gradient is followed by a byte that says whether it is there
    numbers = rounded(arrived[:whole].view(torch.float32), torch.bfloat16)
    return torch.cat([numbers.view(torch.uint8), arrived[whole:]])


def _damaged(arrived: Tensor, message: Arrived) -> Tensor:
    """One number has another exponent."""
    arrived = arrived.clone()
    arrived[7] ^= 1
    return arrived


def _crossed(pair: To) -> Plant:
    """The two messages arrive as each other."""

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
    """Ranks must not wait for each other when two messages are exchanged."""

    def also(case: Case) -> str:
        one, other = (Action(stage, kind, m) for m in (0, 1))
        waits = hangs(exchanged(lower(case.built), one, other))
        return "needs both messages under way at once" if waits else ""

    return Needs(ranks=2, microbatches=2, one_size=True, also=also)


def _round_further(case: Case) -> str:
    looped = case.virtual > 1 and case.built.placement[1 + case.ranks : 2 + case.ranks] == case.built.placement[1:2]
    return "" if looped else "needs two rounds of stages over the ranks"


SPECIMENS: Mapping[str, Specimen] = {
    "activation-repeated": Specimen(
        summary="the second activation sent to the second stage is the first once more: its buffer was used too early",
        origin="NVIDIA/Megatron-LM#4047; pytorch/PiPPy#1055",
        classes=("tI", "mE"),
        fault=Fault("wrong-message", "loss", stage=second, alike=_ACTIVATIONS_OR_DATA),
        needs=_TWO_ACROSS,
        plant=on_arrival(_repeated, _PAIR_FORWARD),
    ),
    "gradient-repeated": Specimen(
        summary="the second gradient sent to the first stage is the first once more",
        origin="NVIDIA/Megatron-LM#4047; pytorch/PiPPy#1055",
        classes=("tI", "mE"),
        fault=Fault("wrong-message", "gradient", stage=first, alike=("swapped-gradients",)),
        needs=_TWO_ACROSS,
        plant=on_arrival(_repeated, _PAIR_BACKWARD),
    ),
    "activations-crossed": Specimen(
        summary="two activations for the second stage arrive as each other",
        origin="NVIDIA/Megatron-LM#1450",
        classes=("tI", "mF"),
        schedule="gpipe",
        fault=Fault("wrong-message", "loss", stage=second, microbatches=(0, 1), alike=_ACTIVATIONS_OR_DATA),
        needs=_crossing(Kind.SEND_F, 0),
        plant=_crossed(_PAIR_FORWARD),
    ),
    "gradients-crossed": Specimen(
        summary="two gradients for the first stage arrive as each other",
        origin="NVIDIA/Megatron-LM#1450",
        classes=("tI", "mF"),
        schedule="gpipe",
        fault=Fault("wrong-message", "gradient", stage=first, microbatches=(0, 1), alike=("swapped-gradients",)),
        needs=_crossing(Kind.SEND_B, 1),
        plant=_crossed(_PAIR_BACKWARD),
    ),
    "activation-of-other-stage": Specimen(
        summary="where two stages send to one rank, one's activation arrives as the other's",
        origin="NVIDIA/Megatron-LM#1450: no tags, and one peer on both sides",
        classes=("tI", "mF"),
        schedule="looped-bfs",
        fault=Fault("wrong-message", "loss", microbatches=(0,), alike=("swapped-activations",)),
        needs=Needs(ranks=2, stages=4, models=_PLAIN, one_size=True, also=_round_further),
        plant=on_arrival(_of_other_stage, To(Kind.RECV_F, microbatches=(0,))),
    ),
    "activation-read-early": Specimen(
        summary="the second stage reads its first activation before it has arrived",
        origin="pytorch/PiPPy#585; NVIDIA/Megatron-LM 7ffea978",
        classes=("tI", "mE"),
        fault=Fault("uninitialised", "loss", stage=second, microbatches=(0,), alike=("zero",)),
        needs=_ACROSS,
        plant=on_arrival(lambda arrived, message: torch.zeros_like(arrived), _ACTIVATION),
    ),
    "activation-partly-old": Specimen(
        summary="of two transfers only one is waited for, so half of an activation is an earlier one's",
        origin="pytorch/pytorch#132644",
        classes=("tI", "mE"),
        fault=Fault("overwritten", "loss", stage=second, alike=("altered",)),
        needs=Needs(ranks=2, microbatches=2, models=_PLAIN, one_size=True),
        plant=on_arrival(_partly_old, _PAIR_FORWARD),
    ),
    "activation-of-step-before": Specimen(
        summary="from the second step on, the second stage is given the first activation of the step before",
        origin="pytorch/PiPPy#1070 and the class of receive buffers that outlive a step",
        classes=("tB", "mL"),
        fault=Fault("stale-tensor", "loss", stage=second, microbatches=(0,)),
        needs=Needs(ranks=2, models=_PLAIN, plan=("train", "train"), one_size=True),
        plant=on_arrival(_of_step_before, _ACTIVATION),
    ),
    "activations-rounded": Specimen(
        summary="activations for the second stage travel in bf16",
        origin="NVIDIA/Megatron-LM 52ed5237; hpcaitech/ColossalAI#79",
        classes=("mF",),
        fault=Fault("rounded", "loss", stage=second),
        needs=_ACROSS,
        plant=on_arrival(_in_bf16, _ACTIVATIONS),
    ),
    "gradients-travel-rounded": Specimen(
        summary="gradients for the first stage travel in bf16",
        origin="pytorch/pytorch#165143: two ends with different types",
        classes=("tI", "mF"),
        fault=Fault("rounded", "gradient", stage=first),
        needs=_ACROSS,
        plant=on_arrival(_in_bf16, To(Kind.RECV_B, 0)),
    ),
    "activation-damaged": Specimen(
        summary="one number of one activation changes on its way",
        origin="no report: silent corruption, as awslabs' detection for data-parallel training injects it",
        classes=("tI",),
        fault=Fault("altered", "loss", stage=second, microbatches=(0,)),
        needs=_ACROSS,
        plant=on_arrival(_damaged, _ACTIVATION),
    ),
    "message-lost": Specimen(
        summary="the last activation for the second stage is never sent",
        origin="pytorch/pytorch#152827: a send that is skipped",
        classes=("tI", "mF"),
        fault=Fault("deadlock", "deadlock", stage=second, microbatches=lambda case: (case.microbatches - 1,)),
        needs=Needs(ranks=2),
        plant=on_transport(_Lost),
        timeout_s=2.0,
    ),
}

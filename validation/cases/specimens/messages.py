"""Faults of messages between ranks: taken for one another, early, old, rounded, damaged or lost."""

from functools import partial

import torch
from torch import Tensor

from pipeline.action import Action, Kind
from pipeline.lower import lower
from pipeline.schedule import Schedule
from pipeline.transport import Message, Transport
from validation.cases.case import Case
from validation.cases.specimens.order import exchanged, hangs
from validation.cases.specimens.planting import TWO_OF_TWO, TWO_STAGES, Arriving, first, on_transport, rounded, second
from validation.cases.specimens.specimen import Fault, Needs, Plant, Specimen

_PLAIN = ("gpt", "gpt-tied", "mlp", "twice", "frozen", "batchnorm")  # one fp32 tensor crosses a boundary
_ACROSS = Needs(ranks=2)
_TWO_ACROSS = Needs(ranks=2, microbatches=2, also=lambda case: _one_size(case))


def _one_size(case: Case) -> str:
    differ = case.ragged or (case.unequal and not case.model.startswith("gpt"))
    return "needs messages of one size" if differ else ""


class _Repeated(Arriving):
    """Microbatch 1's message holds microbatch 0's bytes: its sender's buffer was not free yet, or was used again.

    Of the messages of ``kind`` to ``stage``; where microbatch 1 comes first, 0 gets 1's.
    """

    def __init__(self, inner: Transport, schedule: Schedule, *, stage: int, kind: Kind) -> None:
        super().__init__(inner, schedule)
        self._to = stage, kind
        self._kept: Tensor | None = None

    def change(self, action: Action, arrived: Tensor) -> Tensor:
        if (action.stage, action.kind) != self._to or action.microbatch > 1:
            return arrived
        kept, self._kept = self._kept, arrived.clone() if self._kept is None else None
        return arrived if kept is None else self.mixed(arrived, kept)

    def mixed(self, arrived: Tensor, kept: Tensor) -> Tensor:
        """What the later one of the two is given."""
        return kept


class _PartlyOld(_Repeated):
    """Only the first half of the message has been waited for; the buffer is one that held another before."""

    def mixed(self, arrived: Tensor, kept: Tensor) -> Tensor:
        half = len(arrived) // 8 * 4
        return torch.cat([arrived[:half], kept[half:]])


class _Crossed(Arriving):
    """The messages of microbatches 0 and 1 to ``stage`` arrive as each other."""

    def __init__(self, inner: Transport, schedule: Schedule, *, stage: int, kind: Kind) -> None:
        super().__init__(inner, schedule)
        self._to = stage, kind

    def post(self, message: Message, nbytes: int) -> None:
        self.inner.post(self._as_other(message), nbytes)

    def receive(self, message: Message) -> Tensor:
        return self.inner.receive(self._as_other(message))

    def _as_other(self, message: Message) -> Message:
        action = message.name
        if not isinstance(action, Action) or (action.stage, action.kind) != self._to or action.microbatch > 1:
            return message
        step = 1 if action.microbatch == 0 else -1
        # Tags count links within microbatches, three to a link.
        return message._replace(
            name=action._replace(microbatch=action.microbatch + step),
            tag=message.tag + step * 3 * self.schedule.n_stages,
        )


class _OfOtherStage(Arriving):
    """The first message to the stage one round further holds the bytes of the first one to the second stage.

    Both go from one rank to one other.
    """

    def __init__(self, inner: Transport, schedule: Schedule) -> None:
        super().__init__(inner, schedule)
        self._kept: Tensor | None = None

    def change(self, action: Action, arrived: Tensor) -> Tensor:
        if action.kind is Kind.RECV_F and action.microbatch == 0:
            if action.stage == 1:
                self._kept = arrived.clone()
            elif action.stage == 1 + self.schedule.n_ranks and self._kept is not None:
                return self._kept
        return arrived


class _Early(Arriving):
    """Microbatch 0's message to the second stage is read before it has arrived."""

    def change(self, action: Action, arrived: Tensor) -> Tensor:
        early = (action.stage, action.kind, action.microbatch) == (1, Kind.RECV_F, 0)
        return torch.zeros_like(arrived) if early else arrived


class _OfStepBefore(Arriving):
    """From the second step on, microbatch 0's message to the second stage holds the bytes of the step before."""

    def __init__(self, inner: Transport, schedule: Schedule) -> None:
        super().__init__(inner, schedule)
        self._kept: Tensor | None = None

    def change(self, action: Action, arrived: Tensor) -> Tensor:
        if (action.stage, action.kind, action.microbatch) != (1, Kind.RECV_F, 0):
            return arrived
        kept, self._kept = self._kept, arrived.clone()
        return arrived if kept is None else kept


class _Rounded(Arriving):
    """Messages of ``kind`` to ``stage`` travel in bf16."""

    def __init__(self, inner: Transport, schedule: Schedule, *, stage: int, kind: Kind) -> None:
        super().__init__(inner, schedule)
        self._to = stage, kind

    def change(self, action: Action, arrived: Tensor) -> Tensor:
        if (action.stage, action.kind) != self._to:
            return arrived
        whole = len(arrived) // 4 * 4  # a gradient is followed by a byte that says whether it is there
        numbers = rounded(arrived[:whole].view(torch.float32), torch.bfloat16)
        return torch.cat([numbers.view(torch.uint8), arrived[whole:]])


class _Damaged(Arriving):
    """One number of one message to the second stage has another exponent."""

    def change(self, action: Action, arrived: Tensor) -> Tensor:
        if (action.stage, action.kind, action.microbatch) == (1, Kind.RECV_F, 0):
            arrived = arrived.clone()
            arrived[7] ^= 1
        return arrived


class _Lost(Arriving):
    """The last microbatch's message to the second stage is never sent."""

    def send(self, message: Message, buffer: Tensor) -> None:
        if message.name != Action(0, Kind.SEND_F, self.schedule.microbatches - 1):
            self.inner.send(message, buffer)


def _to(wrap: type[Arriving], stage: int, kind: Kind) -> Plant:
    return on_transport(partial(wrap, stage=stage, kind=kind))  # type: ignore[call-arg]


def _crossing(kind: Kind, stage: int) -> Needs:
    """Ranks must not wait for each other when two messages are exchanged."""

    def also(case: Case) -> str:
        program = lower(case.built)
        one, other = (Action(stage, kind, m) for m in (0, 1))
        waits = hangs(exchanged(program, one, other))
        return _one_size(case) or ("needs both messages under way at once" if waits else "")

    return Needs(ranks=2, microbatches=2, also=also)


def _round_further(case: Case) -> str:
    looped = case.virtual > 1 and case.built.placement[1 + case.ranks : 2 + case.ranks] == case.built.placement[1:2]
    return _one_size(case) if looped else "needs two rounds of stages over the ranks"


SPECIMENS = (
    Specimen(
        name="activation-repeated",
        summary="the second activation sent to the second stage is the first once more: its buffer was used too early",
        origin="NVIDIA/Megatron-LM#4047; pytorch/PiPPy#1055",
        classes=("tI", "mE"),
        smallest=TWO_OF_TWO,
        law="loss",
        fault=Fault("wrong-message", stage=second, alike=("swapped-activations", "swapped-data")),
        needs=_TWO_ACROSS,
        plant=_to(_Repeated, 1, Kind.RECV_F),
    ),
    Specimen(
        name="gradient-repeated",
        summary="the second gradient sent to the first stage is the first once more",
        origin="NVIDIA/Megatron-LM#4047; pytorch/PiPPy#1055",
        classes=("tI", "mE"),
        smallest=TWO_OF_TWO,
        law="gradient",
        fault=Fault("wrong-message", stage=first, alike=("swapped-gradients",)),
        needs=_TWO_ACROSS,
        plant=_to(_Repeated, 0, Kind.RECV_B),
    ),
    Specimen(
        name="activations-crossed",
        summary="two activations for the second stage arrive as each other",
        origin="NVIDIA/Megatron-LM#1450",
        classes=("tI", "mF"),
        smallest="gpipe r2 s2 m2 split=1,1 model=mlp plan=train seed=0",
        law="loss",
        fault=Fault("wrong-message", stage=second, microbatches=(0, 1), alike=("swapped-activations", "swapped-data")),
        needs=_crossing(Kind.SEND_F, 0),
        plant=_to(_Crossed, 1, Kind.RECV_F),
    ),
    Specimen(
        name="gradients-crossed",
        summary="two gradients for the first stage arrive as each other",
        origin="NVIDIA/Megatron-LM#1450",
        classes=("tI", "mF"),
        smallest="gpipe r2 s2 m2 split=1,1 model=mlp plan=train seed=0",
        law="gradient",
        fault=Fault("wrong-message", stage=first, microbatches=(0, 1), alike=("swapped-gradients",)),
        needs=_crossing(Kind.SEND_B, 1),
        plant=_to(_Crossed, 0, Kind.RECV_B),
    ),
    Specimen(
        name="activation-of-other-stage",
        summary="where two stages send to one rank, one's activation arrives as the other's",
        origin="NVIDIA/Megatron-LM#1450: no tags, and one peer on both sides",
        classes=("tI", "mF"),
        smallest="looped-bfs r2 s4 m1 split=1,1,1,1 model=mlp plan=train seed=0",
        law="loss",
        fault=Fault("wrong-message", microbatches=(0,), alike=("swapped-activations",)),
        needs=Needs(ranks=2, stages=4, models=_PLAIN, also=_round_further),
        plant=on_transport(_OfOtherStage),
    ),
    Specimen(
        name="activation-read-early",
        summary="the second stage reads its first activation before it has arrived",
        origin="pytorch/PiPPy#585; NVIDIA/Megatron-LM 7ffea978",
        classes=("tI", "mE"),
        smallest=TWO_STAGES,
        law="loss",
        fault=Fault("uninitialised", stage=second, microbatches=(0,), alike=("zero",)),
        needs=Needs(ranks=2, models=_PLAIN),
        plant=on_transport(_Early),
    ),
    Specimen(
        name="activation-partly-old",
        summary="of two transfers only one is waited for, so half of an activation is an earlier one's",
        origin="pytorch/pytorch#132644",
        classes=("tI", "mE"),
        smallest=TWO_OF_TWO,
        law="loss",
        fault=Fault("overwritten", stage=second, alike=("altered",)),
        needs=Needs(ranks=2, microbatches=2, models=_PLAIN, also=_one_size),
        plant=_to(_PartlyOld, 1, Kind.RECV_F),
    ),
    Specimen(
        name="activation-of-step-before",
        summary="from the second step on, the second stage is given the first activation of the step before",
        origin="pytorch/PiPPy#1070 and the class of receive buffers that outlive a step",
        classes=("tB", "mL"),
        smallest="naive r2 s2 m1 split=1,1 model=mlp plan=train+train seed=0",
        law="loss",
        fault=Fault("stale-tensor", stage=second, microbatches=(0,)),
        needs=Needs(ranks=2, models=_PLAIN, plan=("train", "train"), also=_one_size),
        plant=on_transport(_OfStepBefore),
    ),
    Specimen(
        name="activations-rounded",
        summary="activations for the second stage travel in bf16",
        origin="NVIDIA/Megatron-LM 52ed5237; hpcaitech/ColossalAI#79",
        classes=("mF",),
        smallest=TWO_STAGES,
        law="loss",
        fault=Fault("rounded", stage=second),
        needs=Needs(ranks=2, models=_PLAIN),
        plant=_to(_Rounded, 1, Kind.RECV_F),
    ),
    Specimen(
        name="gradients-travel-rounded",
        summary="gradients for the first stage travel in bf16",
        origin="pytorch/pytorch#165143: two ends with different types",
        classes=("tI", "mF"),
        smallest=TWO_STAGES,
        law="gradient",
        fault=Fault("rounded", stage=first),
        needs=Needs(ranks=2, models=_PLAIN),
        plant=_to(_Rounded, 0, Kind.RECV_B),
    ),
    Specimen(
        name="activation-damaged",
        summary="one number of one activation changes on its way",
        origin="no report: silent corruption, as awslabs' detection for data-parallel training injects it",
        classes=("tI",),
        smallest=TWO_STAGES,
        law="loss",
        fault=Fault("altered", stage=second, microbatches=(0,)),
        needs=Needs(ranks=2, models=_PLAIN),
        plant=on_transport(_Damaged),
    ),
    Specimen(
        name="message-lost",
        summary="the last activation for the second stage is never sent",
        origin="pytorch/pytorch#152827: a send that is skipped",
        classes=("tI", "mF"),
        smallest=TWO_STAGES,
        law="deadlock",
        fault=Fault("deadlock", stage=second, microbatches=lambda case: (case.microbatches - 1,)),
        needs=_ACROSS,
        plant=on_transport(_Lost),
        timeout_s=2.0,
    ),
)

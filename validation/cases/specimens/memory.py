"""Faults of memory: tensors overwritten, let go or spoiled while they are still needed."""

from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.boundary import Gradients, Tensors
from pipeline.schedule import Schedule
from pipeline.stage import Goal, Stage
from pipeline.transport import Message, Transport
from validation.cases.specimens.planting import middle, on_stages, on_transport, second
from validation.cases.specimens.specimen import Fault, Needs, Specimen
from validation.observers.wrappers import AroundStage, AroundTransport

_FLOATS = ("gpt", "gpt-tied", "mlp", "twice", "frozen", "batchnorm", "dropout")


class _OneBuffer(AroundTransport):
    """Everything received on this rank lies in one buffer, whatever is still needed of the last message."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def receive(self, message: Message) -> Tensor:
        arrived = self.inner.receive(message)
        if len(self._buffer) < len(arrived):
            self._buffer = torch.empty(len(arrived), dtype=torch.uint8, device=arrived.device)
        # .data: a network card does not tell autograd that it writes, and neither does this.
        view = self._buffer.data[: len(arrived)]
        view.copy_(arrived)
        return view


class _Spoiled(AroundStage):
    """Before a backward, ``spoil`` has written into the input that was kept for it."""

    def __init__(self, inner: Stage, spoil: Callable[[Tensor, int], None]) -> None:
        super().__init__(inner)
        self._spoil = spoil
        self._inputs: dict[int, Tensor] = {}

    def forward(self, microbatch: int, inputs: Tensors, goal: Goal | None) -> Tensors:
        # A copy of its own: on one rank, the stage before may still need what it handed on.
        mine = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs)
        self._inputs[microbatch] = mine[0]
        return self.inner.forward(microbatch, mine, goal)

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        self._spoil(self._inputs.pop(microbatch).data, microbatch)
        return self.inner.backward(microbatch, gradients)

    def backward_input(self, microbatch: int, gradients: Gradients) -> Gradients:
        self._spoil(self._inputs.pop(microbatch).data, microbatch)
        return self.inner.backward_input(microbatch, gradients)


def _let_go(kept: Tensor, microbatch: int) -> None:
    kept.zero_()


def _poisoned(kept: Tensor, microbatch: int) -> None:
    kept.fill_(float("nan"))


def _partly_overwritten(kept: Tensor, microbatch: int) -> None:
    if microbatch == 0:
        flat = kept.view(-1)
        half = len(flat) // 2
        flat[half:] = flat[: len(flat) - half].clone()


class _Poisons(AroundStage):
    def forward(self, microbatch: int, inputs: Tensors, goal: Goal | None) -> Tensors:
        if microbatch == 1:
            inputs = tuple(torch.full_like(x, float("nan")) if x.is_floating_point() else x for x in inputs)
            inputs = tuple(x.requires_grad_(x.is_floating_point()) for x in inputs)
        return self.inner.forward(microbatch, inputs, goal)


def _spoiled(spoil: Callable[[Tensor, int], None]) -> Callable[[Stage, Schedule], Stage]:
    return lambda stage, schedule: _Spoiled(stage, spoil)


SPECIMENS = (
    Specimen(
        name="receive-buffer-reused",
        summary="a rank receives everything into one buffer, so a kept activation is overwritten before its backward",
        origin="pytorch/pytorch#185331, pytorch/PiPPy#1055",
        classes=("tB", "tI", "mE"),
        smallest="naive r3 s3 m1 split=1,1,1 model=mlp plan=train seed=0",
        law="gradient",
        fault=Fault("overwritten"),
        needs=Needs(ranks=3),
        plant=on_transport(lambda transport, schedule: _OneBuffer(transport)),
    ),
    Specimen(
        name="activation-nan",
        summary="stage 1 is given NaN in place of microbatch 1's activation",
        origin="pytorch/torchtitan#771; NVIDIA/Megatron-LM#422",
        classes=("tH", "mE"),
        smallest="naive r2 s2 m2 split=1,1 model=mlp plan=train seed=0",
        law="loss",
        fault=Fault("not-finite", stage=second, microbatches=(1,)),
        needs=Needs(microbatches=2, stages=2),
        plant=on_stages(lambda stage, schedule: _Poisons(stage), second),
    ),
    Specimen(
        name="input-let-go",
        summary="a stage's input is freed after its forward, and is empty memory in its backward",
        origin="sail-sg/zero-bubble-pipeline-parallelism 84a9c1e3; NVIDIA/Megatron-LM dedb6dd6",
        classes=("mE",),
        smallest="naive r2 s2 m1 split=1,1 model=mlp plan=train seed=0",
        law="gradient",
        fault=Fault("overwritten", stage=middle, alike=("uninitialised", "zero")),
        needs=Needs(stages=2, models=_FLOATS),
        plant=on_stages(_spoiled(_let_go), middle),
    ),
    Specimen(
        name="input-poisoned",
        summary="a stage's input is freed after its forward, and its memory is marked with NaN",
        origin="sail-sg/zero-bubble-pipeline-parallelism 84a9c1e3",
        classes=("mE",),
        smallest="naive r2 s2 m1 split=1,1 model=mlp plan=train seed=0",
        law="gradient",
        fault=Fault("overwritten", stage=middle, alike=("not-finite", "uninitialised")),
        needs=Needs(stages=2, models=_FLOATS),
        plant=on_stages(_spoiled(_poisoned), middle),
    ),
    Specimen(
        name="input-partly-overwritten",
        summary="half of the input that a stage keeps of microbatch 0 is overwritten before its backward",
        origin="NVIDIA/Megatron-LM#7398; deepspeedai/DeepSpeed#4708",
        classes=("tB", "mE"),
        smallest="naive r2 s2 m1 split=1,1 model=mlp plan=train seed=0",
        law="gradient",
        fault=Fault("overwritten", stage=middle, microbatches=(0,)),
        needs=Needs(stages=2, models=_FLOATS),
        plant=on_stages(_spoiled(_partly_overwritten), middle),
    ),
)

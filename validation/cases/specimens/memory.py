"""Faults of memory: tensors overwritten, let go or spoiled while they are still needed."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pipeproof.cases.specimens.planting import Arrived, Call, Changes, middle, on_arrival, on_stages, second
from pipeproof.cases.specimens.specimen import Fault, Needs, Plant, Specimen
from pipeproof.pipeline.boundary import Gradients, Tensors

_KEPT = Needs(stages=2, models=("gpt", "gpt-tied", "mlp", "twice", "frozen", "batchnorm", "dropout"))


def _one_buffer(arrived: Tensor, message: Arrived) -> Tensor:
    """Everything received on this rank lies in one buffer, whatever is still needed of the last message."""
    if 0 not in message.kept or len(message.kept[0]) < len(arrived):
        message.kept[0] = torch.empty_like(arrived)
    # .data: a network card does not tell autograd that it writes, and neither does this.
    view = message.kept[0].data[: len(arrived)]
    return view.copy_(arrived)


def _spoiled(spoil: Callable[[Tensor], object], *, microbatches: tuple[int, ...] = ()) -> Plant:
    """Before a backward, ``spoil`` has written into the input that the middle stage kept for it."""

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
    """In place of what microbatch 1 brings."""
    if call.microbatch != 1:
        return inputs
    return tuple(torch.full_like(x, torch.nan, requires_grad=True) if x.is_floating_point() else x for x in inputs)


SPECIMENS: Mapping[str, Specimen] = {
    "receive-buffer-reused": Specimen(
        summary="a rank receives everything into one buffer, so a kept activation is overwritten before its backward",
        origin="pytorch/pytorch#185331, pytorch/PiPPy#1055",
        classes=("tB", "tI", "mE"),
        fault=Fault("overwritten", "gradient"),
        needs=Needs(ranks=3),
        plant=on_arrival(_one_buffer),
    ),
    "activation-nan": Specimen(
        summary="stage 1 is given NaN in place of microbatch 1's activation",
        origin="pytorch/torchtitan#771; NVIDIA/Megatron-LM#422",
        classes=("tH", "mE"),
        fault=Fault("not-finite", "loss", stage=second, microbatches=(1,)),
        needs=Needs(microbatches=2, stages=2),
        plant=on_stages(Changes(inputs=_not_a_number), second),
    ),
    "input-let-go": Specimen(
        summary="a stage's input is freed after its forward, and is empty memory in its backward",
        origin="sail-sg/zero-bubble-pipeline-parallelism 84a9c1e3; NVIDIA/Megatron-LM dedb6dd6",
        classes=("mE",),
        fault=Fault("overwritten", "gradient", stage=middle, alike=("uninitialised", "zero")),
        needs=_KEPT,
        plant=_spoiled(Tensor.zero_),
    ),
    "input-poisoned": Specimen(
        summary="a stage's input is freed after its forward, and its memory is marked with NaN",
        origin="sail-sg/zero-bubble-pipeline-parallelism 84a9c1e3",
        classes=("mE",),
        fault=Fault("overwritten", "gradient", stage=middle, alike=("not-finite", "uninitialised")),
        needs=_KEPT,
        plant=_spoiled(lambda kept: kept.fill_(torch.nan)),
    ),
    "input-partly-overwritten": Specimen(
        summary="half of the input that a stage keeps of microbatch 0 is overwritten before its backward",
        origin="NVIDIA/Megatron-LM#7398; deepspeedai/DeepSpeed#4708",
        classes=("tB", "mE"),
        fault=Fault("overwritten", "gradient", stage=middle, microbatches=(0,)),
        needs=_KEPT,
        plant=_spoiled(_overwrite_half, microbatches=(0,)),
    ),
}

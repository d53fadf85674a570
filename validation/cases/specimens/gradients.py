"""Faults in the gradients of single stages and parameters: sign, absence, zero, rounding, order of elements."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pipeproof.cases.specimens.planting import (
    NORM,
    last,
    middle,
    norm_weight,
    on_each,
    on_gradients,
    on_work,
    rounded,
    scaled,
    second,
)
from pipeproof.cases.specimens.specimen import Fault, Needs, Specimen
from pipeproof.pipeline.step import Parts
from pipeproof.pipeline.transport import Message

_TAG = 2**30 - 1  # no other message has it


def _lose_first(module: nn.Module) -> None:
    next(parameter for parameter in module.parameters() if parameter.grad is not None).grad = None


def _roll(gradient: Tensor) -> None:
    gradient.copy_(gradient.roll(1))


def _give_to_frozen(module: nn.Module) -> None:
    for parameter in module.parameters():
        if not parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)


def _averaged_with_wrong_rank(parts: Parts) -> None:
    """The group that averages a stage's gradients over replicas holds another stage in the replica's place."""
    transport, ranks = parts.transport, parts.program.schedule.placement[:2]
    if transport.rank in ranks:
        here = ranks.index(transport.rank)
        own = norm_weight(next(stage.module for stage in parts.stages if stage.index == here))[0]
        assert own.grad is not None, "a norm is trained"
        message = Message("gradient of a replica", ranks[1 - here], _TAG)
        sent = own.grad.detach().clone()
        transport.send(message, sent.view(torch.uint8))
        transport.post(message, sent.nbytes)
        own.grad = (own.grad + transport.receive(message).view(own.grad.dtype)) / 2
        transport.flush()
    parts.gradients.reduce_tied()


SPECIMENS: Mapping[str, Specimen] = {
    "stage-negated": Specimen(
        summary="the gradients of the middle stage have the wrong sign, which no norm can see",
        origin="measured blindness of norm and loss; the class of pytorch/pytorch#164777",
        classes=("tA",),
        fault=Fault("sign", "gradient", stage=middle, factor=lambda case: -1.0),
        plant=on_gradients(scaled(-1.0), middle),
    ),
    "gradient-none": Specimen(
        summary="a parameter of the last stage gets no gradient at all",
        origin="pytorch/pytorch#138863, pytorch/PiPPy#738",
        classes=("tC", "tH"),
        fault=Fault("missing", "presence", stage=last, parameter="."),
        plant=on_gradients(_lose_first, last),
    ),
    "layernorm-zero": Specimen(
        summary="the loss is right and the gradient of one LayerNorm weight is zero",
        origin="NVIDIA/Megatron-LM#1446; DeepSpeed PR 8491",
        classes=("tB", "mB"),
        fault=Fault("zero", "gradient", stage=middle, parameter=NORM),
        plant=on_gradients(on_each(Tensor.zero_, of=norm_weight), middle),
    ),
    "gradients-all-zero": Specimen(
        summary="a dead run: every gradient is zero, on every stage",
        origin="NVIDIA-NeMo/Automodel#3701",
        classes=("tJ",),
        fault=Fault("zero", "gradient"),
        plant=on_gradients(scaled(0.0)),
    ),
    "gradient-rolled": Specimen(
        summary="a flat gradient buffer is off by one element for one parameter",
        origin="NVIDIA/Megatron-LM#844: offsets that differ between ranks",
        classes=("mC", "mE"),
        fault=Fault("altered", "gradient", stage=middle, parameter=NORM, alike=("computation",)),
        plant=on_gradients(on_each(_roll, of=norm_weight), middle),
    ),
    "gradients-rounded": Specimen(
        summary="one stage's gradients are kept in bf16 where fp32 is meant",
        origin="the class of hpcaitech/ColossalAI#79: two sides that assume different types",
        classes=("mF",),
        fault=Fault("rounded", "gradient", stage=middle),
        plant=on_gradients(on_each(lambda gradient: gradient.copy_(rounded(gradient, torch.bfloat16))), middle),
    ),
    "frozen-gets-gradient": Specimen(
        summary="a frozen parameter is given a gradient",
        origin="pytorch/PiPPy#1029: gradients for what has none",
        classes=("tH",),
        fault=Fault("unexpected", "presence"),
        needs=Needs(models=("frozen",)),
        plant=on_gradients(_give_to_frozen),
    ),
    "averaged-over-wrong-group": Specimen(
        summary="the first two stages average one gradient with each other, as if they were replicas",
        origin="NVIDIA/Megatron-LM#7452 (collectives over the wrong group)",
        classes=("tD", "mI"),
        fault=Fault("extra-term", "gradient", stage=second, parameter=NORM, alike=("scale",)),
        needs=Needs(ranks=2, stages=2),
        plant=on_work(reduce=_averaged_with_wrong_rank),
    ),
}

"""Faults in the gradients of single stages and parameters: sign, absence, zero, rounding, order of elements."""

import torch
from torch import nn

from pipeline.step import Parts
from pipeline.transport import Message
from validation.cases.specimens.planting import (
    NORM,
    ONE,
    TWO_STAGES,
    Around,
    gradients_of,
    last,
    middle,
    norm_weight,
    on_gradients,
    on_work,
    rounded,
    scaled,
    second,
)
from validation.cases.specimens.specimen import Fault, Needs, Specimen

_TAG = 2**30 - 1  # no other message has it


def _lose_first(module: nn.Module) -> None:
    next(parameter for parameter in module.parameters() if parameter.grad is not None).grad = None


def _zero_norm(module: nn.Module) -> None:
    gradient = norm_weight(module).grad
    if gradient is not None:
        gradient.zero_()


def _roll_norm(module: nn.Module) -> None:
    gradient = norm_weight(module).grad
    if gradient is not None:
        gradient.copy_(gradient.roll(1))


def _round(module: nn.Module) -> None:
    for gradient in gradients_of(module):
        gradient.copy_(rounded(gradient, torch.bfloat16))


def _give_to_frozen(module: nn.Module) -> None:
    for parameter in module.parameters():
        if not parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)


class _WrongGroup(Around):
    """The group that averages a stage's gradients over replicas holds another stage in the replica's place."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        schedule = parts.program.schedule
        self._transport = parts.transport
        self._ranks = schedule.placement[0], schedule.placement[1]
        self._norms = {s.index: norm_weight(s.module) for s in parts.stages if s.index < 2}

    def reduce_tied(self) -> None:
        own = self._norms.get(0 if self._transport.rank == self._ranks[0] else 1)
        if self._transport.rank in self._ranks and own is not None and own.grad is not None:
            peer = self._ranks[self._transport.rank == self._ranks[0]]
            message = Message("gradient of a replica", peer, _TAG)
            sent = own.grad.detach().clone()
            self._transport.send(message, sent.view(torch.uint8))
            self._transport.post(message, sent.nbytes)
            own.grad = (own.grad + self._transport.receive(message).view(own.grad.dtype)) / 2
            self._transport.flush()
        self.inner.reduce_tied()


SPECIMENS = (
    Specimen(
        name="stage-negated",
        summary="the gradients of the middle stage have the wrong sign, which no norm can see",
        origin="measured blindness of norm and loss; the class of pytorch/pytorch#164777",
        classes=("tA",),
        smallest=ONE,
        law="gradient",
        fault=Fault("sign", stage=middle, factor=lambda case: -1.0),
        plant=on_gradients(scaled(-1.0), middle),
    ),
    Specimen(
        name="gradient-none",
        summary="a parameter of the last stage gets no gradient at all",
        origin="pytorch/pytorch#138863, pytorch/PiPPy#738",
        classes=("tC", "tH"),
        smallest=ONE,
        law="presence",
        fault=Fault("missing", stage=last, parameter="."),
        plant=on_gradients(_lose_first, last),
    ),
    Specimen(
        name="layernorm-zero",
        summary="the loss is right and the gradient of one LayerNorm weight is zero",
        origin="NVIDIA/Megatron-LM#1446; DeepSpeed PR 8491",
        classes=("tB", "mB"),
        smallest=ONE,
        law="gradient",
        fault=Fault("zero", stage=middle, parameter=NORM),
        plant=on_gradients(_zero_norm, middle),
    ),
    Specimen(
        name="gradients-all-zero",
        summary="a dead run: every gradient is zero, on every stage",
        origin="NVIDIA-NeMo/Automodel#3701",
        classes=("tJ",),
        smallest=ONE,
        law="gradient",
        fault=Fault("zero"),
        plant=on_gradients(scaled(0.0)),
    ),
    Specimen(
        name="gradient-rolled",
        summary="a flat gradient buffer is off by one element for one parameter",
        origin="NVIDIA/Megatron-LM#844: offsets that differ between ranks",
        classes=("mC", "mE"),
        smallest=ONE,
        law="gradient",
        fault=Fault("altered", stage=middle, parameter=NORM, alike=("computation",)),
        plant=on_gradients(_roll_norm, middle),
    ),
    Specimen(
        name="gradients-rounded",
        summary="one stage's gradients are kept in bf16 where fp32 is meant",
        origin="the class of hpcaitech/ColossalAI#79: two sides that assume different types",
        classes=("mF",),
        smallest=ONE,
        law="gradient",
        fault=Fault("rounded", stage=middle),
        plant=on_gradients(_round, middle),
    ),
    Specimen(
        name="frozen-gets-gradient",
        summary="a frozen parameter is given a gradient",
        origin="pytorch/PiPPy#1029: gradients for what has none",
        classes=("tH",),
        smallest="naive r1 s1 m1 split=1 model=frozen plan=train seed=0",
        law="presence",
        fault=Fault("unexpected"),
        needs=Needs(models=("frozen",)),
        plant=on_gradients(_give_to_frozen),
    ),
    Specimen(
        name="averaged-over-wrong-group",
        summary="the first two stages average one gradient with each other, as if they were replicas",
        origin="NVIDIA/Megatron-LM#7452 (collectives over the wrong group)",
        classes=("tD", "mI"),
        smallest=TWO_STAGES,
        law="gradient",
        fault=Fault("extra-term", stage=second, parameter=NORM, alike=("scale",)),
        needs=Needs(ranks=2, stages=2),
        plant=on_work(_WrongGroup),
    ),
)

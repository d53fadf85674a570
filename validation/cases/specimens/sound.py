"""What looks like a fault and is none: a validation must pass with each of these planted."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from random import random

import torch
from torch import Tensor, nn

from pipeproof.cases.specimens.planting import (
    Arrived,
    Call,
    Changes,
    both,
    gradients_by_parameter,
    on_arrival,
    on_gradients,
    on_stages,
    on_steps,
    on_work,
    put_off,
    scaled,
)
from pipeproof.cases.specimens.scale import loss_divided
from pipeproof.cases.specimens.specimen import Needs, Planted
from pipeproof.observers.wrappers import Pairs, Steps
from pipeproof.pipeline.step import Parts

_MANY = Needs(microbatches=2)


def _late(arrived: Tensor, message: Arrived) -> Tensor:
    time.sleep(random() * 1e-3)
    return arrived.clone()


def _drawing(call: Call) -> AbstractContextManager[None]:
    torch.rand(3)
    return nullcontext()


def _root_of_roots(squares: list[float], parts: Parts) -> list[float]:
    norm = torch.tensor(squares, dtype=torch.float64).sum().sqrt().float() if squares else torch.zeros(())
    return [norm.item() ** 2]


def _in_one_buffer(module: nn.Module) -> None:
    """Gradients become views of it."""
    gradients = gradients_by_parameter(module)
    flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
    parts = torch.split(flat, [gradient.numel() for gradient in gradients.values()])
    for parameter, part in zip(gradients, parts, strict=True):
        parameter.grad = part.view(parameter.shape)


def _evaluate_first(microbatches: Pairs, steps: Steps) -> Pairs:
    steps.eval_step(microbatches)
    return microbatches


CONTROLS: Mapping[str, Planted] = {
    "slow-messages": Planted(
        summary="messages come late, in random order, into buffers of their own",
        origin="pytorch/PiPPy#1088: only random delays show a race; without one they must show nothing",
        needs=Needs(ranks=2, microbatches=3),
        schedule="1f1b",
        plant=on_arrival(_late),
    ),
    "random-numbers-drawn": Planted(
        summary="stages draw from the global generator, on which no keyed mask depends",
        origin="pytorch/pytorch#55036: masks that depend on the order of draws",
        needs=Needs(microbatches=2, models=("dropout",)),
        plant=on_stages(Changes(during=_drawing)),
    ),
    "loss-scaled-and-back": Planted(
        summary="the loss is scaled by 1024 and gradients by its inverse, which changes no bit",
        origin="mixed-precision training everywhere",
        needs=_MANY,
        plant=both(loss_divided(lambda goal, count: goal.divisor / 1024), on_gradients(scaled(1 / 1024))),
    ),
    "shares-added-backwards": Planted(
        summary="microbatches' shares are added in another order than reported: other roundings, the same sum",
        origin="sail-sg/zero-bubble-pipeline-parallelism b7cf95ce: exactly the same numbers, only if asked for",
        needs=Needs(microbatches=3),
        plant=put_off(lambda call: True, reduced=False),
    ),
    "norm-by-rank": Planted(
        summary="squares are summed by rank and rooted in fp32: the norm's last digits differ",
        origin="pytorch/torchtitan#4312",
        needs=_MANY,
        plant=on_work(squares=_root_of_roots),
    ),
    "flat-gradients": Planted(
        summary="gradients are moved into one flat buffer",
        origin="NVIDIA/Megatron-LM: contiguous gradient buffers",
        needs=_MANY,
        plant=on_gradients(_in_one_buffer),
    ),
    "evaluation-before-steps": Planted(
        summary="an evaluation goes before each step and must leave nothing behind",
        origin="pytorch/pytorch#162822",
        needs=Needs(models=("batchnorm",), plan=("train", "train")),
        drive=on_steps(given=_evaluate_first),
    ),
}

"""What looks like a fault and is none: a validation must pass with each of these planted."""

import time
from dataclasses import replace
from random import Random

import torch
from torch import Tensor

from pipeline.boundary import Gradients, Tensors
from pipeline.stage import Goal, Stage
from pipeline.step import Parts
from pipeline.transport import Message, Transport
from validation.cases.specimens.planting import (
    ONE_OF_TWO,
    Around,
    gradients_of,
    on_gradients,
    on_stages,
    on_transport,
    on_work,
)
from validation.cases.specimens.specimen import Planted
from validation.observers.wrappers import AroundStage, AroundSteps, AroundTransport, Pairs


class _Late(AroundTransport):
    """Every message takes a while."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self._random = Random(inner.rank)

    def receive(self, message: Message) -> Tensor:
        time.sleep(self._random.random() * 1e-3)
        return self.inner.receive(message).clone()


class _Draws(AroundStage):
    """Random numbers are drawn between actions, as logging and sampling do."""

    def forward(self, microbatch: int, inputs: Tensors, goal: Goal | None) -> Tensors:
        torch.rand(3)
        return self.inner.forward(microbatch, inputs, goal)


class _ScaledLoss(AroundStage):
    """The loss is scaled by a power of two, and gradients by its inverse: no bit changes."""

    def forward(self, microbatch: int, inputs: Tensors, goal: Goal | None) -> Tensors:
        return self.inner.forward(microbatch, inputs, goal and goal._replace(divisor=goal.divisor / 1024))


class _AddsBackwards(AroundStage):
    """Shares of microbatches are kept apart and added last to first: other roundings, the same sum."""

    def __init__(self, inner: Stage) -> None:
        super().__init__(inner)
        self._shares: list[dict[torch.nn.Parameter, Tensor | None]] = []

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        before = self._put_by()
        result = self.inner.backward(microbatch, gradients)
        self._keep(before)
        return result

    def backward_weight(self, microbatch: int) -> None:
        before = self._put_by()
        self.inner.backward_weight(microbatch)
        self._keep(before)

    def finish(self) -> None:
        for share in reversed(self._shares):
            for parameter, gradient in share.items():
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._shares = []

    def _put_by(self) -> dict[torch.nn.Parameter, Tensor | None]:
        before = {parameter: parameter.grad for parameter in self.module.parameters()}
        self.module.zero_grad(set_to_none=True)
        return before

    def _keep(self, before: dict[torch.nn.Parameter, Tensor | None]) -> None:
        self._shares.append({parameter: parameter.grad for parameter in before})
        for parameter, gradient in before.items():
            parameter.grad = gradient


class _ThenAdds(Around):
    def reduce_tied(self) -> None:
        for stage in self.stages:
            if isinstance(stage, _AddsBackwards):
                stage.finish()
        self.inner.reduce_tied()


def _added_backwards(parts: Parts) -> Parts:
    return on_work(_ThenAdds)(replace(parts, stages=tuple(map(_AddsBackwards, parts.stages))))


class _RootOfRoots(Around):
    """Each rank sends the square of its own norm in fp32: the last digits of the norm differ."""

    def squares(self) -> list[float]:
        squares = self.inner.squares()
        norm = torch.tensor(squares, dtype=torch.float64).sum().sqrt().float() if squares else torch.zeros(())
        return [norm.item() ** 2]


class _CopiesGradients(Around):
    """Gradients lie in one flat buffer, of which the parameters' are views."""

    def reduce_tied(self) -> None:
        for stage in self.stages:
            gradients = gradients_of(stage.module)
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            parts = torch.split(flat, [gradient.numel() for gradient in gradients])
            owners = [parameter for parameter in stage.module.parameters() if parameter.grad is not None]
            for parameter, part in zip(owners, parts, strict=True):
                parameter.grad = part.view(parameter.shape)
        self.inner.reduce_tied()


class _EvaluatesMore(AroundSteps):
    """An evaluation before every step."""

    def given(self, operation: str, microbatches: Pairs) -> Pairs:
        if operation == "train":
            self.inner.eval_step(microbatches)
        return microbatches


def _unscale(module: torch.nn.Module) -> None:
    for gradient in gradients_of(module):
        gradient.div_(1024)


def _scaled_and_back(parts: Parts) -> Parts:
    return on_gradients(_unscale)(on_stages(lambda stage, schedule: _ScaledLoss(stage))(parts))


CONTROLS = (
    Planted(
        name="slow-messages",
        summary="messages come late, in random order, into buffers of their own",
        origin="pytorch/PiPPy#1088: only random delays show a race; without one they must show nothing",
        smallest="1f1b r2 s2 m3 split=1,1 model=mlp plan=train seed=0",
        plant=on_transport(lambda transport, schedule: _Late(transport)),
    ),
    Planted(
        name="random-numbers-drawn",
        summary="stages draw from the global generator, on which no keyed mask depends",
        origin="pytorch/pytorch#55036: masks that depend on the order of draws",
        smallest="naive r1 s1 m2 split=1 model=dropout plan=train seed=0",
        plant=on_stages(lambda stage, schedule: _Draws(stage)),
    ),
    Planted(
        name="loss-scaled-and-back",
        summary="the loss is scaled by 1024 and gradients by its inverse, which changes no bit",
        origin="mixed-precision training everywhere",
        smallest=ONE_OF_TWO,
        plant=_scaled_and_back,
    ),
    Planted(
        name="shares-added-backwards",
        summary="microbatches' shares are added in another order than reported: other roundings, the same sum",
        origin="sail-sg/zero-bubble-pipeline-parallelism b7cf95ce: exactly the same numbers, only if asked for",
        smallest="naive r1 s1 m3 split=1 model=mlp plan=train seed=0",
        plant=_added_backwards,
    ),
    Planted(
        name="norm-by-rank",
        summary="squares are summed by rank and rooted in fp32: the norm's last digits differ",
        origin="pytorch/torchtitan#4312",
        smallest=ONE_OF_TWO,
        plant=on_work(_RootOfRoots),
    ),
    Planted(
        name="flat-gradients",
        summary="gradients are moved into one flat buffer",
        origin="NVIDIA/Megatron-LM: contiguous gradient buffers",
        smallest=ONE_OF_TWO,
        plant=on_work(_CopiesGradients),
    ),
    Planted(
        name="evaluation-before-steps",
        summary="an evaluation goes before each step and must leave nothing behind",
        origin="pytorch/pytorch#162822",
        smallest="naive r1 s1 m1 split=1 model=batchnorm plan=train+train seed=0",
        drive=_EvaluatesMore,
    ),
)

"""Faults of scale: the right sum, multiplied wrongly."""

from dataclasses import replace

from pipeline.boundary import Tensors
from pipeline.stage import Goal
from pipeline.step import Parts
from validation.around import AroundGradients, AroundStage
from validation.specimens.specimen import Specimen


class _Undivided(AroundStage):
    def forward(self, microbatch: int, inputs: Tensors, goal: Goal | None) -> Tensors:
        return self.inner.forward(microbatch, inputs, goal and goal._replace(divisor=1.0))


def _undivided(parts: Parts) -> Parts:
    return replace(parts, stages=tuple(map(_Undivided, parts.stages)))


class _ClipLast(AroundGradients):
    def __init__(self, parts: Parts) -> None:
        super().__init__(parts.gradients, parts.stages)
        self._last = parts.program.schedule.n_stages - 1

    def scale(self, factor: float) -> None:
        for stage in self.stages:
            if stage.index == self._last:
                for parameter in stage.module.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)


def _clip_last(parts: Parts) -> Parts:
    return replace(parts, gradients=_ClipLast(parts))


SPECIMENS = (
    Specimen(
        name="loss-undivided",
        summary="the reported loss is divided by the number of microbatches, the one differentiated is not",
        origin="huggingface/picotron at 59714b1; pytorch/pytorch#144352; pytorch/torchtitan#2972",
        smallest="naive r1 s1 m2 split=1 model=mlp plan=train seed=0",
        law="gradient",
        plant=_undivided,
    ),
    Specimen(
        name="clip-last-stage",
        summary="gradients are clipped on the last stage alone",
        origin="pytorch/torchtitan#596, NVIDIA-NeMo/Automodel#3816",
        smallest="naive r2 s2 m1 split=1,1 model=mlp plan=train seed=0",
        law="updated-parameters",
        plant=_clip_last,
    ),
)

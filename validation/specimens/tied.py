"""Faults with tied parameters: copies that are not summed, or counted twice."""

from dataclasses import replace

import torch

from pipeline.step import Parts
from validation.around import AroundGradients
from validation.specimens.specimen import Specimen


class _NotReduced(AroundGradients):
    def reduce_tied(self) -> None:
        return None


class _CountedTwice(AroundGradients):
    def squares(self) -> list[float]:
        gradients = [p.grad for stage in self.stages for p in stage.module.parameters() if p.grad is not None]
        return [torch.linalg.vector_norm(gradient, dtype=torch.float64).item() ** 2 for gradient in gradients]


def _not_reduced(parts: Parts) -> Parts:
    return replace(parts, gradients=_NotReduced(parts.gradients, parts.stages))


def _counted_twice(parts: Parts) -> Parts:
    return replace(parts, gradients=_CountedTwice(parts.gradients, parts.stages))


SPECIMENS = (
    Specimen(
        name="tied-not-reduced",
        summary="each copy of a tied parameter keeps its own stage's gradient",
        origin="pytorch/PiPPy#32, NVIDIA/Megatron-LM#844",
        smallest="naive r2 s2 m1 split=1,1 model=gpt-tied plan=train seed=0",
        law="gradient",
        plant=_not_reduced,
        models=("gpt-tied",),
    ),
    Specimen(
        name="norm-counts-tied-twice",
        summary="the gradient norm counts a tied parameter once per copy",
        origin="pytorch/torchtitan#4486",
        smallest="naive r2 s2 m1 split=1,1 model=gpt-tied plan=train seed=0",
        law="grad-norm",
        plant=_counted_twice,
        models=("gpt-tied",),
    ),
)

"""Faults in the gradients of single stages and parameters: sign, absence, zero."""

from dataclasses import replace

from torch import nn

from pipeline.gradients import GradientWork
from pipeline.stage import Stage
from pipeline.step import Parts
from validation.around import AroundGradients
from validation.specimens.specimen import Specimen


class _Damaged(AroundGradients):
    """Damages the gradients of one stage before anybody else sees them."""

    def __init__(self, parts: Parts, stage: int) -> None:
        super().__init__(parts.gradients, parts.stages)
        self._damaged = [s for s in parts.stages if s.index == stage]

    def reduce_tied(self) -> None:
        for stage in self._damaged:
            self.damage(stage)
        self.inner.reduce_tied()

    def damage(self, stage: Stage) -> None:
        raise NotImplementedError


class _Negated(_Damaged):
    def damage(self, stage: Stage) -> None:
        for parameter in stage.module.parameters():
            if parameter.grad is not None:
                parameter.grad.neg_()


class _Lost(_Damaged):
    def damage(self, stage: Stage) -> None:
        next(p for p in stage.module.parameters() if p.grad is not None).grad = None


class _NormZero(_Damaged):
    def damage(self, stage: Stage) -> None:
        norm = next(m for m in stage.module.modules() if isinstance(m, nn.LayerNorm))
        if norm.weight.grad is not None:
            norm.weight.grad.zero_()


def _middle(parts: Parts) -> int:
    return parts.program.schedule.n_stages // 2


def _negate(parts: Parts) -> Parts:
    return _with(parts, _Negated(parts, _middle(parts)))


def _lose(parts: Parts) -> Parts:
    return _with(parts, _Lost(parts, parts.program.schedule.n_stages - 1))


def _zero_norm(parts: Parts) -> Parts:
    return _with(parts, _NormZero(parts, _middle(parts)))


def _with(parts: Parts, gradients: GradientWork) -> Parts:
    return replace(parts, gradients=gradients)


SPECIMENS = (
    Specimen(
        name="stage-negated",
        summary="the gradients of the middle stage have the wrong sign, which no norm can see",
        origin="measured blindness of norm and loss; the class of pytorch/pytorch#164777",
        smallest="naive r1 s1 m1 split=1 model=mlp plan=train seed=0",
        law="gradient",
        plant=_negate,
    ),
    Specimen(
        name="gradient-none",
        summary="a parameter of the last stage gets no gradient at all",
        origin="pytorch/pytorch#138863, pytorch/PiPPy#738",
        smallest="naive r1 s1 m1 split=1 model=mlp plan=train seed=0",
        law="none-ness",
        plant=_lose,
    ),
    Specimen(
        name="layernorm-zero",
        summary="the loss is right and the gradient of one LayerNorm weight is zero",
        origin="NVIDIA/Megatron-LM#1446; DeepSpeed PR 8491",
        smallest="naive r1 s1 m1 split=1 model=mlp plan=train seed=0",
        law="gradient",
        plant=_zero_norm,
    ),
)

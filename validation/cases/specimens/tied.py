"""Faults with tied parameters: copies that are not summed, summed too often, or that drift apart."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipeline.boundary import Gradients
from pipeline.stage import Stage
from pipeline.step import Parts
from validation.cases.specimens.planting import Around, MovedTwice, first, last, on_gradients, on_work
from validation.cases.specimens.specimen import Fault, Needs, Specimen
from validation.observers.wrappers import AroundStage

_SMALLEST = "naive r2 s2 m1 split=1,1 model=gpt-tied plan=train seed=0"
_NEEDS = Needs(models=("gpt-tied",), stages=2)


class _NotReduced(Around):
    def reduce_tied(self) -> None:
        return None


class _ReducedTwice(Around):
    def reduce_tied(self) -> None:
        self.inner.reduce_tied()
        self.inner.reduce_tied()


class _CountedTwice(Around):
    def squares(self) -> list[float]:
        gradients = [p.grad for stage in self.stages for p in stage.module.parameters() if p.grad is not None]
        return [torch.linalg.vector_norm(gradient, dtype=torch.float64).item() ** 2 for gradient in gradients]


class _Kept(Around):
    """``kept`` are gradients of this rank as they were before the reduction."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._last = last(parts.program.schedule.n_stages)
        self.kept: dict[nn.Parameter, Tensor] = {}

    def reduce_tied(self) -> None:
        self.kept = {
            parameter: parameter.grad.clone()
            for stage in self.stages
            if stage.index in (0, self._last)
            for parameter in stage.module.parameters()
            if parameter.grad is not None
        }
        self.inner.reduce_tied()


class _LastKeepsItsOwn(_Kept):
    def reduce_tied(self) -> None:
        super().reduce_tied()
        for stage in self.stages:
            for parameter in stage.module.parameters() if stage.index == self._last else ():
                parameter.grad = self.kept.get(parameter)


class _UpdatesWithOwn(_Kept):
    """The optimizer's copy of the gradients was taken before the reduction."""

    def scale(self, factor: float) -> None:
        self.inner.scale(factor)
        for parameter, gradient in self.kept.items():
            parameter.grad = gradient * factor


class _Late(AroundStage):
    """The last microbatch's weight gradients are computed by ``finish``."""

    def __init__(self, inner: Stage, microbatch: int) -> None:
        super().__init__(inner)
        self._microbatch = microbatch
        self._late: dict[nn.Parameter, Tensor] = {}

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        handed: list[Gradients] = []
        self._perhaps_late(microbatch, lambda: handed.append(self.inner.backward(microbatch, gradients)))
        return handed[0]

    def backward_weight(self, microbatch: int) -> None:
        self._perhaps_late(microbatch, lambda: self.inner.backward_weight(microbatch))

    def _perhaps_late(self, microbatch: int, work: Callable[[], None]) -> None:
        if microbatch != self._microbatch:
            work()
            return
        before = {parameter: parameter.grad for parameter in self.module.parameters()}
        self.module.zero_grad(set_to_none=True)
        work()
        self._late = {p: p.grad for p in before if p.grad is not None}
        for parameter, gradient in before.items():
            parameter.grad = gradient

    def finish(self) -> None:
        for parameter, gradient in self._late.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._late = {}


class _ThenFinishes(Around):
    def reduce_tied(self) -> None:
        self.inner.reduce_tied()
        for stage in self.stages:
            if isinstance(stage, _Late):
                stage.finish()


def _reduced_early(parts: Parts) -> Parts:
    microbatch = parts.program.schedule.microbatches - 1
    late = Parts(parts.program, tuple(_Late(s, microbatch) for s in parts.stages), parts.transport, parts.gradients)
    return on_work(_ThenFinishes)(late)


def _table(module: nn.Module) -> nn.Parameter:
    """The copy of the tied table that a stage holds."""
    name = next(name for name, _ in module.named_parameters() if name in ("embed.token.weight", "head.logits.weight"))
    return module.get_parameter(name)


def _shift(module: nn.Module) -> None:
    gradient = _table(module).grad
    if gradient is not None:
        gradient.copy_(gradient.roll(gradient.shape[0] // 2, 0))


class _LastAtDoubleRate(MovedTwice):
    """The last stage's copy of the table has twice the learning rate."""

    def moved(self) -> list[nn.Parameter]:
        place = last(self.parts.program.schedule.n_stages)
        return [_table(stage.module) for stage in self.parts.stages if stage.index == place]


def _lose_share(module: nn.Module) -> None:
    gradient = _table(module).grad
    if gradient is not None:
        gradient.zero_()


SPECIMENS = (
    Specimen(
        name="tied-not-reduced",
        summary="each copy of a tied parameter keeps its own stage's gradient",
        origin="pytorch/PiPPy#32, uw-syfi/piper#13",
        classes=("tE", "mC"),
        smallest=_SMALLEST,
        law="gradient",
        fault=Fault("tied-not-summed"),
        needs=_NEEDS,
        plant=on_work(_NotReduced),
    ),
    Specimen(
        name="norm-counts-tied-twice",
        summary="the gradient norm counts a tied parameter once per copy",
        origin="pytorch/torchtitan#4486; NVIDIA/Megatron-LM 5c8238c3",
        classes=("tE", "mD"),
        smallest=_SMALLEST,
        law="grad-norm",
        fault=Fault("norm"),
        needs=_NEEDS,
        plant=on_work(_CountedTwice),
    ),
    Specimen(
        name="tied-reduced-twice",
        summary="the copies of a tied parameter are summed, and the sums are summed again",
        origin="pytorch/torchtitan#3174; uw-syfi/piper#25",
        classes=("tE", "mC"),
        smallest=_SMALLEST,
        law="gradient",
        fault=Fault("tied-doubled", alike=("scale",)),
        needs=_NEEDS,
        plant=on_work(_ReducedTwice),
    ),
    Specimen(
        name="tied-last-left-out",
        summary="the last stage is not in the group that sums a tied parameter, and keeps its own share",
        origin="NVIDIA-NeMo/Megatron-Bridge#5380",
        classes=("mC",),
        smallest=_SMALLEST,
        law="gradient",
        fault=Fault("tied-not-summed", stage=last),
        needs=_NEEDS,
        plant=on_work(_LastKeepsItsOwn),
    ),
    Specimen(
        name="tied-share-lost",
        summary="the first stage's share of a tied parameter is lost before the copies are summed",
        origin="NVIDIA/Megatron-LM#1012: a share computed after the reduction",
        classes=("mB", "mC"),
        smallest=_SMALLEST,
        law="gradient",
        fault=Fault("tied-not-summed", alike=("dropped",)),
        needs=_NEEDS,
        plant=on_gradients(_lose_share, first),
    ),
    Specimen(
        name="tied-shares-misaligned",
        summary="the last stage's share of a tied parameter is added at another offset",
        origin="NVIDIA/Megatron-LM#844",
        classes=("mC",),
        smallest=_SMALLEST,
        law="gradient",
        fault=Fault("altered", stage=last, alike=("extra-term", "computation")),
        needs=_NEEDS,
        plant=on_gradients(_shift, last),
    ),
    Specimen(
        name="tied-reduced-early",
        summary="tied gradients are summed before the last microbatch's weight gradients are there",
        origin="NVIDIA/TransformerEngine#1976, #2142; NVIDIA/Megatron-LM#1012",
        classes=("tC", "mB", "mH"),
        smallest=_SMALLEST,
        law="gradient",
        fault=Fault("tied-not-summed", microbatches=lambda case: (case.microbatches - 1,)),
        needs=_NEEDS,
        plant=_reduced_early,
    ),
    Specimen(
        name="updated-before-reduced",
        summary="the optimizer's copy of the gradients is taken before tied ones are summed",
        origin="NVIDIA/Megatron-LM 9b558566",
        classes=("mB",),
        smallest=_SMALLEST,
        law="updated-parameters",
        fault=Fault("update", alike=("tied-not-summed",)),
        needs=_NEEDS,
        plant=on_work(_UpdatesWithOwn),
    ),
    Specimen(
        name="tied-copy-other-rate",
        summary="one copy of a tied parameter has another learning rate",
        origin="NVIDIA/Megatron-LM#4641",
        classes=("mC", "mD"),
        smallest=_SMALLEST,
        law="tied-copies",
        fault=Fault("update", stage=last, parameter=r"head\.logits\.weight$"),
        needs=_NEEDS,
        drive=_LastAtDoubleRate,
    ),
)

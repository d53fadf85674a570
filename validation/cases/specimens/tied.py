"""Faults with tied parameters: copies that are not summed, summed too often, or that drift apart."""

from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn

from pipeproof.cases.specimens.norm import square
from pipeproof.cases.specimens.planting import (
    Shares,
    copies,
    first,
    gradients_of,
    last,
    moved_twice,
    on_each,
    on_gradients,
    on_work,
    put_off,
    stages_at,
)
from pipeproof.cases.specimens.specimen import Fault, Needs, Specimen
from pipeproof.pipeline.step import Parts


def _twice(parts: Parts) -> None:
    parts.gradients.reduce_tied()
    parts.gradients.reduce_tied()


def _every_copy(squares: list[float], parts: Parts) -> list[float]:
    return [square(gradient) for stage in parts.stages for gradient in gradients_of(stage.module)]


def _table(module: nn.Module) -> list[nn.Parameter]:
    """The copy of the tied table that a stage holds."""
    return [p for name, p in module.named_parameters() if name in ("embed.token.weight", "head.logits.weight")][:1]


def _shift(gradient: Tensor) -> None:
    gradient.copy_(gradient.roll(gradient.shape[0] // 2, 0))


def _last_keeps_its_own(parts: Parts) -> None:
    own = copies(stages_at(parts, last))
    parts.gradients.reduce_tied()
    for parameter, gradient in own.items():
        parameter.grad = gradient


def _updated_with_own(parts: Parts) -> Parts:
    """The optimizer's copy of the gradients was taken before the reduction."""
    own = Shares()

    def reduce(parts: Parts) -> None:
        own.update(copies([*stages_at(parts, first), *stages_at(parts, last)]))
        parts.gradients.reduce_tied()

    def scale(factor: float, parts: Parts) -> None:
        parts.gradients.scale(factor)
        for parameter, gradient in own.items():
            parameter.grad = gradient * factor

    return on_work(reduce=reduce, scale=scale)(parts)


_specimen = partial(Specimen, needs=Needs(models=("gpt-tied",), stages=2))

SPECIMENS: Mapping[str, Specimen] = {
    "tied-not-reduced": _specimen(
        summary="each copy of a tied parameter keeps its own stage's gradient",
        origin="pytorch/PiPPy#32, uw-syfi/piper#13",
        classes=("tE", "mC"),
        fault=Fault("tied-not-summed", "gradient"),
        plant=on_work(reduce=lambda parts: None),
    ),
    "norm-counts-tied-twice": _specimen(
        summary="the gradient norm counts a tied parameter once per copy",
        origin="pytorch/torchtitan#4486; NVIDIA/Megatron-LM 5c8238c3",
        classes=("tE", "mD"),
        fault=Fault("norm", "grad-norm"),
        plant=on_work(squares=_every_copy),
    ),
    "tied-reduced-twice": _specimen(
        summary="the copies of a tied parameter are summed, and the sums are summed again",
        origin="pytorch/torchtitan#3174; uw-syfi/piper#25",
        classes=("tE", "mC"),
        fault=Fault("tied-doubled", "gradient", alike=("scale",)),
        plant=on_work(reduce=_twice),
    ),
    "tied-last-left-out": _specimen(
        summary="the last stage is not in the group that sums a tied parameter, and keeps its own share",
        origin="NVIDIA-NeMo/Megatron-Bridge#5380",
        classes=("mC",),
        fault=Fault("tied-not-summed", "gradient", stage=last),
        plant=on_work(reduce=_last_keeps_its_own),
    ),
    "tied-share-lost": _specimen(
        summary="the first stage's share of a tied parameter is lost before the copies are summed",
        origin="NVIDIA/Megatron-LM#1012: a share computed after the reduction",
        classes=("mB", "mC"),
        fault=Fault("tied-not-summed", "gradient", alike=("dropped",)),
        plant=on_gradients(on_each(Tensor.zero_, of=_table), first),
    ),
    "tied-shares-misaligned": _specimen(
        summary="the last stage's share of a tied parameter is added at another offset",
        origin="NVIDIA/Megatron-LM#844",
        classes=("mC",),
        fault=Fault("altered", "gradient", stage=last, alike=("extra-term", "computation")),
        plant=on_gradients(on_each(_shift, of=_table), last),
    ),
    "tied-reduced-early": _specimen(
        summary="tied gradients are summed before the last microbatch's weight gradients are there",
        origin="NVIDIA/TransformerEngine#1976, #2142; NVIDIA/Megatron-LM#1012",
        classes=("tC", "mB", "mH"),
        fault=Fault("tied-not-summed", "gradient", microbatches=lambda case: (case.microbatches - 1,)),
        plant=put_off(lambda call: call.microbatch == call.schedule.microbatches - 1, reduced=True),
    ),
    "updated-before-reduced": _specimen(
        summary="the optimizer's copy of the gradients is taken before tied ones are summed",
        origin="NVIDIA/Megatron-LM 9b558566",
        classes=("mB",),
        fault=Fault("update", "updated-parameters", alike=("tied-not-summed",)),
        plant=_updated_with_own,
    ),
    "tied-copy-other-rate": _specimen(
        summary="one copy of a tied parameter has another learning rate",
        origin="NVIDIA/Megatron-LM#4641",
        classes=("mC", "mD"),
        fault=Fault("update", "tied-copies", stage=last, parameter=r"head\.logits\.weight$"),
        drive=moved_twice(last, _table),
    ),
}

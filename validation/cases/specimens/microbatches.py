"""Faults of counting: a microbatch lost, counted twice, or put together from two."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from pipeproof.cases.case import Case
from pipeproof.cases.specimens.order import other_of_two
from pipeproof.cases.specimens.planting import Call, Changes, counted, first, last, middle, on_stages
from pipeproof.cases.specimens.specimen import Fault, Needs, Specimen
from pipeproof.observers.wrappers import AroundSteps, Pairs
from pipeproof.pipeline.action import Kind
from pipeproof.pipeline.step import Parts
from pipeproof.reference.data import Batch

_CROSSED = ("swapped-gradients", "wrong-message")
_MANY, _ALIKE = Needs(microbatches=2), Needs(microbatches=2, one_size=True)


def _clears_first(call: Call) -> AbstractContextManager[None]:
    call.stage.module.zero_grad()
    return nullcontext()


def _kept_together(case: Case) -> str:
    """Both of the first two microbatches must be in flight on the first stage at once."""
    row = [(kind, m) for stage, kind, m in case.built.ranks[case.built.placement[0]] if stage == 0 and m < 2]
    forwards = [kind is Kind.FORWARD for kind, _ in row[:2]]
    return "" if all(forwards) else "needs microbatches 0 and 1 in flight on the first stage at once"


def _swap_inputs(batches: Sequence[Batch], parts: Parts) -> Sequence[Batch]:
    one, other, *rest = batches
    return [replace(one, inputs=other.inputs), replace(other, inputs=one.inputs), *rest]


def _shift_targets(batches: Sequence[Batch], parts: Parts) -> Sequence[Batch]:
    return [replace(batch, target=batches[m - 1].target) for m, batch in enumerate(batches)]


def _first_side_input(batches: Sequence[Batch], parts: Parts) -> Sequence[Batch]:
    return [replace(batch, inputs=(batch.inputs[0], *batches[0].inputs[1:])) for batch in batches]


def _cut_to_shortest(batches: Sequence[Batch], parts: Parts) -> Sequence[Batch]:
    """Along the dimension that varies: tokens of text, rows of numbers."""
    dim = 0 if batches[0].target.is_floating_point() else 1
    length = min(batch.target.shape[dim] for batch in batches)

    def cut(x: Tensor) -> Tensor:
        return x.narrow(dim, 0, length).contiguous() if x.dim() > dim else x

    return [replace(batch, inputs=tuple(map(cut, batch.inputs)), target=cut(batch.target)) for batch in batches]


def _cut_across(batches: Sequence[Batch], parts: Parts) -> Sequence[Batch]:
    """Half of every row goes to another microbatch, as if the batch had been cut along tokens and not along rows."""
    tokens = [batch.inputs[0] for batch in batches]
    half = tokens[0].shape[1] // 2
    mixed = [torch.cat([tokens[m][:, :half], tokens[m - 1][:, half:]], dim=1) for m in range(len(batches))]
    return [replace(batch, inputs=(inputs,)) for batch, inputs in zip(batches, mixed, strict=True)]


class _OldTargets(AroundSteps):
    """The loss compares with the targets of the step before."""

    def given(self, operation: str, microbatches: Pairs) -> Pairs:
        kept = getattr(self, "_targets", None)
        self._targets = [target for _, target in microbatches]
        if kept is None:
            return microbatches
        return [(inputs, target) for (inputs, _), target in zip(microbatches, kept, strict=True)]


SPECIMENS: Mapping[str, Specimen] = {
    "microbatch-dropped": Specimen(
        summary="the first microbatch's backward adds nothing to the parameters' gradients",
        origin="pytorch/torchtitan#3575, NVIDIA-NeMo/Automodel#3530",
        classes=("tB", "mB"),
        fault=Fault("dropped", "gradient", microbatches=(0,)),
        needs=_MANY,
        plant=counted(lambda schedule, stage: {0: 0.0}),
    ),
    "last-microbatch-dropped": Specimen(
        summary="on one stage the last microbatch is not drained: its gradients are never added",
        origin="NVIDIA/Megatron-LM ea76ecde; pytorch/pytorch#134052",
        classes=("tB", "tC", "mB"),
        fault=Fault("dropped", "gradient", stage=middle, microbatches=lambda case: (case.microbatches - 1,)),
        needs=_MANY,
        plant=counted(lambda schedule, stage: {schedule.microbatches - 1: 0.0}, middle),
    ),
    "microbatch-doubled": Specimen(
        summary="the first microbatch's gradients are added twice",
        origin="pytorch/PiPPy#18",
        classes=("tB",),
        fault=Fault("doubled", "gradient", microbatches=(0,)),
        needs=_MANY,
        plant=counted(lambda schedule, stage: {0: 2.0}),
    ),
    "microbatch-negated": Specimen(
        summary="one stage adds one microbatch's gradients with the wrong sign",
        origin="measured blindness of loss; the class of pytorch/PiPPy#18",
        classes=("tB",),
        fault=Fault("sign", "gradient", stage=middle, microbatches=(0,)),
        needs=_MANY,
        plant=counted(lambda schedule, stage: {0: -1.0}, middle),
    ),
    "only-last-microbatch": Specimen(
        summary="gradients are cleared at the start of each microbatch, so only the last one counts",
        origin="pytorch/torchtitan#3575; NVIDIA/Megatron-LM#7186",
        classes=("tB", "mB"),
        fault=Fault("dropped", "gradient"),
        needs=_MANY,
        plant=on_stages(Changes(adding=_clears_first)),
    ),
    "microbatches-swapped": Specimen(
        summary="the first stage reads microbatches 0 and 1 in the other order than the last stage its targets",
        origin="deepspeedai/DeepSpeed#5729 and the class of messages matched by position",
        classes=("tG", "mJ"),
        fault=Fault("swapped-data", "loss", microbatches=(0, 1)),
        needs=_ALIKE,
        feed=_swap_inputs,
    ),
    "targets-shifted": Specimen(
        summary="the last stage's loader is one microbatch behind the first stage's",
        origin="deepspeedai/DeepSpeed#3131; HuangLK/transpeeder#35",
        classes=("tG", "mJ"),
        fault=Fault("swapped-data", "loss", stage=last, microbatches=lambda case: tuple(range(case.microbatches))),
        needs=_ALIKE,
        feed=_shift_targets,
    ),
    "targets-of-step-before": Specimen(
        summary="the last stage's loader is one step behind the first stage's",
        origin="deepspeedai/DeepSpeed#5729",
        classes=("tG", "mJ", "mL"),
        fault=Fault("swapped-data", "loss", stage=last, alike=("stale-tensor",)),
        needs=Needs(plan=("train", "train")),
        drive=_OldTargets,
    ),
    "side-input-of-first": Specimen(
        summary="every microbatch is given the side input of microbatch 0",
        origin="pytorch/torchtitan#1723, pytorch/pytorch#188727",
        classes=("tG", "mJ"),
        fault=Fault("swapped-data", "loss", stage=first, alike=("randomness",)),
        needs=Needs(microbatches=2, models=("dropout",)),
        feed=_first_side_input,
    ),
    "microbatches-cut": Specimen(
        summary="every microbatch is cut to the length of the shortest",
        origin="pytorch/pytorch#126600; deepspeedai/DeepSpeed#5696",
        classes=("tG", "mF"),
        fault=Fault("altered", "loss", stage=first, alike=("swapped-data",)),
        needs=Needs(microbatches=2, ragged=True),
        feed=_cut_to_shortest,
    ),
    "cut-along-tokens": Specimen(
        summary="the batch is cut along the wrong dimension: rows of a microbatch go on in another's",
        origin="pytorch/tutorials#1459; pytorch/torchtitan#4098",
        classes=("tG",),
        fault=Fault("swapped-data", "loss", stage=first, alike=("altered",)),
        needs=Needs(microbatches=2, models=("gpt", "gpt-tied"), one_size=True),
        feed=_cut_across,
    ),
    "backward-of-another": Specimen(
        summary="the first stage takes another microbatch's activation in its backward: it counts its own way",
        origin="pytorch/PiPPy#1052; deepspeedai/DeepSpeed#3900",
        classes=("tB", "mE"),
        schedule="gpipe",
        fault=Fault("swapped-activations", "gradient", stage=first, microbatches=(0, 1), alike=_CROSSED),
        needs=Needs(microbatches=2, stages=2, one_size=True, also=_kept_together),
        plant=on_stages(Changes(whose=other_of_two), first),
    ),
}

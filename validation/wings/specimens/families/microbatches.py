"""Faults of counting: a microbatch lost, counted twice or put together from two; weight halves lost, or run twice."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeproof.core.observe.wrappers import AroundStage, AroundSteps, Pairs
from pipeproof.own.case import Case
from pipeproof.own.faults import Plant
from pipeproof.pipeline.action import Kind
from pipeproof.pipeline.boundary import Gradients
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.stage import Stage
from pipeproof.pipeline.step import Parts
from pipeproof.reference.data import Batch
from pipeproof.reference.model import Attention, TwiceBlock
from pipeproof.wings.specimens.families.model import attend, with_forward, with_value
from pipeproof.wings.specimens.families.order import other_of_two
from pipeproof.wings.specimens.planting import (
    Call,
    Changes,
    Shares,
    add,
    around_stages,
    collect_apart,
    count_shares,
    first,
    last,
    middle,
    on_modules,
    on_stages,
)
from pipeproof.wings.specimens.specimen import Fault, Needs, Specimen, row, split_microbatches

_CROSSED = ("swapped-gradients", "wrong-message")
_MANY, _ALIKE = Needs(microbatches=2), Needs(microbatches=2, one_size=True)


def _clears_first(call: Call) -> AbstractContextManager[None]:
    call.stage.module.zero_grad()
    return nullcontext()


def _require_in_flight(case: Case) -> str:
    """Require the first two microbatches in flight together on the first stage."""
    row = [(kind, m) for stage, kind, m in case.built.ranks[case.built.placement[0]] if stage == 0 and m < 2]
    forwards = [kind is Kind.FORWARD for kind, _ in row[:2]]
    return "" if all(forwards) else "needs microbatches 0 and 1 in flight on the first stage at once"


def _swap_inputs(batches: Sequence[Batch], parts: Parts) -> Sequence[Batch]:
    one, other, *rest = batches
    return [replace(one, inputs=other.inputs), replace(other, inputs=one.inputs), *rest]


def _cut_to_shortest(batches: Sequence[Batch], parts: Parts) -> Sequence[Batch]:
    """Cut the varying dimension: tokens of text, rows of numbers."""
    dim = 0 if batches[0].target.is_floating_point() else 1
    length = min(batch.target.shape[dim] for batch in batches)

    def cut(x: Tensor) -> Tensor:
        return x.narrow(dim, 0, length).contiguous() if x.dim() > dim else x

    return [replace(batch, inputs=tuple(map(cut, batch.inputs)), target=cut(batch.target)) for batch in batches]


def _cut_across(batches: Sequence[Batch], parts: Parts) -> Sequence[Batch]:
    """Move half of every row to another microbatch, as by a cut along tokens instead of rows."""
    tokens = [batch.inputs[0] for batch in batches]
    half = tokens[0].shape[1] // 2
    mixed = [torch.cat([tokens[m][:, :half], tokens[m - 1][:, half:]], dim=1) for m in range(len(batches))]
    return [replace(batch, inputs=(inputs,)) for batch, inputs in zip(batches, mixed, strict=True)]


class _OldTargets(AroundSteps):
    """The loss compares with the targets of the step before."""

    def on_data(self, operation: str, microbatches: Pairs) -> Pairs:
        kept = getattr(self, "_targets", None)
        self._targets = [target for _, target in microbatches]
        if kept is None:
            return microbatches
        return [(inputs, target) for (inputs, _), target in zip(microbatches, kept, strict=True)]


_HALVES, _TWO_HALVES = Needs(split=True), Needs(microbatches=2, split=True)


def _first_halves(*counts: float) -> Plant:
    """Count the middle stage's first weight halves ``counts`` times."""
    return count_shares(
        lambda schedule, stage: dict(zip(split_microbatches(schedule, stage), counts, strict=False)), middle
    )


class _WholeThenHalf(AroundStage):
    """The input half computes the whole backward; the weight half adds the weights' share once more."""

    def __init__(self, inner: Stage, schedule: Schedule) -> None:
        super().__init__(inner)
        self._shares: dict[int, Shares] = {}

    def backward_input(self, microbatch: int, gradients: Gradients) -> Gradients:
        handed = self.inner.backward_input(microbatch, gradients)
        with collect_apart(self.module) as self._shares[microbatch]:
            self.inner.backward_weight(microbatch)
        add(self._shares[microbatch])
        return handed

    def backward_weight(self, microbatch: int) -> None:
        add(self._shares.pop(microbatch))


def _all_halved_on_first(case: Case) -> str:
    enough = len(split_microbatches(case.built, 0)) == case.microbatches
    return "" if enough else "needs every backward of the first stage in two halves"


def _twice_through_first(self: TwiceBlock, x_BC: Tensor) -> Tensor:
    linear, weight = self.linear, self.linear.weight
    twice = weight + (weight - weight.detach())  # the weight itself, to the last bit, with twice its gradient
    h_BC = F.linear(self.norm(x_BC), twice, linear.bias)
    y_BC: Tensor = x_BC + F.gelu(linear(F.gelu(h_BC)))
    return y_BC


def _sum_outputs(self: Attention, x_BTC: Tensor) -> Tensor:
    """The first two outputs' gradients both go to the first."""
    one, other, third = self.qkv(x_BTC).chunk(3, dim=-1)
    return attend(self, x_BTC, (one, with_value(one, other), third))


def _split_on_middle(case: Case) -> tuple[int, ...]:
    return split_microbatches(case.built, case.stages // 2)


_FIRST_HALF = Fault("dropped", "gradient", stage=middle, microbatches=lambda case: _split_on_middle(case)[:1])


SPECIMENS: Mapping[str, Specimen] = {
    "microbatch-dropped": row(
        Fault("dropped", "gradient", microbatches=(0,)), count_shares(lambda schedule, stage: {0: 0.0}), _MANY
    ),
    "last-microbatch-dropped": row(
        Fault("dropped", "gradient", stage=middle, microbatches=lambda case: (case.microbatches - 1,)),
        count_shares(lambda schedule, stage: {schedule.microbatches - 1: 0.0}, middle),
        _MANY,
    ),
    "microbatch-doubled": row(
        Fault("doubled", "gradient", microbatches=(0,)), count_shares(lambda schedule, stage: {0: 2.0}), _MANY
    ),
    "microbatch-negated": row(
        Fault("sign", "gradient", stage=middle, microbatches=(0,)),
        count_shares(lambda schedule, stage: {0: -1.0}, middle),
        _MANY,
    ),
    "only-last-microbatch": row(Fault("dropped", "gradient"), on_stages(Changes(adding=_clears_first)), _MANY),
    "microbatches-swapped": row(Fault("swapped-data", "loss", microbatches=(0, 1)), feed=_swap_inputs, needs=_ALIKE),
    "targets-shifted": row(
        Fault("swapped-data", "loss", stage=last, microbatches=lambda case: tuple(range(case.microbatches))),
        feed=lambda batches, parts: [replace(one, target=batches[m - 1].target) for m, one in enumerate(batches)],
        needs=_ALIKE,
    ),
    "targets-of-step-before": row(
        Fault("swapped-data", "loss", stage=last, alike=("stale-tensor",)),
        drive=_OldTargets,
        needs=Needs(plan=("train", "train")),
    ),
    "side-input-of-first": row(
        Fault("swapped-data", "loss", stage=first, alike=("randomness",)),
        feed=lambda batches, parts: [replace(one, inputs=(one.inputs[0], *batches[0].inputs[1:])) for one in batches],
        needs=Needs(microbatches=2, models=("dropout",)),
    ),
    "microbatches-cut": row(
        Fault("altered", "loss", stage=first, alike=("swapped-data",)),
        feed=_cut_to_shortest,
        needs=Needs(microbatches=2, ragged=True),
    ),
    "cut-along-tokens": row(
        Fault("swapped-data", "loss", stage=first, alike=("altered",)),
        feed=_cut_across,
        needs=Needs(microbatches=2, models=("gpt", "gpt-tied"), one_size=True),
    ),
    "backward-of-another": row(
        Fault("swapped-activations", "gradient", stage=first, microbatches=(0, 1), alike=_CROSSED),
        on_stages(Changes(whose=other_of_two), first),
        Needs(microbatches=2, stages=2, one_size=True, also=_require_in_flight),
        schedule="gpipe",
    ),
    "weight-half-dropped": row(_FIRST_HALF, _first_halves(0.0), _TWO_HALVES),
    "weight-half-twice": row(replace(_FIRST_HALF, kind="doubled"), _first_halves(2.0), _TWO_HALVES),
    "weight-half-of-another": row(
        replace(_FIRST_HALF, alike=("doubled",)),
        _first_halves(0.0, 2.0),
        replace(
            _TWO_HALVES,
            also=lambda case: "" if len(_split_on_middle(case)) > 1 else "needs two weight halves there",
        ),
    ),
    "weight-halves-after-whole": row(
        Fault("doubled", "gradient", stage=middle, alike=("scale",)), around_stages(_WholeThenHalf, middle), _HALVES
    ),
    "first-stage-weights-empty": row(
        Fault("missing", "presence", stage=first),
        count_shares(lambda schedule, stage: dict.fromkeys(split_microbatches(schedule, stage), 0.0), first),
        Needs(split=True, also=_all_halved_on_first),
    ),
    "weights-never-drained": row(
        Fault("missing", "presence", stage=middle),
        count_shares(lambda schedule, stage: dict.fromkeys(range(schedule.microbatches), 0.0), middle),
    ),
    "shared-weight-doubled": row(
        Fault("computation", "gradient", stage=middle, parameter=r"linear\.weight$", alike=("extra-term",)),
        on_modules(with_forward(TwiceBlock, _twice_through_first, most=1), middle),
        Needs(models=("twice",)),
    ),
    "outputs-summed": row(
        Fault("computation", "gradient", stage=middle),
        on_modules(with_forward(Attention, _sum_outputs, most=1), middle),
        Needs(models=("gpt", "gpt-tied")),
    ),
}

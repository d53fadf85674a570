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
    middle,
    on_modules,
    on_stages,
)
from pipeproof.wings.specimens.specimen import Entry, Needs, split_microbatches


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


def _two_halves(case: Case) -> str:
    return "" if len(split_microbatches(case.built, case.stages // 2)) > 1 else "needs two weight halves there"


PLANTS: Mapping[str, Plant | Entry] = {
    "microbatch-dropped": count_shares(lambda schedule, stage: {0: 0.0}),
    "last-microbatch-dropped": count_shares(lambda schedule, stage: {schedule.microbatches - 1: 0.0}, middle),
    "microbatch-doubled": count_shares(lambda schedule, stage: {0: 2.0}),
    "microbatch-negated": count_shares(lambda schedule, stage: {0: -1.0}, middle),
    "only-last-microbatch": on_stages(Changes(adding=_clears_first)),
    "microbatches-swapped": Entry(feed=_swap_inputs),
    "targets-shifted": Entry(
        feed=lambda batches, parts: [replace(one, target=batches[m - 1].target) for m, one in enumerate(batches)]
    ),
    "targets-of-step-before": Entry(drive=_OldTargets),
    "side-input-of-first": Entry(
        feed=lambda batches, parts: [replace(one, inputs=(one.inputs[0], *batches[0].inputs[1:])) for one in batches]
    ),
    "microbatches-cut": Entry(feed=_cut_to_shortest),
    "cut-along-tokens": Entry(feed=_cut_across),
    "backward-of-another": Entry(
        plant=on_stages(Changes(whose=other_of_two), first), needs=Needs(also=_require_in_flight)
    ),
    "weight-half-dropped": _first_halves(0.0),
    "weight-half-twice": _first_halves(2.0),
    "weight-half-of-another": Entry(plant=_first_halves(0.0, 2.0), needs=Needs(also=_two_halves)),
    "weight-halves-after-whole": around_stages(_WholeThenHalf, middle),
    "first-stage-weights-empty": Entry(
        plant=count_shares(lambda schedule, stage: dict.fromkeys(split_microbatches(schedule, stage), 0.0), first),
        needs=Needs(also=_all_halved_on_first),
    ),
    "weights-never-drained": count_shares(
        lambda schedule, stage: dict.fromkeys(range(schedule.microbatches), 0.0), middle
    ),
    "shared-weight-doubled": on_modules(with_forward(TwiceBlock, _twice_through_first, most=1), middle),
    "outputs-summed": on_modules(with_forward(Attention, _sum_outputs, most=1), middle),
}

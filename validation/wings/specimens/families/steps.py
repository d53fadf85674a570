"""Faults of steps: what one leaves behind for the next; the norm, clipping and the update; and what is reported."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from random import random

import torch
from torch import Tensor, nn

from pipeproof.core.observe.wrappers import AroundSteps, Pairs, Steps
from pipeproof.own.faults import Drive, Plant
from pipeproof.pipeline.boundary import Gradients, Tensors
from pipeproof.pipeline.gradients import clip_factor, norm_of
from pipeproof.pipeline.step import Parts, ScheduleResult
from pipeproof.reference.step import Recipe
from pipeproof.wings.specimens.families.gradients import loss_divided
from pipeproof.wings.specimens.planting import (
    Arrived,
    Call,
    Changes,
    Shares,
    add,
    both,
    copies,
    first,
    gradients_by_parameter,
    gradients_of,
    last,
    middle,
    move_twice,
    multiply,
    on_arrival,
    on_gradients,
    on_modules,
    on_stages,
    on_steps,
    on_work,
    put_off,
    round_through,
    scale,
    squares_of,
    stages_at,
)
from pipeproof.wings.specimens.specimen import Entry


def _not_cleared(parts: Parts) -> Parts:
    """Keep the optimizer's gradients for the next step, which adds to them."""
    left = Shares()
    keep = on_work(reduced=lambda parts: add(left), clipped=lambda parts: left.update(copies(parts.stages)))
    return keep(parts)


def _onto_parameters(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad += 1e-3 * parameter.detach()


def _clear_before(microbatches: Pairs, steps: Steps) -> Pairs:
    on_modules(nn.Module.zero_grad)(steps.parts)
    return microbatches


def _stay_in_evaluation(result: ScheduleResult, parts: Parts) -> ScheduleResult:
    for stage in stages_at(parts, middle):
        stage.module.eval()
    return result


@contextmanager
def _always_training(call: Call) -> Iterator[None]:
    mode = call.stage.module.training
    call.stage.module.train()
    yield
    call.stage.module.train(mode)


def _move_statistics(result: ScheduleResult, parts: Parts) -> ScheduleResult:
    for stage in parts.stages:
        for name, buffer in stage.module.named_buffers():
            if name.endswith("running_mean"):
                buffer.add_(0.1)
    return result


class _EvaluationDifferentiates(AroundSteps):
    """An evaluation computes gradients too, which stay for the next step."""

    def eval_step(self, microbatches: Pairs, **options: float | None) -> ScheduleResult:
        buffers = [buffer for stage in self.parts.stages for buffer in stage.module.buffers()]
        before = [buffer.clone() for buffer in buffers]
        self.inner.accumulate(microbatches, **options)
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
        return self.inner.eval_step(microbatches, **options)


@torch.no_grad()
def _recompute(gradients: Gradients, call: Call) -> Gradients:
    """The forward runs again in the backward, running statistics included."""
    call.stage.module(*call.inputs)
    return gradients


def _hook_stays(parts: Parts) -> Parts:
    """Keep boundary buffers with their hooks over steps: each adds a hook that halves its gradient."""
    steps = Counter[int]()  # of each microbatch

    def counted(inputs: Tensors, call: Call) -> Tensors:
        steps[call.microbatch] += torch.is_grad_enabled()
        return inputs

    def hooked(gradients: Gradients, call: Call) -> Gradients:
        return multiply(gradients, 0.5 ** (steps[call.microbatch] - 1))

    return on_stages(Changes(inputs=counted, given=hooked), first)(parts)


_MAX_NORM = Recipe().max_norm
_norms: dict[int, float] = {}  # by rank: what it clipped by


def _clip_by_rank(factor: float, parts: Parts) -> None:
    """Clip by each rank's own norm, before the exchange of norms."""
    norm = _norms[parts.transport.rank] = norm_of(parts.gradients.squares())
    parts.gradients.scale(clip_factor(norm, _MAX_NORM))


def _drop_middle(squares: list[float], parts: Parts) -> list[float]:
    at = middle(parts.program.schedule.n_stages)
    before = sum(len(gradients_of(stage.module)) for stage in parts.stages if stage.index < at)
    missing = sum(len(gradients_of(stage.module)) for stage in stages_at(parts, middle))
    return squares[:before] + squares[before + missing :]


def _in_bf16(squares: list[float], parts: Parts) -> list[float]:
    return round_through(torch.tensor(squares, dtype=torch.float64), torch.bfloat16).tolist()


def _after_clipping(result: ScheduleResult, parts: Parts) -> ScheduleResult:
    return result if result.grad_norm is None else replace(result, grad_norm=min(result.grad_norm, _MAX_NORM))


def _by_stage(factor: float, parts: Parts) -> None:
    """Clip each stage by its own norm; tied copies count separately."""
    for stage in parts.stages:
        own = norm_of(squares_of(stage.module))
        scale(clip_factor(own, _MAX_NORM))(stage.module)


def _twice(factor: float, parts: Parts) -> None:
    parts.gradients.scale(factor)
    parts.gradients.scale(factor)


_Tell = Callable[[ScheduleResult, Parts], ScheduleResult]


def _elsewhere(tell: _Tell) -> Drive:
    """Change reports on ranks without the last stage, and so without losses."""

    def reported(result: ScheduleResult, parts: Parts) -> ScheduleResult:
        here = parts.program.schedule.placement[-1] == parts.transport.rank
        return result if here else tell(result, parts)

    return on_steps(reported=reported)


def _half(result: ScheduleResult, parts: Parts) -> ScheduleResult:
    loss, *losses = round_through(torch.tensor([result.loss, *result.losses]), torch.float16).tolist()
    return replace(result, loss=loss, losses=tuple(losses))


def _divide(result: ScheduleResult, parts: Parts) -> ScheduleResult:
    count = parts.program.schedule.microbatches
    return replace(result, loss=result.loss / count, losses=tuple(loss / count for loss in result.losses))


def _none(result: ScheduleResult, parts: Parts) -> ScheduleResult:
    return replace(result, loss=math.nan, grad_norm=None) if parts.transport.rank == 0 else result


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
    """Turn gradients into views of one buffer."""
    gradients = gradients_by_parameter(module)
    flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
    parts = torch.split(flat, [gradient.numel() for gradient in gradients.values()])
    for parameter, part in zip(gradients, parts, strict=True):
        parameter.grad = part.view(parameter.shape)


def _evaluate_first(microbatches: Pairs, steps: Steps) -> Pairs:
    steps.eval_step(microbatches)
    return microbatches


PLANTS: Mapping[str, Plant | Entry] = {
    "gradients-not-cleared": _not_cleared,
    "gradients-onto-parameters": on_gradients(_onto_parameters),
    "accumulated-lost": Entry(drive=on_steps(given=_clear_before)),
    "evaluation-mode-stays": Entry(drive=on_steps(reported=_stay_in_evaluation, operation="eval")),
    "evaluation-in-training-mode": on_stages(Changes(during=_always_training), middle),
    "evaluation-moves-statistics": Entry(drive=on_steps(reported=_move_statistics, operation="eval")),
    "evaluation-differentiates": Entry(drive=_EvaluationDifferentiates),
    "statistics-counted-twice": on_stages(Changes(given=_recompute), middle),
    "boundary-hook-stays": _hook_stays,
    "norm-of-rank": Entry(
        plant=on_work(scale=_clip_by_rank),
        drive=on_steps(reported=lambda result, parts: replace(result, grad_norm=_norms[parts.transport.rank])),
    ),
    "norm-without-stage": on_work(squares=_drop_middle),
    "norm-rounded": on_work(squares=_in_bf16),
    "norm-after-clipping": Entry(drive=on_steps(reported=_after_clipping)),
    "clip-last-stage": on_work(scale=lambda factor, parts: on_modules(scale(factor), last)(parts)),
    "clip-never": on_work(scale=lambda factor, parts: None),
    "clip-by-stage": on_work(scale=_by_stage),
    "clip-twice": on_work(scale=_twice),
    "update-skipped-on-stage": on_gradients(nn.Module.zero_grad, middle, clipped=True),
    "updated-twice": Entry(drive=move_twice(middle)),
    "loss-of-other-ranks": Entry(
        drive=_elsewhere(lambda result, parts: replace(result, loss=-1.0, losses=(-1.0,) * len(result.losses)))
    ),
    "loss-sent-as-half": Entry(drive=_elsewhere(_half)),
    "loss-divided-in-place": Entry(drive=on_steps(reported=_divide)),
    "loss-of-last-microbatch": Entry(
        drive=on_steps(reported=lambda result, parts: replace(result, loss=result.losses[-1]))
    ),
    "loss-summed": Entry(drive=on_steps(reported=lambda result, parts: replace(result, loss=math.fsum(result.losses)))),
    "losses-in-other-order": Entry(
        drive=on_steps(reported=lambda result, parts: replace(result, losses=result.losses[::-1]))
    ),
    "evaluation-divided-again": Entry(drive=on_steps(reported=_divide, operation="eval")),
    "nothing-reported": Entry(drive=on_steps(reported=_none)),
    "slow-messages": on_arrival(_late),
    "random-numbers-drawn": on_stages(Changes(during=_drawing)),
    "loss-scaled-and-back": both(loss_divided(lambda goal, count: goal.divisor / 1024), on_gradients(scale(1 / 1024))),
    "shares-added-backwards": put_off(lambda call: True, reduced=False),
    "norm-by-rank": on_work(squares=_root_of_roots),
    "flat-gradients": on_gradients(_in_one_buffer),
    "evaluation-before-steps": Entry(drive=on_steps(given=_evaluate_first)),
}

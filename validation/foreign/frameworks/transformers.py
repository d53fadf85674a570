"""Causal language models of transformers' under ``whitebox.validate``: as reference, and as stages of a pipeline.

A user's step cuts the model and trains by a schedule of torch's or ours inside ``observed``, or hands back stages and
losses of its own runtime. ``validate`` takes batches as a data collator gives them. Nothing of transformers is imported
before one of these is called.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.pipelining.schedules import _PipelineSchedule

from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.foreign.frameworks.framework import Named, Packed, around, unwrapped
from pipeproof.foreign.frameworks.framework_step import FrameworkStep, Observation, Sight, observing
from pipeproof.foreign.frameworks.torch_schedule import step_of_schedule
from pipeproof.foreign.frameworks.transformers_whole import (
    TRANSFORMERS,
    CausalLoss,
    HfBatch,
    TransformersError,
    WholeTransformers,
    batch_of,
    divisor,
    packed,
    pair_of,
)
from pipeproof.foreign.handed_back import Gradient, copied
from pipeproof.foreign.torch_pipelining import stages_of
from pipeproof.foreign.validator import WhiteBox
from pipeproof.observers.wrappers import AroundGradients
from pipeproof.pipeline.step import Parts, PipelineSchedule

_WRAPPERS = ("module", "_checkpoint_wrapped_module", "_orig_mod")  # of DDP, recomputation and torch.compile


def name_in_whole(stage: int, name: str) -> str:
    """What a stage's parameter is called in the whole model: the same, but for wrappers around modules."""
    return unwrapped(name, *_WRAPPERS)


def step_of(schedule: Any, stages: Sequence[nn.Module]) -> FrameworkStep:
    """The step of this schedule on this rank; raises ``TransformersError`` for what is not covered."""
    TRANSFORMERS.module()
    if not isinstance(stages, Sequence) or not all(isinstance(one, nn.Module) for one in stages):
        raise TransformersError(f"stages is a {type(stages).__name__}: expected a list of this rank's modules")
    if isinstance(schedule, PipelineSchedule):
        return _step_of_own(schedule, stages)
    if not isinstance(schedule, _PipelineSchedule):
        raise TransformersError(
            f"schedule is a {type(schedule).__name__}: expected one of torch.distributed.pipelining or a "
            "PipelineSchedule; from another runtime hand back stages and losses, without observed"
        )
    if (count := len(stages_of(schedule))) != len(stages):
        raise TransformersError(f"stages has {len(stages)} modules, this rank of the schedule {count}")
    return step_of_schedule(schedule, stages, name_in_whole, TransformersError)


def _step_of_own(schedule: PipelineSchedule, stages: Sequence[nn.Module]) -> FrameworkStep:
    numbers = [one.index for one in schedule.parts.stages]
    if len(numbers) != len(stages):
        raise TransformersError(f"stages has {len(stages)} modules, this rank of the schedule {len(numbers)}")
    losses, gradients = list[float](), dict[nn.Parameter, Gradient]()
    return FrameworkStep(
        dict(zip(numbers, stages, strict=True)),
        name_in_whole,
        lambda: gradients,
        lambda: losses,
        partial(_watching_own, schedule, losses, gradients),
        actions=lambda: schedule.executed,
        unfinished=TransformersError("the schedule took no step: call schedule.train_step in the block"),
    )


@contextmanager
def _watching_own(
    schedule: PipelineSchedule, losses: list[float], gradients: dict[nn.Parameter, Gradient], sight: Sight
) -> Iterator[None]:
    """While this is open, keep a step's gradients when they are summed and not clipped yet; tell ``sight`` at its end.

    Before that, the schedule tells no losses.
    """
    kept = schedule.wrapped(lambda parts: replace(parts, gradients=_Keeping(parts, gradients)))

    def train_step(_: Any, *given: Any, **named: Any) -> Any:
        result = kept.train_step(*given, **named)
        schedule._spans = kept._spans
        losses[:] = result.losses
        sight.complete()
        sight.norm(result.grad_norm)
        return result

    with around(schedule, "train_step", train_step):
        yield


class _Keeping(AroundGradients):
    """Gradient work that keeps them between the tied reduction and the clipping."""

    def __init__(self, parts: Parts, kept: dict[nn.Parameter, Gradient]) -> None:
        super().__init__(parts.gradients, parts.stages)
        self._kept = kept

    def reduce_tied(self) -> None:
        self.inner.reduce_tied()
        every = (one for stage in self.stages for one in stage.module.parameters())
        self._kept |= {one: copied(one.grad) for one in every if one.requires_grad}


@contextmanager
def observed(schedule: Any, stages: Sequence[nn.Module], model: nn.Module) -> Iterator[Observation]:
    """Observe the step that is trained inside this.

    schedule: one of ``torch.distributed.pipelining``, or a ``PipelineSchedule``. stages: this rank's modules, in the
    schedule's order; ``Stage`` makes them of ``model``, which ``validate`` gave to the step, and so may other cuts that
    keep its names. Gradients are noted when torch is about to clip them by a norm, or PipelineSchedule is, and the norm
    with them; without that, they are what there is at ``handed_back``. Raises ``TransformersError`` for what is not
    covered.
    """
    step = step_of(schedule, stages)
    whole = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in step.parameters():
        if name not in whole or whole[name].shape != parameter.shape:
            ours = f"has it in shape {list(whole[name].shape)}" if name in whole else "has none of that name"
            raise TransformersError(
                f"a stage has a parameter {name} of shape {list(parameter.shape)}, the model {ours}: cut it by "
                "pipeproof.transformers.Stage, or hand back stages and losses without observed"
            )
    seen = Observation(step)
    with observing(seen, step):
        yield seen


def validate(
    step: Callable[[Any, list[dict[str, Any]]], Any],
    *,
    reference: Callable[[], Any],
    microbatches: Sequence[HfBatch],
    ranks: int | Sequence[int] | Mapping[str, int],
    loss: str = "tokens",
    whitebox: WhiteBox | None = None,
) -> Verdict:
    """The verdict on ``step(model, microbatches)``, which trains a causal language model in stages.

    reference: builds the whole model, seeded, in training without dropout; the step is given one. microbatches:
    mappings with input_ids, labels and what else the model is called with, as a data collator gives them, for all
    replicas. ranks: as for ``whitebox.validate``. loss: ``"tokens"`` divides each microbatch's sum by the tokens that
    count in all of them, as ``num_items_in_batch`` does; ``"mean"`` is the mean over microbatches of each one's mean,
    as without it. The losses that a step reports are what it differentiates with ``"tokens"``, and each one's mean with
    ``"mean"``. whitebox: whose ranks to use, as pytest's fixture; None: own ones.

    Raises ``TransformersError``, and what ``whitebox.validate`` raises.
    """
    TRANSFORMERS.module()
    by = divisor(loss)
    judge, how = TRANSFORMERS.judge(whitebox), packed(TRANSFORMERS.listed(microbatches))
    whole = partial(WholeTransformers, reference, how.names)
    return judge(
        Named(step, partial(_unpacked, step, how)),
        reference=Named(reference, whole),
        microbatches=[pair_of(how, one) for one in microbatches],
        ranks=ranks,
        loss_fn=CausalLoss.of(whole().itself, [one["labels"] for one in microbatches], loss) if microbatches else None,
        contract=Contract(loss_divisor=by),
    )


def _unpacked(
    step: Callable[[Any, list[dict[str, Any]]], Any], how: Packed, whole: WholeTransformers, microbatches: Sequence[Any]
) -> Any:
    """Run a step on the model itself and microbatches as they were."""
    return step(whole.itself, [batch_of(how, *one) for one in microbatches])

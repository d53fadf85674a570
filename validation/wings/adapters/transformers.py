"""Transformers: causal language models in stages, and steps of a running ``Trainer``.

A user's step cuts the model and trains by a schedule of torch's or ours inside ``observe``, or hands back stages and
losses of its own runtime. ``validate`` takes batches as a data collator gives them. Nothing of transformers is imported
before one of these is called.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.pipelining.schedules import _PipelineSchedule

from pipeproof.core.verdict import Verdict
from pipeproof.pipeline.step import PipelineSchedule
from pipeproof.records.checked_step import look_at
from pipeproof.whitebox.handed_back import Gradient, copy_gradient
from pipeproof.whitebox.torch_pipelining import stages_of
from pipeproof.whitebox.validator import WhiteBox
from pipeproof.wings.adapters import adapter
from pipeproof.wings.adapters.framework import AdapterError, around
from pipeproof.wings.adapters.step import FrameworkStep, Observation, Sight
from pipeproof.wings.adapters.torch_schedule import step_of_schedule
from pipeproof.wings.adapters.transformers_stage import Stage
from pipeproof.wings.adapters.transformers_trainer import TrainerStep, check_step, record_step
from pipeproof.wings.adapters.transformers_whole import TRANSFORMERS, HfBatch, whole_of
from pipeproof.wings.adapters.whole import Whole

__all__ = [
    "Stage",
    "TrainerStep",
    "TransformersError",
    "check_step",
    "imports",
    "observe",
    "record_step",
    "validate",
]

TransformersError = AdapterError
imports = TRANSFORMERS.imports


def observe(schedule: Any, stages: Sequence[nn.Module], model: nn.Module) -> AbstractContextManager[Observation]:
    """Observe the step trained in this block.

    schedule: from ``torch.distributed.pipelining``, or a ``PipelineSchedule``. stages: this rank's modules, in the
    schedule's order, made by ``Stage`` or another cut with the same names from ``model``, which ``validate`` passed to
    the step. Gradients are noted before clipping by torch or PipelineSchedule, with the norm; without it, at
    ``result()``. Raises ``TransformersError`` for unsupported use.
    """
    return adapter.observe(Transformers(schedule, stages), (), model)


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
    whole = whole_of(reference, TRANSFORMERS.list_microbatches(microbatches), loss)
    return adapter.validate(TRANSFORMERS, step, whole, ranks=ranks, whitebox=whitebox)


@dataclass(frozen=True)
class Transformers(adapter.Adapter):
    """A schedule, torch's or ours, and this rank's stages of a model."""

    schedule: Any
    stages: Any
    framework = TRANSFORMERS

    def step(self) -> FrameworkStep:
        TRANSFORMERS.module()
        schedule, stages = self.schedule, self.stages
        if not isinstance(stages, Sequence) or not all(isinstance(one, nn.Module) for one in stages):
            TRANSFORMERS.expect("stages", stages, (), "a list of this rank's modules")
        expected = (
            "one of torch.distributed.pipelining or a PipelineSchedule; from another runtime hand back stages and "
            "losses, without observe"
        )
        TRANSFORMERS.expect("schedule", schedule, PipelineSchedule | _PipelineSchedule, expected)
        ours = isinstance(schedule, PipelineSchedule)
        numbers = [one.index for one in schedule.parts.stages] if ours else stages_of(schedule)
        if len(numbers) != len(stages):
            raise AdapterError(f"stages has {len(stages)} modules, this rank of the schedule {len(numbers)}")
        if not ours:
            return step_of_schedule(schedule, stages, lambda _, name: TRANSFORMERS.in_whole(name))
        losses, gradients = list[float](), dict[nn.Parameter, Gradient]()
        return FrameworkStep(
            dict(zip(numbers, stages, strict=True)),
            lambda _, name: TRANSFORMERS.in_whole(name),
            lambda: gradients,
            lambda: losses,
            partial(_watching, schedule, losses, gradients),
            actions=lambda: schedule.executed,
            unfinished=AdapterError("the schedule took no step: call schedule.train_step in the block"),
        )

    def load(self, step: FrameworkStep, microbatches: Sequence[Any], reference: nn.Module) -> None:
        """Check names and shapes alone, because the stages share the model's weights already."""
        whole = dict(reference.named_parameters(remove_duplicate=False))
        for name, parameter in step.parameters():
            if name not in whole or whole[name].shape != parameter.shape:
                ours = f"has it in shape {list(whole[name].shape)}" if name in whole else "has none of that name"
                raise AdapterError(
                    f"a stage has a parameter {name} of shape {list(parameter.shape)}, the model {ours}: cut it by "
                    "pipeproof.transformers.Stage, or hand back stages and losses without observe"
                )

    def whole(self, reference: Callable[..., Any], microbatches: Sequence[Any]) -> Whole:
        return whole_of(reference, microbatches, "tokens")


@contextmanager
def _watching(
    schedule: PipelineSchedule, losses: list[float], gradients: dict[nn.Parameter, Gradient], sight: Sight
) -> Iterator[None]:
    """Keep a step's summed, unclipped gradients while open; notify ``sight`` at its end.

    Earlier, the schedule reports no losses.
    """

    def keep() -> None:
        every = (one for stage in schedule.parts.stages for one in stage.module.parameters())
        gradients.update({one: copy_gradient(one.grad) for one in every if one.requires_grad})

    kept = schedule.wrap(lambda parts: look_at(parts, keep))

    def train_step(_: Any, *given: Any, **named: Any) -> Any:
        result = kept.train_step(*given, **named)
        schedule._spans = kept._spans
        losses[:] = result.losses
        sight.complete()
        sight.norm(result.grad_norm)
        return result

    with around(schedule, "train_step", train_step):
        yield

"""Faults of state: what an earlier step, an accumulation or an evaluation leaves behind."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from pipeproof.cases.specimens.planting import (
    Call,
    Changes,
    Shares,
    add,
    copies,
    first,
    middle,
    multiplied,
    on_gradients,
    on_stages,
    on_steps,
    on_work,
    stages_at,
)
from pipeproof.cases.specimens.specimen import Fault, Needs, Specimen
from pipeproof.observers.wrappers import AroundSteps, Pairs, Steps
from pipeproof.pipeline.boundary import Gradients, Tensors
from pipeproof.pipeline.step import Parts, StepResult

_AFTER_EVAL = Needs(plan=("eval", "train"))


def _not_cleared(parts: Parts) -> Parts:
    """What the optimizer was given is still there in the next step, whose gradients are added to it."""
    left = Shares()

    def reduce(parts: Parts) -> None:
        parts.gradients.reduce_tied()
        add(left)

    def scale(factor: float, parts: Parts) -> None:
        parts.gradients.scale(factor)
        left.update(copies(parts.stages))

    return on_work(reduce=reduce, scale=scale)(parts)


def _onto_parameters(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad += 1e-3 * parameter.detach()


def _clear_before(microbatches: Pairs, steps: Steps) -> Pairs:
    for stage in steps.parts.stages:
        stage.module.zero_grad()
    return microbatches


def _stay_in_evaluation(result: StepResult, parts: Parts) -> StepResult:
    for stage in stages_at(parts, middle):
        stage.module.eval()
    return result


@contextmanager
def _always_training(call: Call) -> Iterator[None]:
    mode = call.stage.module.training
    call.stage.module.train()
    yield
    call.stage.module.train(mode)


def _move_statistics(result: StepResult, parts: Parts) -> StepResult:
    for stage in parts.stages:
        for name, buffer in stage.module.named_buffers():
            if name.endswith("running_mean"):
                buffer.add_(0.1)
    return result


class _EvaluationDifferentiates(AroundSteps):
    """An evaluation computes gradients too, which stay for the next step."""

    def eval_step(self, microbatches: Pairs, *, loss_divisor: float | None = None) -> StepResult:
        buffers = [buffer for stage in self.parts.stages for buffer in stage.module.buffers()]
        before = [buffer.clone() for buffer in buffers]
        self.inner.accumulate(microbatches, loss_divisor=loss_divisor)
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
        return self.inner.eval_step(microbatches, loss_divisor=loss_divisor)


@torch.no_grad()
def _recomputed(gradients: Gradients, call: Call) -> Gradients:
    """The forward runs again in the backward, running statistics included."""
    call.stage.module(*call.inputs)
    return gradients


def _hook_stays(parts: Parts) -> Parts:
    """Boundary buffers outlive a step, and keep their hooks: one more in each, which halves what it is given."""
    steps = Counter[int]()  # of each microbatch

    def counted(inputs: Tensors, call: Call) -> Tensors:
        steps[call.microbatch] += torch.is_grad_enabled()
        return inputs

    def hooked(gradients: Gradients, call: Call) -> Gradients:
        return multiplied(gradients, 0.5 ** (steps[call.microbatch] - 1))

    return on_stages(Changes(inputs=counted, given=hooked), first)(parts)


SPECIMENS: Mapping[str, Specimen] = {
    "gradients-not-cleared": Specimen(
        summary="gradients are not cleared after a step, so the next step's are added to them",
        origin="NVIDIA/Megatron-LM#4609",
        classes=("tB", "mE", "mL"),
        fault=Fault("stale-gradient", "gradient"),
        needs=Needs(plan=("train", "train")),
        plant=_not_cleared,
    ),
    "gradients-onto-parameters": Specimen(
        summary="gradients are added to a buffer in which parameters were gathered before",
        origin="NVIDIA/Megatron-LM b25a76e0",
        classes=("mE",),
        fault=Fault("extra-term", "gradient"),
        plant=on_gradients(_onto_parameters),
    ),
    "accumulated-lost": Specimen(
        summary="the gradients of an accumulation's first call are cleared before its second",
        origin="NVIDIA-NeMo/Automodel#3530",
        classes=("tB", "mB"),
        fault=Fault("dropped", "gradient"),
        needs=Needs(plan=("accumulate", "train")),
        drive=on_steps(given=_clear_before),
    ),
    "evaluation-mode-stays": Specimen(
        summary="after an evaluation one stage goes on training in evaluation mode",
        origin="pytorch/pytorch#162822 and the class of modes not restored",
        classes=("tH", "mL"),
        fault=Fault("mode", "microbatches", stage=middle),
        needs=_AFTER_EVAL,
        drive=on_steps(told=_stay_in_evaluation, operation="eval"),
    ),
    "evaluation-in-training-mode": Specimen(
        summary="one stage evaluates in training mode",
        origin="no report: the mirror image of evaluation-mode-stays",
        classes=("tH",),
        fault=Fault("mode", "microbatches", stage=middle),
        needs=_AFTER_EVAL,
        plant=on_stages(Changes(during=_always_training), middle),
    ),
    "evaluation-moves-statistics": Specimen(
        summary="an evaluation changes running statistics",
        origin="kakaobrain/torchgpipe#35 (suspected there)",
        classes=("tG", "tH"),
        fault=Fault("buffers", "buffers"),
        needs=Needs(models=("batchnorm",), plan=("eval", "train")),
        drive=on_steps(told=_move_statistics, operation="eval"),
    ),
    "evaluation-differentiates": Specimen(
        summary="the end of a step, with its gradients, runs in evaluation too",
        origin="NVIDIA/Megatron-LM 5f50aed7",
        classes=("mB",),
        fault=Fault("extra-term", "gradient", alike=("stale-gradient",)),
        needs=_AFTER_EVAL,
        drive=_EvaluationDifferentiates,
    ),
    "statistics-counted-twice": Specimen(
        summary="recomputing a forward moves running statistics a second time",
        origin="kakaobrain/torchgpipe#9 (suspected there)",
        classes=("tG", "tH"),
        fault=Fault("buffers", "buffers", stage=middle),
        needs=Needs(models=("batchnorm",)),
        plant=on_stages(Changes(given=_recomputed), middle),
    ),
    "boundary-hook-stays": Specimen(
        summary="a hook on a kept boundary buffer is registered again in every step and fires more and more often",
        origin="pytorch/pytorch#185331",
        classes=("tB", "tH"),
        fault=Fault("scale", "second-step", stage=first, factor=lambda case: 0.5, alike=("altered",)),
        needs=Needs(stages=2, plan=("train", "train")),
        plant=_hook_stays,
    ),
}

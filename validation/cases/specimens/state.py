"""Faults of state: what an earlier step, an accumulation or an evaluation leaves behind."""

import torch
from torch import Tensor, nn

from pipeline.boundary import Gradients, Tensors
from pipeline.stage import Goal, Stage
from pipeline.step import Parts, StepResult
from validation.cases.specimens.planting import Around, first, middle, on_stages, on_work
from validation.cases.specimens.specimen import Fault, Needs, Specimen
from validation.observers.wrappers import AroundStage, AroundSteps, Pairs

_TWO_STEPS = "naive r1 s1 m1 split=1 model=mlp plan=train+train seed=0"
_AFTER_EVAL = "naive r1 s1 m1 split=1 model={model} plan=eval+train seed=0"


class _NotCleared(Around):
    """What the optimizer was given is still there in the next step, whose gradients are added to it."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._left: dict[nn.Parameter, Tensor] = {}

    def reduce_tied(self) -> None:
        self.inner.reduce_tied()
        for parameter, gradient in self._left.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def scale(self, factor: float) -> None:
        self.inner.scale(factor)
        parameters = {p for stage in self.stages for p in stage.module.parameters()}
        self._left = {p: p.grad.clone() for p in parameters if p.grad is not None}


class _OnParameters(Around):
    """Gradients are added to a buffer that held parameters and was not cleared."""

    def reduce_tied(self) -> None:
        for stage in self.stages:
            for parameter in stage.module.parameters():
                if parameter.grad is not None:
                    parameter.grad += 1e-3 * parameter.detach()
        self.inner.reduce_tied()


class _ClearsBefore(AroundSteps):
    """A step clears the gradients first, also those of an accumulation that it belongs to."""

    def given(self, operation: str, microbatches: Pairs) -> Pairs:
        if operation == "train":
            for stage in self.parts.stages:
                stage.module.zero_grad(set_to_none=True)
        return microbatches


class _StaysInEvaluation(AroundSteps):
    """After an evaluation the middle stage stays in evaluation mode."""

    def told(self, operation: str, result: StepResult) -> StepResult:
        for stage in self.parts.stages:
            if operation == "eval" and stage.index == middle(self.parts.program.schedule.n_stages):
                stage.module.eval()
        return result


class _TrainsInEvaluation(AroundStage):
    """A stage that evaluates in training mode."""

    def forward(self, microbatch: int, inputs: Tensors, goal: Goal | None) -> Tensors:
        if torch.is_grad_enabled():
            return self.inner.forward(microbatch, inputs, goal)
        self.module.train()
        outputs = self.inner.forward(microbatch, inputs, goal)
        self.module.eval()
        return outputs


class _EvaluationTicks(AroundSteps):
    """An evaluation moves running statistics."""

    def told(self, operation: str, result: StepResult) -> StepResult:
        for stage in self.parts.stages:
            for name, buffer in stage.module.named_buffers():
                if operation == "eval" and name.endswith("running_mean"):
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


class _Recomputes(AroundStage):
    """A stage that computes its forward again in its backward, running statistics included."""

    def __init__(self, inner: Stage) -> None:
        super().__init__(inner)
        self._inputs: dict[int, Tensors] = {}

    def forward(self, microbatch: int, inputs: Tensors, goal: Goal | None) -> Tensors:
        self._inputs[microbatch] = inputs
        return self.inner.forward(microbatch, inputs, goal)

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        self._again(microbatch)
        return self.inner.backward(microbatch, gradients)

    def backward_input(self, microbatch: int, gradients: Gradients) -> Gradients:
        self._again(microbatch)
        return self.inner.backward_input(microbatch, gradients)

    @torch.no_grad()
    def _again(self, microbatch: int) -> None:
        self.module(*self._inputs.pop(microbatch))


class _HookStays(AroundStage):
    """A hook on a boundary buffer, which halves what it is given, is registered once more in every step but the first.

    Buffers that live as long as the schedule keep their hooks.
    """

    def __init__(self, inner: Stage) -> None:
        super().__init__(inner)
        self._steps = 0

    def begin(self) -> None:
        self._steps += torch.is_grad_enabled()
        self.inner.begin()

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        return self.inner.backward(microbatch, self._hooked(gradients))

    def backward_input(self, microbatch: int, gradients: Gradients) -> Gradients:
        return self.inner.backward_input(microbatch, self._hooked(gradients))

    def _hooked(self, gradients: Gradients) -> Gradients:
        factor = 0.5 ** (self._steps - 1)
        return tuple(None if gradient is None else gradient * factor for gradient in gradients)


SPECIMENS = (
    Specimen(
        name="gradients-not-cleared",
        summary="gradients are not cleared after a step, so the next step's are added to them",
        origin="NVIDIA/Megatron-LM#4609",
        classes=("tB", "mE", "mL"),
        smallest=_TWO_STEPS,
        law="gradient",
        fault=Fault("stale-gradient"),
        needs=Needs(plan=("train", "train")),
        plant=on_work(_NotCleared),
    ),
    Specimen(
        name="gradients-onto-parameters",
        summary="gradients are added to a buffer in which parameters were gathered before",
        origin="NVIDIA/Megatron-LM b25a76e0",
        classes=("mE",),
        smallest="naive r1 s1 m1 split=1 model=mlp plan=train seed=0",
        law="gradient",
        fault=Fault("extra-term"),
        plant=on_work(_OnParameters),
    ),
    Specimen(
        name="accumulated-lost",
        summary="the gradients of an accumulation's first call are cleared before its second",
        origin="NVIDIA-NeMo/Automodel#3530",
        classes=("tB", "mB"),
        smallest="naive r1 s1 m1 split=1 model=mlp plan=accumulate+train seed=0",
        law="gradient",
        fault=Fault("dropped"),
        needs=Needs(plan=("accumulate", "train")),
        drive=_ClearsBefore,
    ),
    Specimen(
        name="evaluation-mode-stays",
        summary="after an evaluation one stage goes on training in evaluation mode",
        origin="pytorch/pytorch#162822 and the class of modes not restored",
        classes=("tH", "mL"),
        smallest=_AFTER_EVAL.format(model="mlp"),
        law="microbatches",
        fault=Fault("mode", stage=middle),
        needs=Needs(plan=("eval", "train")),
        drive=_StaysInEvaluation,
    ),
    Specimen(
        name="evaluation-in-training-mode",
        summary="one stage evaluates in training mode",
        origin="no report: the mirror image of evaluation-mode-stays",
        classes=("tH",),
        smallest=_AFTER_EVAL.format(model="mlp"),
        law="microbatches",
        fault=Fault("mode", stage=middle),
        needs=Needs(plan=("eval", "train")),
        plant=on_stages(lambda stage, schedule: _TrainsInEvaluation(stage), middle),
    ),
    Specimen(
        name="evaluation-moves-statistics",
        summary="an evaluation changes running statistics",
        origin="kakaobrain/torchgpipe#35 (suspected there)",
        classes=("tG", "tH"),
        smallest=_AFTER_EVAL.format(model="batchnorm"),
        law="buffers",
        fault=Fault("buffers"),
        needs=Needs(models=("batchnorm",), plan=("eval", "train")),
        drive=_EvaluationTicks,
    ),
    Specimen(
        name="evaluation-differentiates",
        summary="the end of a step, with its gradients, runs in evaluation too",
        origin="NVIDIA/Megatron-LM 5f50aed7",
        classes=("mB",),
        smallest=_AFTER_EVAL.format(model="mlp"),
        law="gradient",
        fault=Fault("extra-term", alike=("stale-gradient",)),
        needs=Needs(plan=("eval", "train")),
        drive=_EvaluationDifferentiates,
    ),
    Specimen(
        name="statistics-counted-twice",
        summary="recomputing a forward moves running statistics a second time",
        origin="kakaobrain/torchgpipe#9 (suspected there)",
        classes=("tG", "tH"),
        smallest="naive r1 s1 m1 split=1 model=batchnorm plan=train seed=0",
        law="buffers",
        fault=Fault("buffers", stage=middle),
        needs=Needs(models=("batchnorm",)),
        plant=on_stages(lambda stage, schedule: _Recomputes(stage), middle),
    ),
    Specimen(
        name="boundary-hook-stays",
        summary="a hook on a kept boundary buffer is registered again in every step and fires more and more often",
        origin="pytorch/pytorch#185331",
        classes=("tB", "tH"),
        smallest="naive r2 s2 m1 split=1,1 model=mlp plan=train+train seed=0",
        law="second-step",
        fault=Fault("scale", stage=first, factor=lambda case: 0.5, alike=("altered",)),
        needs=Needs(stages=2, plan=("train", "train")),
        plant=on_stages(lambda stage, schedule: _HookStays(stage), first),
    ),
)

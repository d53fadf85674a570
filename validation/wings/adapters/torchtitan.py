"""Torchtitan: a step that pipeproof starts, or one of a running job.

A user's step makes its schedule and model parts by ``pipeline_llm`` as ever and trains inside ``observe``. The
reference is made of the same model and loss function. Nothing of torchtitan is imported before one of these is called.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import _PipelineSchedule

from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.records.checked_step import CheckedStep
from pipeproof.records.step_expectation import StepExpectation
from pipeproof.records.step_record import Pairs
from pipeproof.reference.accumulation import Accumulation
from pipeproof.whitebox.task import LossOfAll
from pipeproof.whitebox.torch_pipelining import backwards_of, stages_of
from pipeproof.whitebox.validator import WhiteBox
from pipeproof.wings.adapters import adapter
from pipeproof.wings.adapters.framework import AdapterError, Framework
from pipeproof.wings.adapters.recording import StepRecording
from pipeproof.wings.adapters.step import Content, FrameworkStep, Observation, content_of_rows
from pipeproof.wings.adapters.torch_schedule import step_of_schedule
from pipeproof.wings.adapters.whole import Called, Packed, Whole, by_name

__all__ = ["TorchtitanError", "check_step", "imports", "observe", "record_step", "validate"]

TorchtitanError = AdapterError
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")  # of recomputation and torch.compile
TORCHTITAN = Framework(
    "torchtitan", "torchtitan", ("0.3",), "pip install torchtitan==0.3.0 triton", child="model", wrappers=_WRAPPERS
)
imports = TORCHTITAN.imports

TitanBatch = tuple[Mapping[str, Tensor], Tensor]  # as a dataloader of torchtitan's gives it: input_dict, labels
LossFunction = Callable[..., Any]


def observe(
    pp_schedule: Any, model_parts: Sequence[nn.Module], reference: nn.Module
) -> AbstractContextManager[Observation]:
    """Observe the step trained in this block, from weights of ``reference``.

    pp_schedule, model_parts: from ``pipeline_llm``. reference: the model that ``validate`` passed to the step.
    Gradients are noted before torchtitan's ``clip_grad_norm_`` clips them, with the norm; without it, at ``result()``.
    Raises ``TorchtitanError`` for unsupported use.
    """
    return adapter.observe(Torchtitan(pp_schedule, model_parts), (), reference)


def validate(
    step: Callable[[Any, list[TitanBatch]], Any],
    *,
    reference: Callable[[], nn.Module],
    loss_fn: LossFunction,
    microbatches: Sequence[TitanBatch],
    ranks: int | Mapping[str, int],
    whitebox: WhiteBox | None = None,
) -> Verdict:
    """Validate ``step(model, microbatches)``, which trains the parts from ``pipeline_llm`` inside ``observe``.

    reference: builds the whole model, seeded, with its weights, for the step too. loss_fn: as for ``pipeline_llm``; it
    returns a loss and metrics. microbatches: pairs of ``input_dict`` and labels from the dataloader, for all replicas.
    The loss is divided by their counted tokens. ranks: how many, all of one pipeline; or ``{"pp": 2, "dp": 2}``.
    whitebox: whose ranks to use, as pytest's fixture; None: own ones.

    Raises ``TorchtitanError``, and what ``whitebox.validate`` raises.
    """
    TORCHTITAN.module()
    whole = whole_of(reference, loss_fn, TORCHTITAN.list_microbatches(microbatches))
    return adapter.validate(TORCHTITAN, step, whole, ranks=ranks, whitebox=whitebox)


def check_step(
    pp_schedule: Any,
    model_parts: Sequence[nn.Module],
    microbatches: Sequence[TitanBatch] | None,
    *,
    reference: Callable[[], nn.Module] | StepExpectation,
    loss_fn: LossFunction,
    floors: bool = True,
    timeout_s: float = 300.0,
) -> AbstractContextManager[CheckedStep]:
    """Check one step of a running job in this block: ``pp_schedule.step`` and clipping. Every rank enters it.

    pp_schedule, model_parts: from ``pipeline_llm``. loss_fn: as for it. microbatches: pairs of ``input_dict`` and
    labels that this rank's replica trains in the step; None on ranks without them; rank 0 must have them. reference:
    builds the whole model; or a ``StageByStage``, for a model too large for one device: ranks with the first or last
    stage then have microbatches, and its loss is ignored. Otherwise like ``deepspeed.check_step``.
    """
    own = Torchtitan(pp_schedule, model_parts, loss_fn)
    return adapter.check_step(own, microbatches, reference=reference, floors=floors, timeout_s=timeout_s)


def record_step(
    pp_schedule: Any,
    model_parts: Sequence[nn.Module],
    microbatches: Sequence[Any] | None,
    path: str,
    *,
    timeout_s: float = 300.0,
) -> AbstractContextManager[StepRecording]:
    """Record one step of a running job in this block, into the file at ``path``.

    pp_schedule, model_parts: as for ``check_step``. Otherwise like ``deepspeed.record_step``.
    """
    return adapter.record_step(Torchtitan(pp_schedule, model_parts), microbatches, path, timeout_s=timeout_s)


@dataclass(frozen=True)
class Torchtitan(adapter.Adapter):
    """A schedule and model parts from ``pipeline_llm``, and its loss function."""

    pp_schedule: Any
    model_parts: Any
    loss_fn: Any = None
    framework = TORCHTITAN

    def step(self) -> FrameworkStep:
        self._check_covered()
        step = step_of_schedule(self.pp_schedule, self.model_parts, lambda _, name: TORCHTITAN.in_whole(name))
        return replace(step, accumulation=self._accumulation())

    def whole(self, reference: Callable[..., Any], microbatches: Sequence[Any]) -> Whole:
        return whole_of(reference, self.loss_fn, microbatches)

    def against_itself(self, by: StepExpectation, microbatches: Sequence[Any]) -> tuple[StepExpectation, Pairs]:
        whole = whole_of(nn.Identity, self.loss_fn, microbatches)
        return by.in_framework({"loss_divisor": 1.0}, loss_fn=whole.loss_fn), whole.pairs

    def contents(self, microbatches: Sequence[Any] | None) -> Sequence[Content]:
        return [content_of_rows([given["input"], labels]) for given, labels in microbatches or ()]

    def _check_covered(self) -> None:
        """Raise for unsupported use."""
        TORCHTITAN.module()
        parts, expected = self.model_parts, "the schedule, which pipeline_llm gives first"
        TORCHTITAN.expect("pp_schedule", self.pp_schedule, _PipelineSchedule, expected)
        if not isinstance(parts, Sequence) or not all(isinstance(one, nn.Module) for one in parts):
            TORCHTITAN.expect("model_parts", parts, (), "the modules, which pipeline_llm gives second")
        if (stages := len(stages_of(self.pp_schedule))) != len(parts):
            raise AdapterError(f"model_parts has {len(parts)} modules, this rank of pp_schedule {stages} stages")
        for module in self._sharded:
            computed = module._get_fsdp_state()._mp_policy.param_dtype
            for name, parameter in module.named_parameters():
                if computed not in (None, parameter.dtype):
                    raise AdapterError(
                        f"FSDP computes with {name} in {computed}, the reference in {parameter.dtype}: set "
                        "training.mixed_precision_param to the type of the weights for the check"
                    )

    @property
    def _sharded(self) -> list[Any]:
        """Return the FSDP modules."""
        return [one for part in self.model_parts for one in part.modules() if isinstance(one, FSDPModule)]

    def _accumulation(self) -> Accumulation | None:
        """Return the types of accumulation: FSDP adds and reduces in ``reduce_dtype``, and casts to the weights' type.

        The same holds for one replica.
        """
        types = {
            (module._get_fsdp_state()._mp_policy.reduce_dtype, one.dtype)
            for module in self._sharded
            for one in module.parameters()
        }
        reduced, own = next(iter(types)) if len(types) == 1 else (None, None)
        if reduced in (None, own):
            return None
        return Accumulation(reduced, result=own, bundles=bundles(backwards_of(self.pp_schedule)))


def bundles(backwards: Iterable[tuple[int, str, int]]) -> dict[int, list[list[int]]]:
    """Group microbatches, by stage, whose weight gradients torch adds before FSDP takes them.

    FSDP takes gradients at each backward through a stage's inputs, and the rest at the end. The first stage has no
    input gradient: FSDP takes each of its backwards.
    """
    found: dict[int, list[list[int]]] = {}
    for stage, kind, microbatch in backwards:
        own = found.setdefault(stage, [[]])
        if kind != "I":
            own[-1].append(microbatch)
        if kind != "W" or stage == 0:
            own.append([])
    return {stage: [one for one in own if len(one) > 1] for stage, own in found.items()}


def whole_of(reference: Callable[[], nn.Module], loss_fn: Any, microbatches: Sequence[Any]) -> Whole:
    """Return the whole model and torchtitan's loss: a sum over tokens, divided by the step's counted tokens."""
    TORCHTITAN.expect("loss_fn", loss_fn, Callable, "what pipeline_llm is given")
    if isinstance(loss_fn, TORCHTITAN.module("components.loss").ChunkedLossWrapper):
        raise AdapterError("loss_fn is a ChunkedLossWrapper: use the loss in it for the check, CrossEntropyLoss say")
    expected = "a pair of input_dict, which has an input, and labels, as torchtitan's dataloader gives it"
    for number, one in enumerate(microbatches):
        pair = isinstance(one, tuple | list) and len(one) == 2
        if not pair or not isinstance(one[0], Mapping) or "input" not in one[0]:
            TORCHTITAN.expect(f"microbatch {number}", one, (), expected)
    packed = Packed.of([by_name(given, "input") for given, _ in microbatches])
    return Whole(
        reference,
        partial(_build, reference, packed),
        [(packed.pack(by_name(inputs, "input")), labels) for inputs, labels in microbatches],
        LossOfAll(lambda every: UnitLoss(loss_fn, tokens_in(labels for _, labels in every))),
        Contract(loss_divisor=1.0),
        lambda one: (packed.unpack(one[0]), one[1]),
        attrgetter("model"),
    )


def tokens_in(labels: Iterable[Any]) -> int:
    """How many labels count. Raises if none does."""
    ignored = TORCHTITAN.module("components.loss").IGNORE_INDEX
    if not (tokens := sum(int((one != ignored).sum()) for one in labels)):
        raise AdapterError(f"every label is {ignored}, which the loss ignores: expected one that counts")
    return tokens


@dataclass(frozen=True)
class UnitLoss:
    """torchtitan's differentiated loss, when ``tokens`` count in the whole step."""

    loss_fn: LossFunction
    tokens: int

    def __call__(self, output: Any, labels: Tensor) -> Tensor:
        result = self.loss_fn(output, labels, torch.tensor(self.tokens, device=labels.device))
        if not isinstance(result, tuple) or len(result) != 2:
            raise AdapterError(
                f"loss_fn returned a {type(result).__name__}: expected (loss, metrics), as torchtitan's losses return"
            )
        loss: Tensor = result[0]
        return loss


def _build(reference: Callable[[], nn.Module], packed: Packed) -> Called:
    model = TORCHTITAN.build(reference)
    TORCHTITAN.expect("the reference", model, nn.Module, "the whole model, as built")
    experts = TORCHTITAN.module("models.common.moe").MoE
    for name, module in model.named_modules():
        if isinstance(module, experts):
            raise AdapterError(f"{name} has experts: {TORCHTITAN.adapter} covers dense models only")
    TORCHTITAN.check_dropout(model)
    return Called(model, packed, _call)


def _call(model: Any, inputs: Mapping[str, Tensor]) -> Any:
    """Call the model, with the trainer's masks for this kind of attention, made from positions."""
    named: dict[str, Any] = {name: one for name, one in inputs.items() if name != "input"}
    attention = getattr(getattr(model, "config", None), "first_attention", None)
    inner = getattr(attention, "inner_attention", None)
    if inner is not None and "positions" in named:
        place = TORCHTITAN.module("models.common.attention")
        if isinstance(inner, place.FlexAttention.Config | place.VarlenAttention.Config):
            named["attention_masks"] = model.get_attention_masks(positions=named["positions"])
    return model(inputs["input"], **named)

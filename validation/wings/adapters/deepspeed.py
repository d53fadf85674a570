"""DeepSpeed: a PipelineEngine's step, started by pipeproof or in a running job.

A user's step builds its engine as usual and calls ``train_batch`` inside ``observe``. The reference uses the same
layers. DeepSpeed is imported only when one of these functions is called.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof.core.verdict import Verdict
from pipeproof.records.checked_step import CheckedStep
from pipeproof.records.step_expectation import StepExpectation
from pipeproof.records.step_record import Pairs
from pipeproof.reference.accumulation import Accumulation
from pipeproof.whitebox.handed_back import FlatShard, Gradient
from pipeproof.whitebox.task import form, name_of, pair_of
from pipeproof.whitebox.validator import WhiteBox
from pipeproof.wings.adapters import adapter
from pipeproof.wings.adapters.framework import AdapterError, Framework, around, launch_environment
from pipeproof.wings.adapters.recording import StepRecording
from pipeproof.wings.adapters.step import Drawn, FrameworkStep, Observation, Sight, telling
from pipeproof.wings.adapters.whole import OfMicrobatch, Whole

__all__ = ["DeepSpeedError", "check_step", "imports", "observe", "record_step", "validate"]

DeepSpeedError = AdapterError
pair = partial(pair_of, target="labels", error=AdapterError)
DEEPSPEED = Framework("deepspeed", "deepspeed", ("0.19",), "pip install deepspeed==0.19.8")
imports = DEEPSPEED.imports

# By what the engine calls them: attributes, or methods that tell.
_COVERED = {
    "is_model_parallel": False,
    "has_moe_layers": False,
    "fp16_enabled": False,
    "torch_autocast_enabled": False,
    "zero_cpu_offload": False,
    "random_ltd_enabled": False,
    "curriculum_learning_enabled": False,
    "is_deepcompile_enabled": False,
    "managed_gradient_accumulation": True,
}


def observe(engine: Any, microbatches: Sequence[Any], reference: nn.Module) -> AbstractContextManager[Observation]:
    """Observe the batch trained in this block, from weights of ``reference``.

    engine: from ``deepspeed.initialize``, of a PipelineModule. microbatches: the step's, as many as the engine's
    gradient accumulation steps. The result has a ``data_iterator`` for ``train_batch``. Raises ``DeepSpeedError`` for
    unsupported use.
    """
    return adapter.observe(DeepSpeed(engine), microbatches, reference)


def validate(
    step: Callable[[Any, list[Any]], Any],
    *,
    reference: Callable[[], Any],
    microbatches: Sequence[Any],
    ranks: int | Mapping[str, int],
    loss_fn: Callable[[Any, Tensor], Tensor] | None = None,
    dtype: torch.dtype | None = None,
    whitebox: WhiteBox | None = None,
) -> Verdict:
    """The verdict on ``step(reference, microbatches)``, which trains a PipelineEngine inside ``observe``.

    reference: gives the layers, seeded, as PipelineModule takes them. microbatches: pairs of inputs and labels, as the
    data iterator gives them. ranks: how many, all of one pipeline; or ``{"pp": 2, "dp": 2}``. loss_fn: the
    PipelineModule's; None: the last layer gives the loss. dtype: what the engine's config has the layers cast to.
    whitebox: whose ranks to use, as pytest's fixture; None: own ones.

    Raises ``DeepSpeedError``, and what ``whitebox.validate`` raises.
    """
    DEEPSPEED.module()
    DEEPSPEED.check_dtype(dtype)
    _check_loss(loss_fn)
    data = [tuple(one) if isinstance(one, list) else one for one in DEEPSPEED.list_microbatches(microbatches)]
    loss = loss_fn or loss_of_layers
    whole = Whole(reference, partial(WholeDeepSpeed, reference, dtype), data, loss, alone=as_launched)
    if any(isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], tuple | list) for one in data):
        # Numbers stand for labels made from several tensors.
        pairs = [pair(number, one) for number, one in enumerate(data)]
        labels: dict[tuple[int, ...], Any] = {(number,): one for number, (_, one) in enumerate(pairs)}

        def given(one: Any) -> Any:
            return one[0], labels[tuple(one[1].tolist())]

        numbered = [(inputs, torch.tensor([number])) for number, (inputs, _) in enumerate(pairs)]
        whole = replace(whole, microbatches=numbered, loss_fn=OfMicrobatch(loss, labels), given=given)
    return adapter.validate(DEEPSPEED, step, whole, ranks=ranks, whitebox=whitebox)


def check_step(
    engine: Any,
    microbatches: Sequence[Any] | None,
    *,
    reference: Callable[[], Any] | StepExpectation,
    loss_fn: Callable[[Any, Tensor], Tensor] | None = None,
    floors: bool = True,
    timeout_s: float = 300.0,
) -> AbstractContextManager[CheckedStep]:
    """Check one ``engine.train_batch`` of a running job in this block. Every rank enters it.

    After the block there is a ``verdict``. The job keeps its weights, optimizer and random numbers, and always goes on:
    unsupported use makes the verdict unknown.

    engine: from ``deepspeed.initialize``, of a PipelineModule. microbatches: pairs of inputs and labels that this
    rank's replica trains in the step; None on ranks without them; rank 0 must have them. reference: returns the layers,
    in the form for PipelineModule; or a ``StageByStage``, for a model too large for one device: ranks with the first or
    last stage then have microbatches. loss_fn: the PipelineModule's; None: the last layer gives the loss. floors and
    timeout_s: see ``SingleDevice`` and ``check_step``.
    """
    return adapter.check_step(
        DeepSpeed(engine, loss_fn), microbatches, reference=reference, floors=floors, timeout_s=timeout_s
    )


def record_step(
    engine: Any, microbatches: Sequence[Any] | None, path: str, *, timeout_s: float = 300.0
) -> AbstractContextManager[StepRecording]:
    """Record one step of a running job in this block. Every rank enters it.

    Rank 0 writes the record into the file at ``path``, for ``pipeproof compare``. If recording fails, it
    warns and writes nothing. The job keeps its weights, optimizer and random numbers, and goes on.

    engine: as for ``check_step``. microbatches: those that this rank's replica trains in the step, in any form: the
    record has only digests of their tensors, to recognize steps on the same data. None on a rank without them.
    timeout_s bounds each wait for other ranks.
    """
    return adapter.record_step(DeepSpeed(engine), microbatches, path, timeout_s=timeout_s)


@dataclass(frozen=True)
class DeepSpeed(adapter.Adapter):
    """A PipelineEngine, and its PipelineModule's loss function, given by the user."""

    engine: Any
    loss_fn: Callable[[Any, Tensor], Tensor] | None = None
    framework = DEEPSPEED

    def step(self) -> FrameworkStep:
        engine, drawn = self.engine, Drawn()
        _check_covered(engine)
        replicas = engine.grid.data_parallel_size
        return FrameworkStep(
            {engine.stage_id: engine.module},
            lambda stage, name: name,  # a PipelineModule and the reference share names
            lambda: {one: gradient_of(one, replicas) for one in engine.module.parameters() if one.requires_grad},
            lambda: engine.fwd_outputs,
            partial(_watching, engine, drawn),
            unfinished=AdapterError("the engine took no step: call engine.train_batch in the block"),
            drawn=drawn,
            sum_of=_sum_of,
            accumulation=_accumulation(engine),
        )

    def load(self, step: FrameworkStep, microbatches: Sequence[Any], reference: nn.Module) -> Any:
        engine = self.engine
        self._check_count(DEEPSPEED.list_microbatches(microbatches))
        DEEPSPEED.check_neighbours(engine.stage_id, engine.grid.data_parallel_size, "DeepSpeed's own topology")
        DEEPSPEED.check_types(engine.module, reference, "the engine's layers are in")
        data = super().load(step, microbatches, reference)
        if hasattr(engine.optimizer, "refresh_fp32_params"):
            engine.optimizer.refresh_fp32_params()
        return data

    def whole(self, reference: Callable[..., Any], microbatches: Sequence[Any]) -> Whole:
        enabled = getattr(self.engine, "bfloat16_enabled", None)
        dtype = torch.bfloat16 if enabled is not None and enabled() else None  # the type that layers are cast to
        pairs = self._pairs(microbatches)
        return Whole(reference, partial(WholeDeepSpeed, reference, dtype), pairs, self.loss_fn or loss_of_layers)

    def against_itself(self, by: StepExpectation, microbatches: Sequence[Any]) -> tuple[StepExpectation, Pairs]:
        pairs = self._pairs(microbatches)
        return by.in_framework({}, loss_fn=self.loss_fn), pairs

    def _pairs(self, microbatches: Sequence[Any]) -> Pairs:
        if microbatches:
            self._check_count(microbatches)
        own = getattr(getattr(self.engine, "module", None), "loss_fn", None)
        if self.loss_fn is None and own is not None:
            raise AdapterError(
                f"loss_fn is None, and the engine's PipelineModule has {name_of(own)}: pass that to the check"
            )
        _check_loss(self.loss_fn)
        return [pair(number, one) for number, one in enumerate(microbatches)]

    def _check_count(self, microbatches: Sequence[Any]) -> None:
        DEEPSPEED.expect_count("gradient_accumulation_steps", self.engine.micro_batches, len(microbatches))


def _sum_of(parameter: nn.Parameter) -> Tensor | None:
    """Return the engine's accumulated gradient if whole: with bf16, flat and in a separate type."""
    whole: Tensor | None = getattr(parameter, "_hp_grad", None)
    return parameter.grad if whole is None else whole


def gradient_of(parameter: nn.Parameter, replicas: int) -> Gradient:
    """Return the gradient for the engine's optimizer, in place.

    With ZeRO-1, each replica among several has a part.
    """
    whole = _sum_of(parameter)
    if whole is not None:
        return whole.detach().view_as(parameter)
    if not hasattr(parameter, "_hp_mapping"):
        return None
    mapping: Any = parameter._hp_mapping
    if mapping is None:
        return FlatShard(None)
    part: Tensor = mapping.get_lp_grad_fragment(parameter._index_in_param_group).detach()  # type: ignore[attr-defined]  # DeepSpeed's
    return part.view_as(parameter) if replicas == 1 else FlatShard(part.flatten(), mapping.lp_fragment_address.start)


@contextmanager
def _watching(engine: Any, drawn: Drawn, sight: Sight) -> Iterator[None]:
    """Note ``drawn`` data, and notify ``sight`` of the optimizer's step and the norm, while open."""
    clipped_by = list[Any]()  # in fp32 without ZeRO, where the engine has no norm to tell

    def next_batch(draw: Any) -> Any:
        batch = draw()
        drawn.note(batch)
        return batch

    def clipping(clip: Any, *given: Any, **named: Any) -> Any:
        clipped_by[:] = [clip(*given, **named)]
        return clipped_by[0]

    def taking(step: Any, *given: Any, **named: Any) -> Any:
        clipped_by.clear()
        with around(DEEPSPEED.module("runtime.engine"), "clip_grad_norm_", clipping):
            return step(*given, **named)

    def norm(_: Any) -> Any:
        reported = engine.get_global_grad_norm()
        return next(iter(clipped_by), None) if reported is None else reported

    with (
        around(engine, "_take_model_step", taking),
        around(engine, "_take_model_step", telling(sight, norm)),
        around(engine, "_next_batch", next_batch),
    ):
        yield


def _accumulation(engine: Any) -> Accumulation | None:
    """Return the types of accumulation: for bf16, ``grad_accum_dtype``, reduced in ``communication_data_type``.

    The latter is mostly bf16. The schedule has ``ReduceTiedGrads`` before ``ReduceGrads``.
    """
    if not engine.bfloat16_enabled():
        return None
    _, dtype = engine.get_data_types()
    return Accumulation(dtype, engine.communication_data_type, tied_first=True)


def _check_covered(engine: Any) -> None:
    """Raise for unsupported use."""
    if type(engine) is not DEEPSPEED.module("runtime.pipe.engine").PipelineEngine:
        raise AdapterError(f"the engine is a {type(engine).__name__}: {DEEPSPEED.adapter} covers PipelineEngine only")
    values = {name: getattr(engine, name) for name in _COVERED}
    DEEPSPEED.covers({name: value() if callable(value) else value for name, value in values.items()}, _COVERED)
    if engine.batch_fn is not None:
        raise AdapterError("the engine has a batch_fn: give microbatches as it makes them, and leave it out")


def _check_loss(loss_fn: Any) -> None:
    if loss_fn is not None:
        expected = "the PipelineModule's, a function of what the last layer gives and the labels"
        DEEPSPEED.expect_function("loss_fn", loss_fn, expected)


@contextmanager
def as_launched(device: str) -> Iterator[None]:
    """Imitate DeepSpeed's launcher while open; restore DeepSpeed's state afterwards."""
    on_cpu = {"DS_ACCELERATOR": "cpu"} if device == "cpu" else {}
    places = [vars(DEEPSPEED.module(name)) for name in ("comm.comm", "utils.groups", "runtime.pipe.p2p")]
    kept = [dict(place) for place in places]
    # Ranks are used for several layouts. Its shared memory is made for the first one's, and serves inference alone.
    without = mock.patch.dict(DEEPSPEED.module("ops").__compatible_ops__, deepspeed_shm_comm=False)
    try:
        with launch_environment(LOCAL_SIZE=str(dist.get_world_size()), **on_cpu), without:
            yield
    finally:
        for place, values in zip(places, kept, strict=True):
            place.update(values)


class WholeDeepSpeed(nn.Module):
    """All layers that ``build`` gives to a PipelineModule, with their names in it."""

    def __init__(self, build: Callable[[], Iterable[Any]], dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        layers = DEEPSPEED.build(build)
        DEEPSPEED.expect("the reference", layers, Iterable, "layers as PipelineModule is given")
        self._calls = [self._make(str(number), layer) for number, layer in enumerate(layers)]
        if dtype is not None:
            self.to(dtype)
        DEEPSPEED.check_dropout(self, what="layer ")

    def _make(self, name: str, layer: Any) -> Callable[[Any], Any]:
        """Return the callable for ``layer``: a module, a module's specification, or a function."""
        pipe = DEEPSPEED.module("pipe")
        if isinstance(layer, pipe.TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
            tied = self.tied_modules[layer.key]
            return tied if layer.forward_fn is None else partial(layer.forward_fn, tied)
        made = layer.build() if isinstance(layer, pipe.LayerSpec) else layer
        if isinstance(made, nn.Module):
            self.add_module(name, made)
        DEEPSPEED.expect(f"layer {name}", made, Callable, "a module, a LayerSpec or a function")
        return made  # type: ignore[no-any-return]  # of the user's

    def forward(self, *inputs: Tensor) -> Any:
        made: Any = inputs[0] if len(inputs) == 1 else inputs
        for call in self._calls:
            made = call(made)
        return made


def loss_of_layers(output: Any, _: Any) -> Tensor:
    """Return the loss made by the layers. Raises ``DeepSpeedError`` if they made none."""
    if not isinstance(output, Tensor) or output.numel() != 1:
        found = f"a tensor of {form(output)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise AdapterError(f"the last layer gives {found}, and no loss: pass the PipelineModule's loss_fn")
    return output

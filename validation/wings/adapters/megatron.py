"""Megatron-core: a schedule's step, started by pipeproof or in a running job.

A user's step builds its chunks as usual and trains inside ``observe``, which passes its own ``forward_step`` and
``data_iterator`` to Megatron's schedule. The reference is called by the same forward step. Megatron is imported only
when one of these functions is called.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.records.checked_step import CheckedStep
from pipeproof.records.step_expectation import StepExpectation
from pipeproof.records.step_record import Pairs
from pipeproof.reference.accumulation import Accumulation
from pipeproof.whitebox.handed_back import FlatShard, Gradient
from pipeproof.whitebox.validator import WhiteBox
from pipeproof.wings.adapters import adapter
from pipeproof.wings.adapters.framework import AdapterError, around
from pipeproof.wings.adapters.megatron_whole import (
    MEGATRON,
    ForwardStep,
    LossOf,
    WholeMegatron,
    as_before,
    bare,
    check_config,
    core,
    fed,
    forget_group,
    whole_loss,
)
from pipeproof.wings.adapters.recording import StepRecording
from pipeproof.wings.adapters.step import Drawn, FrameworkStep, Observation, Sight, telling
from pipeproof.wings.adapters.whole import Whole

__all__ = ["MegatronError", "check_step", "imports", "observe", "record_step", "validate"]

MegatronError = AdapterError
imports = MEGATRON.imports

_TIED = "embedding.word_embeddings.weight"
_NO_STEP = "optimizer.step was not called in the block: pass the optimizer that takes the step, or None if none does"


@contextmanager
def observe(
    chunks: Any, forward_step: ForwardStep, microbatches: Sequence[Any], reference: nn.Module, optimizer: Any = None
) -> Iterator[Observation]:
    """Observe the step trained in this block, from weights of ``reference``.

    chunks: as for Megatron's schedule. optimizer: Megatron's, if the step calls it: gradients are then noted at its
    call, and the norm at its return. Without it, gradients are read at ``result()``. The result has a ``forward_step``
    and a ``data_iterator`` for Megatron's schedule. Raises ``MegatronError`` for unsupported use.
    """
    own = Megatron(chunks, optimizer)
    with fed(own.chunks), adapter.observe(own, microbatches, reference) as observed:
        observed.forward_step = forward_step
        yield observed


def validate(
    step: Callable[[Any, list[Any]], Any],
    *,
    reference: Callable[[], nn.Module],
    forward_step: ForwardStep,
    microbatches: Sequence[Any],
    ranks: int | Mapping[str, int],
    optimizer: Callable[[nn.Module], Optimizer] | None = None,
    whitebox: WhiteBox | None = None,
) -> Verdict:
    """The verdict on ``step(reference, microbatches)``, which trains Megatron's chunks inside ``observe``.

    reference: builds the whole model, with a config for one stage. forward_step: as Megatron's schedule is given it.
    microbatches: tuples of tensors, as the data iterator gives them. ranks: how many, all of one pipeline; or ``{"pp":
    2, "dp": 2}``. optimizer: makes the reference's, as for ``whitebox.validate``. whitebox: whose ranks to use, as
    pytest's fixture; None: own ones.

    Raises ``MegatronError``, and what ``whitebox.validate`` raises.
    """
    core()
    whole = whole_of(reference, forward_step, MEGATRON.list_microbatches(microbatches))
    return adapter.validate(MEGATRON, step, whole, ranks=ranks, whitebox=whitebox, optimizer=optimizer)


@contextmanager
def check_step(
    chunks: Any,
    optimizer: Any,
    forward_step: ForwardStep,
    microbatches: Sequence[Any] | None,
    *,
    reference: Callable[[], nn.Module] | StepExpectation,
    floors: bool = True,
    timeout_s: float = 300.0,
) -> Iterator[CheckedStep]:
    """Check one training step of a running job in this block. Every rank enters it.

    chunks, forward_step: as for Megatron's schedule. optimizer: Megatron's; None if the block does not step: gradients
    are then read at its end. microbatches: items of the data iterator in the step, for this rank's replica; None on
    ranks without them; rank 0 must have them. reference: builds the whole model, with a config for one stage; or a
    ``StageByStage``, for a model too large for one device: ranks with the first or last stage then have microbatches,
    and its loss is ignored. Otherwise like ``deepspeed.check_step``.
    """
    own = Megatron(chunks, optimizer, forward_step, draws=isinstance(reference, StepExpectation))
    try:
        with ExitStack() as stack:
            if own.draws:
                with suppress(AdapterError):  # the check reports invalid chunks
                    stack.enter_context(fed(own.chunks))
            check = adapter.check_step(own, microbatches, reference=reference, floors=floors, timeout_s=timeout_s)
            yield stack.enter_context(check)
    finally:
        forget_group()


def record_step(
    chunks: Any, optimizer: Any, microbatches: Sequence[Any] | None, path: str, *, timeout_s: float = 300.0
) -> AbstractContextManager[StepRecording]:
    """Record one step of a running job in this block, into the file at ``path``.

    chunks, optimizer: as for ``check_step``. Otherwise like ``deepspeed.record_step``.
    """
    return adapter.record_step(Megatron(chunks, optimizer), microbatches, path, timeout_s=timeout_s)


@dataclass(frozen=True)
class Megatron(adapter.Adapter):
    """Chunks, the optimizer of the step, if used, and the forward step.

    draws: stages may have dropout, because random numbers can be repeated.
    """

    given: Any
    optimizer: Any = None
    forward_step: Any = None
    draws: bool = False
    framework = MEGATRON

    @property
    def chunks(self) -> list[Any]:
        """One or several chunks. Raises for an empty one."""
        found = list(self.given) if isinstance(self.given, list | tuple) else [self.given]
        if not found or not all(isinstance(one, nn.Module) for one in found):
            kinds = ", ".join(type(one).__name__ for one in found) or "an empty list"
            raise AdapterError(
                f"the model is {kinds}: expected the chunk that Megatron's schedule is given, or a list of them"
            )
        return found

    def step(self) -> FrameworkStep:
        chunks, optimizer = self.chunks, self.optimizer
        check_config(bare(chunks[0]).config, draws=self.draws)
        state, losses, drawn = core("parallel_state"), list[Tensor](), Drawn()
        rank, ranks = state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()
        stages = {rank + ranks * number: bare(chunk) for number, chunk in enumerate(chunks)}
        names = {stage: global_names(model) for stage, model in stages.items()}
        config = getattr(optimizer, "config", None)

        def gradients() -> dict[nn.Parameter, Gradient]:
            found = {one: gradient for chunk in chunks for one, gradient in gradients_of(chunk).items()}
            return {one: divide(gradient, scale_of(optimizer)) for one, gradient in found.items()}

        return FrameworkStep(
            stages,
            lambda stage, name: MEGATRON.in_whole(names[stage].get(name, name)),
            gradients,
            lambda: losses,
            partial(_watching, optimizer, losses, drawn),
            unfinished=None if optimizer is None else AdapterError(_NO_STEP),
            drawn=drawn,
            max_norm=lambda: getattr(config, "clip_grad", None) or None,  # 0: it does not clip
            masters=bool(getattr(config, "bf16", False) or getattr(config, "fp16", False)),
            sum_of=lambda one: divide(main_gradient(one), scale_of(optimizer)),
            accumulation=self._accumulation(),
        )

    def load(self, step: FrameworkStep, microbatches: Sequence[Any], reference: nn.Module) -> Any:
        MEGATRON.load(step.parameters(), reference)
        if hasattr(self.optimizer, "reload_model_params"):
            self.optimizer.reload_model_params()
        iterators = [iter(microbatches) for _ in self.chunks]
        return iterators if len(iterators) > 1 else iterators[0]

    def whole(self, reference: Callable[..., Any], microbatches: Sequence[Any]) -> Whole:
        return whole_of(reference, self.forward_step, microbatches)

    def against_itself(self, by: StepExpectation, microbatches: Sequence[Any]) -> tuple[StepExpectation, Pairs]:
        _check_forward_step(self.forward_step)
        if bare(self.chunks[0]).config.calculate_per_token_loss:
            raise AdapterError(
                "calculate_per_token_loss is True, and no rank knows the tokens of all: such a step is held against "
                "the whole model alone"
            )
        scale = partial(scale_of, self.optimizer)
        known = {
            "loss_fn": LossOf(self.chunks, self.forward_step),
            "scaler": SimpleNamespace(get_scale=scale) if scale() != 1.0 else None,
            "generators": [*by.generators, core("tensor_parallel.random").get_cuda_rng_tracker()],
        }
        return by.in_framework({"loss_divisor": None}, **known), [(_inputs(one), one) for one in microbatches]

    def _accumulation(self) -> Accumulation | None:
        """Return the types of accumulation: for bf16 that of ``main_grad``, or fp32 if configured, also over replicas.

        ``finalize_model_grads`` reduces replicas, then tied copies, and optionally divides by tokens.
        """
        models = [bare(chunk) for chunk in self.chunks]
        held = [one for model in models for one in model.parameters() if hasattr(one, "main_grad")]
        if not held or held[0].dtype == torch.float32:
            return None
        return Accumulation(held[0].main_grad.dtype, late=bool(models[0].config.calculate_per_token_loss))


def global_names(model: nn.Module) -> dict[str, str]:
    """Return the whole model's name of each parameter in a stage's model.

    Layers count from 0 on every stage; each knows its number in the whole model, from 1. The output layer of a model
    that shares its embeddings has a copy of them.
    """
    numbers = {
        f"{prefix}.": f"{prefix.rpartition('.')[0]}.{number - 1}."
        for prefix, module in model.named_modules()
        if re.search(r"\.layers\.\d+$", prefix) and isinstance(number := getattr(module, "layer_number", None), int)
    }
    names = {name: name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name in names:
        for prefix, whole in numbers.items():
            if name.startswith(prefix):
                names[name] = whole + name.removeprefix(prefix)
    if getattr(model, "share_embeddings_and_output_weights", False) and "output_layer.weight" in names:
        names["output_layer.weight"] = _TIED
    return names


def main_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return the gradient for Megatron's optimizer: with its DDP, never ``.grad``."""
    return getattr(parameter, "main_grad", parameter.grad)


def gradients_of(chunk: Any) -> dict[nn.Parameter, Gradient]:
    """Return a chunk's gradients before the optimizer's step, in place."""
    found: dict[nn.Parameter, Gradient] = {
        one: main_gradient(one) for one in bare(chunk).parameters() if one.requires_grad
    }
    buffers = [*getattr(chunk, "buffers", [])] if not callable(getattr(chunk, "buffers", None)) else []  # of its DDP
    for one in buffers:
        if one.ddp_config.use_distributed_optimizer and one.data_parallel_group.size() > 1:
            found |= {parameter: _shard(one, parameter) for parameter in one.param_index_map if parameter in found}
    return found


def _shard(buffer: Any, parameter: Any) -> FlatShard:
    """Return this rank's shard of the parameter's gradient in ``buffer``: replicas split each of its buckets."""
    start, end, number = buffer.param_index_map[parameter]
    bucket, group = buffer.buckets[number], buffer.data_parallel_group
    size = bucket.grad_data.numel() // group.size()
    first = bucket.offset + size * group.rank()
    low, high = max(start, first), min(end, first + size)
    if low >= high:
        return FlatShard(None)
    return FlatShard(parameter.main_grad.detach().flatten()[low - start : high - start], low - start)


def divide(gradient: Gradient, scale: float) -> Gradient:
    """Divide a ``gradient`` by the loss ``scale``, as Megatron's optimizer will."""
    if gradient is None or scale == 1.0:
        return gradient
    if isinstance(gradient, FlatShard):
        return replace(gradient, part=None if gradient.part is None else gradient.part / scale)
    return gradient / scale


def scale_of(optimizer: Any) -> float:
    """Return the divisor of Megatron's optimizer, which should be the loss scale; 1 without one."""
    scale = getattr(optimizer, "get_loss_scale", None)
    nothing = not getattr(optimizer, "chained_optimizers", True)  # to step: such a one asks for a GPU
    return 1.0 if scale is None or nothing else float(scale())


@contextmanager
def _watching(optimizer: Any, losses: list[Tensor], drawn: Drawn, sight: Sight) -> Iterator[None]:
    """Note data, and losses before Megatron divides them in place; notify ``sight`` of the step and the norm."""
    place = core("pipeline_parallel.schedules")

    def note(calculate: Any, model: Any, output: Any, function: Any, config: Any, *more: Any, **named: Any) -> Any:
        def noting(*given: Any, **also: Any) -> Any:
            results = function(*given, **also)
            losses.append(whole_loss(results, config).detach().clone())
            return results

        return calculate(model, output, noting, config, *more, **named)

    def drawing(forward: Any, function: Any, data_iterator: Any, *more: Any, **named: Any) -> Any:
        return forward(function, drawn.noting(data_iterator), *more, **named)

    def norm_in(result: Any) -> Any:
        return result[1] if isinstance(result, tuple) and len(result) == 3 else None

    with ExitStack() as stack:
        stack.enter_context(around(place, "forward_step_calc_loss", note))
        stack.enter_context(around(place, "forward_step", drawing))
        if optimizer is not None:
            stack.enter_context(around(optimizer, "step", telling(sight, norm_in)))
        yield


def whole_of(reference: Callable[..., Any], forward_step: Any, microbatches: Sequence[Any]) -> Whole:
    """The whole model, which gives the loss by the ``forward_step``."""
    _check_forward_step(forward_step)

    def contract(model: WholeMegatron, every: Pairs) -> Contract:
        return Contract(loss_divisor=model.divisor([inputs for inputs, _ in every]))

    build = partial(WholeMegatron, reference, forward_step)
    return Whole(reference, build, [_inputs(one) for one in microbatches], None, contract, alone=as_before)


def _check_forward_step(forward_step: Any) -> None:
    MEGATRON.expect_function("forward_step", forward_step, "the function that Megatron's schedule is given")


def _inputs(microbatch: Any) -> tuple[Any, ...]:
    """Return the whole microbatch, as input of stages and reference."""
    return tuple(microbatch) if isinstance(microbatch, tuple | list) else (microbatch,)

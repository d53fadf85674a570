"""Megatron-core under ``whitebox.validate``: where its microbatches, losses, gradients, norm and names are.

A user's step makes its chunks as ever and trains inside ``observed``, which hands its own ``forward_step`` and
``data_iterator`` to Megatron's schedule. ``validate`` takes the reference from the same forward step. Nothing of
Megatron is imported before one of these is called.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.foreign.frameworks.drawn import Drawn
from pipeproof.foreign.frameworks.framework import Named, around
from pipeproof.foreign.frameworks.framework_step import FrameworkStep, Observation, Sight, observing, telling
from pipeproof.foreign.frameworks.megatron_chunk import fed
from pipeproof.foreign.frameworks.megatron_whole import (
    CHILD,
    MEGATRON,
    ForwardStep,
    MegatronError,
    WholeMegatron,
    bare,
    check_config,
    core,
    undivided,
)
from pipeproof.foreign.handed_back import FlatShard, Gradient
from pipeproof.foreign.validator import WhiteBox
from pipeproof.reference.accumulation import Accumulation

_TIED = "embedding.word_embeddings.weight"
_NO_STEP = "optimizer.step was not called in the block: pass the optimizer that takes the step, or None if none does"


def global_names(model: nn.Module) -> dict[str, str]:
    """What the parameters of a stage's model are called in the whole model, by their names here.

    Layers count from 0 on every stage; each knows its number in the whole model, from 1. The output layer of a model
    that shares its embeddings has a copy of them.
    """
    numbers = {
        prefix: number
        for prefix, module in model.named_modules()
        if re.search(r"\.layers\.\d+$", prefix) and isinstance(number := getattr(module, "layer_number", None), int)
    }
    tied = getattr(model, "share_embeddings_and_output_weights", False)
    return {name: _global(name, numbers, tied=tied) for name, _ in model.named_parameters(remove_duplicate=False)}


def _global(name: str, numbers: Mapping[str, int], *, tied: bool) -> str:
    if tied and name == "output_layer.weight":
        return _TIED
    for prefix, number in numbers.items():
        if name.startswith(f"{prefix}."):
            return f"{prefix.rpartition('.')[0]}.{number - 1}.{name.removeprefix(f'{prefix}.')}"
    return name


def load(chunks: Sequence[Any], reference: nn.Module) -> None:
    """Give the chunks the weights of ``reference``, which ``validate`` handed to the step.

    Raises ``MegatronError`` where the reference has no such parameter, or one of another shape.
    """
    for chunk in map(bare, chunks):
        names = global_names(chunk)
        MEGATRON.load(((f"{CHILD}.{names[name]}", one) for name, one in chunk.named_parameters()), reference)


def main_gradient(parameter: nn.Parameter) -> Tensor | None:
    """The gradient that Megatron's optimizer takes: where its DDP is, ``.grad`` is never it."""
    return getattr(parameter, "main_grad", parameter.grad)


def gradients_of(chunk: Any) -> dict[nn.Parameter, Gradient]:
    """The gradients of a chunk, as Megatron's optimizer is about to take them, where they are."""
    found: dict[nn.Parameter, Gradient] = {
        one: main_gradient(one) for one in bare(chunk).parameters() if one.requires_grad
    }
    return found | {one: shard for buffer in cut_up(chunk) for one, shard in _shards(buffer) if one in found}


def unscaled(gradients: Mapping[nn.Parameter, Gradient], scale: float) -> dict[nn.Parameter, Gradient]:
    """``gradients`` of a loss that was multiplied by ``scale``, divided by it as Megatron's optimizer will do."""
    return {one: gradient if scale == 1.0 else _divided(gradient, scale) for one, gradient in gradients.items()}


def _divided(gradient: Gradient, scale: float) -> Gradient:
    if isinstance(gradient, FlatShard):
        return replace(gradient, part=None if gradient.part is None else gradient.part / scale)
    return None if gradient is None else gradient / scale


def _in_step(gradient: Tensor | None, optimizer: Any) -> Gradient:
    """``gradient`` as the optimizer will take it."""
    return gradient if gradient is None else _divided(gradient, scale_of(optimizer))


def scale_of(optimizer: Any) -> float:
    """What Megatron's optimizer divides gradients by, which is to be the scale of the loss; 1 where it does not."""
    told = getattr(optimizer, "get_loss_scale", None)
    nothing = not getattr(optimizer, "chained_optimizers", True)  # to step: such a one asks for a GPU
    return 1.0 if told is None or nothing else float(told())


@dataclass(frozen=True)
class LossScale:
    """What Megatron's ``optimizer`` divides gradients by, as a scaler tells it."""

    optimizer: Any

    def get_scale(self) -> float:
        """The scale now."""
        return scale_of(self.optimizer)


def cut_up(chunk: Any) -> list[Any]:
    """The buffers of Megatron's DDP of which every replica has a part alone."""
    return [
        one
        for one in _buffers(chunk)
        if one.ddp_config.use_distributed_optimizer and one.data_parallel_group.size() > 1
    ]


def _buffers(chunk: Any) -> list[Any]:
    """Those in which Megatron's DDP has the gradients."""
    return [*getattr(chunk, "buffers", [])] if not callable(getattr(chunk, "buffers", None)) else []


def _shards(buffer: Any) -> Iterator[tuple[nn.Parameter, FlatShard]]:
    """What this rank has of the gradients in ``buffer``, every bucket of which is cut up."""
    ranks = buffer.data_parallel_group.size()
    for parameter, (start, end, number) in buffer.param_index_map.items():
        bucket = buffer.buckets[number]
        size = bucket.grad_data.numel() // ranks
        first = bucket.offset + size * buffer.data_parallel_group.rank()
        low, high = max(start, first), min(end, first + size)
        part = parameter.main_grad.detach().flatten()[low - start : high - start] if low < high else None
        yield parameter, FlatShard(part, max(low - start, 0) if low < high else 0)


def step_of(chunks: Any, optimizer: Any, *, draws: bool = False) -> FrameworkStep:
    """The step of these chunks, which ``optimizer`` takes, if there is one; ``draws``: it may have dropout.

    Raises ``MegatronError`` for what is not covered.
    """
    chunks = chunks_of(chunks)
    check_config(bare(chunks[0]).config, draws=draws)
    state, losses, drawn = core("parallel_state"), list[Tensor](), Drawn()
    rank, ranks = state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()
    stages = {rank + ranks * number: bare(chunk) for number, chunk in enumerate(chunks)}
    names = {stage: global_names(model) for stage, model in stages.items()}
    told = getattr(optimizer, "config", None)
    return FrameworkStep(
        stages,
        lambda stage, name: f"{CHILD}.{names[stage].get(name, name)}",
        lambda: unscaled({one: g for chunk in chunks for one, g in gradients_of(chunk).items()}, scale_of(optimizer)),
        lambda: losses,
        partial(_watching, optimizer, losses, drawn),
        unfinished=None if optimizer is None else MegatronError(_NO_STEP),
        drawn=drawn,
        max_norm=lambda: getattr(told, "clip_grad", None) or None,  # 0: it does not clip
        masters=bool(getattr(told, "bf16", False) or getattr(told, "fp16", False)),
        sum_of=lambda one: _in_step(main_gradient(one), optimizer),
        accumulation=_accumulation(stages.values()),
    )


def _accumulation(models: Iterable[nn.Module]) -> Accumulation | None:
    """What is in bf16 is added up in the type of ``main_grad``, in fp32 where Megatron is told to, also of replicas.

    ``finalize_model_grads`` reduces them, then the copies of a shared weight, and divides by tokens if it is told to.
    """
    models = list(models)
    held = [one for model in models for one in model.parameters() if hasattr(one, "main_grad")]
    if not held or held[0].dtype == torch.float32:
        return None
    config: Any = models[0].config
    return Accumulation(held[0].main_grad.dtype, late=bool(config.calculate_per_token_loss))


def chunks_of(chunks: Any) -> list[Any]:
    """One chunk or several, in a list. Raises ``MegatronError`` for what has no module in it."""
    found = list(chunks) if isinstance(chunks, list | tuple) else [chunks]
    if not found or not all(isinstance(one, nn.Module) for one in found):
        kinds = ", ".join(type(one).__name__ for one in found) or "an empty list"
        raise MegatronError(
            f"the model is {kinds}: expected the chunk that Megatron's schedule is given, or a list of them"
        )
    return found


@contextmanager
def _watching(optimizer: Any, losses: list[Tensor], drawn: Drawn, sight: Sight) -> Iterator[None]:
    """While this is open, note losses and data, tell ``sight`` that the optimizer is about to step, and the norm."""
    with ExitStack() as stack:
        stack.enter_context(_noted(losses, drawn))
        if optimizer is not None:
            stack.enter_context(around(optimizer, "step", telling(sight, _norm_in)))
        yield


def _norm_in(result: Any) -> Any:
    return result[1] if isinstance(result, tuple) and len(result) == 3 else None


@contextmanager
def _noted(losses: list[Tensor], drawn: Drawn) -> Iterator[None]:
    """While this is open, note what Megatron's schedules are given: every loss, before they divide it in place, and
    the data that a forward step draws."""
    place = core("pipeline_parallel.schedules")

    def noted(calculate: Any, model: Any, output: Any, function: Any, config: Any, *more: Any, **named: Any) -> Any:
        return calculate(model, output, _loss_noted(function, config, losses), config, *more, **named)

    def drawing(forward: Any, function: Any, data_iterator: Any, *more: Any, **named: Any) -> Any:
        return forward(function, drawn.noting(data_iterator), *more, **named)

    with around(place, "forward_step_calc_loss", noted), around(place, "forward_step", drawing):
        yield


def _loss_noted(function: Callable[..., Any], config: Any, losses: list[Tensor]) -> Callable[..., Any]:
    def noted(*given: Any, **more: Any) -> Any:
        results = function(*given, **more)
        losses.append(undivided(results, config).detach().clone())
        return results

    return noted


class Observed(Observation):
    """What a step shows. ``forward_step`` and ``data_iterator`` are what to hand to Megatron's schedule."""

    def __init__(self, step: FrameworkStep, data_iterator: Any, forward_step: ForwardStep) -> None:
        super().__init__(step, data_iterator)
        self.forward_step = forward_step


@contextmanager
def observed(
    chunks: Any, forward_step: ForwardStep, microbatches: Sequence[Any], reference: nn.Module, optimizer: Any = None
) -> Iterator[Observed]:
    """Observe the step that is trained inside this, from the weights of ``reference``.

    chunks: as Megatron's schedule is given them. optimizer: Megatron's, if the step calls it. Then its gradients are
    noted when it is called, and the norm when it returns. Without it, gradients are what there is at ``handed_back``.
    Raises ``MegatronError`` for what is not covered.
    """
    chunks = chunks_of(chunks)
    step = step_of(chunks, optimizer)
    load(chunks, reference)
    if hasattr(optimizer, "reload_model_params"):
        optimizer.reload_model_params()
    iterators = [iter(microbatches) for _ in chunks]
    seen = Observed(step, iterators if len(chunks) > 1 else iterators[0], forward_step)
    with ExitStack() as stack:
        for model in step.stages.values():
            stack.enter_context(fed(model))
        stack.enter_context(observing(seen, step))
        yield seen


def check_forward_step(forward_step: Any) -> None:
    """Raise ``MegatronError`` where it is no function."""
    MEGATRON.check_function("forward_step", forward_step, "the function that Megatron's schedule is given")


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
    """The verdict on ``step(reference, microbatches)``, which trains Megatron's chunks inside ``observed``.

    reference: builds the whole model, with a config for one stage. forward_step: as Megatron's schedule is given it.
    microbatches: tuples of tensors, as the data iterator gives them. ranks: how many, all of one pipeline; or
    ``{"pp": 2, "dp": 2}``. optimizer: makes the reference's, as for ``whitebox.validate``. whitebox: whose ranks to
    use, as pytest's fixture; None: own ones.

    Raises ``MegatronError``, and what ``whitebox.validate`` raises.
    """
    core()
    check_forward_step(forward_step)
    whole = Named(reference, partial(WholeMegatron, reference, forward_step))
    data = [tuple(one) if isinstance(one, tuple | list) else (one,) for one in MEGATRON.listed(microbatches)]
    return MEGATRON.judge(whitebox)(
        Named(step, partial(_left_as_it_was, step)),
        reference=whole,
        microbatches=data,
        ranks=MEGATRON.mesh(ranks),
        contract=Contract(loss_divisor=_divisor(whole, data)),
        optimizer=optimizer,
    )


def _divisor(build: Callable[[], WholeMegatron], microbatches: Sequence[Any]) -> float | None:
    """What losses are divided by; None where the reference cannot tell, which the verdict will say."""
    try:
        return build().divisor(microbatches) if microbatches else None
    except MegatronError:
        raise
    except Exception:  # no one type: it is the user's code that runs
        return None


def _left_as_it_was(step: Callable[[Any, list[Any]], Any], model: Any, microbatches: list[Any]) -> Any:
    """Run a step, and leave Megatron's state as it was, so that the next layout can be another."""
    state = core("parallel_state")
    before = state.model_parallel_is_initialized()
    try:
        return step(model, microbatches)
    finally:
        if not before:
            state.destroy_model_parallel()

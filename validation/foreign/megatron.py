"""Megatron-core under ``whitebox.validate``: where its microbatches, losses, gradients, norm and names are.

A user's step makes its chunks as ever and trains inside ``observed``, which hands its own ``forward_step`` and
``data_iterator`` to Megatron's schedule. ``validate`` takes the reference from the same forward step. Nothing of
Megatron is imported before one of these is called.
"""

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeproof.foreign.handed_back import FlatShard, HandedBack
from pipeproof.foreign.reference_run import WhiteBoxError, name_of
from pipeproof.foreign.validator import WhiteBox
from pipeproof.foreign.validator import validate as validated
from pipeproof.judging.verdict import Verdict
from pipeproof.observers.watching import watch

ForwardStep = Callable[..., tuple[Any, Any]]  # of a data iterator and a chunk: its output, and a function of that
KNOWN = ("0.16",)
_TIED = "embedding.word_embeddings.weight"
_CHILD = "model"  # what the reference calls the whole model


class MegatronError(WhiteBoxError):
    """Megatron is missing, of a version that is not known, or used in a way that is not covered."""


def core(name: str = "") -> ModuleType:
    """Megatron-core, or its module ``name``. Raises ``MegatronError``."""
    try:
        package = importlib.import_module("megatron.core")
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.core"):
            raise
        raise MegatronError("megatron-core is not installed: pip install --no-deps megatron-core==0.16.1") from None
    found = getattr(package, "__version__", "of no version")
    if not found.startswith(tuple(f"{one}." for one in KNOWN)):
        raise MegatronError(f"megatron-core is {found}: this pipeproof knows {', '.join(KNOWN)}, so install one of it")
    return importlib.import_module(f"megatron.core.{name}") if name else package


def bare(chunk: Any) -> Any:
    """The model in ``chunk``, without DDP and conversions around it."""
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    return chunk


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
    return {name: _global(name, numbers, tied=tied) for name, _ in model.named_parameters()}


def _global(name: str, numbers: Mapping[str, int], *, tied: bool) -> str:
    if tied and name == "output_layer.weight":
        return _TIED
    for prefix, number in numbers.items():
        if name.startswith(f"{prefix}."):
            return f"{prefix.rpartition('.')[0]}.{number - 1}.{name.removeprefix(f'{prefix}.')}"
    return name


def load(chunks: Sequence[Any], reference: nn.Module) -> None:
    """Give the chunks the weights of ``reference``, which ``validate`` handed to the step."""
    weights = dict(reference.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for chunk in map(bare, chunks):
            names = global_names(chunk)
            for name, parameter in chunk.named_parameters():
                weight = weights.get(f"{_CHILD}.{names[name]}")
                if weight is not None and weight.shape == parameter.shape:
                    parameter.copy_(weight)


def main_gradient(parameter: nn.Parameter) -> Tensor | None:
    """The gradient that Megatron's optimizer takes: where its DDP is, ``.grad`` is never it."""
    return getattr(parameter, "main_grad", parameter.grad)


def gradients_of(chunk: Any) -> dict[nn.Parameter, Tensor | FlatShard | None]:
    """The gradients of a chunk, as Megatron's optimizer is about to take them: copies."""
    found = {one: main_gradient(one) for one in bare(chunk).parameters() if one.requires_grad}
    copies = {one: None if gradient is None else gradient.detach().clone() for one, gradient in found.items()}
    shards = {one: shard for buffer in _buffers(chunk) for one, shard in _shards(buffer) if one in copies}
    return copies | shards


def _buffers(chunk: Any) -> list[Any]:
    """Those in which Megatron's DDP has the gradients."""
    return [*getattr(chunk, "buffers", [])] if not callable(getattr(chunk, "buffers", None)) else []


def _shards(buffer: Any) -> Iterator[tuple[nn.Parameter, FlatShard]]:
    """What this rank has of the gradients in ``buffer``, where a distributed optimizer cuts every bucket up."""
    ranks = buffer.data_parallel_group.size()
    if not buffer.ddp_config.use_distributed_optimizer or ranks == 1:
        return
    for parameter, (start, end, number) in buffer.param_index_map.items():
        bucket = buffer.buckets[number]
        size = bucket.grad_data.numel() // ranks
        first = bucket.offset + size * buffer.data_parallel_group.rank()
        low, high = max(start, first), min(end, first + size)
        part = parameter.main_grad.detach().flatten()[low - start : high - start].clone() if low < high else None
        yield parameter, FlatShard(part, max(low - start, 0) if low < high else 0)


@contextmanager
def _routed(model: Any) -> Iterator[None]:
    """While this is open, what the stage before sent comes into ``model`` as an argument too, where it is watched."""
    given: list[Any] = [None]
    take, forward = model.set_input_tensor, model.forward

    @wraps(take)
    def set_input_tensor(tensor: Any) -> None:
        given[0] = tensor
        take(tensor)

    @wraps(forward)
    def without(*arguments: Any, stage_input: Any = None, **named: Any) -> Any:
        return forward(*arguments, **named)

    def beside(_: nn.Module, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return arguments, {**named, "stage_input": given[0]}

    model.set_input_tensor, model.forward = set_input_tensor, without
    hook = model.register_forward_pre_hook(beside, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
        del model.set_input_tensor, model.forward


@dataclass
class Observation:
    """What a step shows on a rank. ``forward_step`` and ``data_iterator`` are what to hand to Megatron's schedule."""

    chunks: Sequence[Any]
    forward_step: ForwardStep
    data_iterator: Any
    losses: list[Tensor] = field(default_factory=list)
    norm: Any = None
    _gradients: dict[nn.Parameter, Tensor | FlatShard | None] | None = None

    def handed_back(self) -> HandedBack:
        """What ``whitebox.validate`` wants to have back of the step."""
        models = [bare(chunk) for chunk in self.chunks]
        names = [global_names(model) for model in models]

        def global_name(name: str, rank: int, chunk: int) -> str:
            return f"{_CHILD}.{names[chunk][name]}"

        gradients = self._taken() if self._gradients is None else self._gradients
        return HandedBack(models, self.losses or None, self.norm, gradients=gradients, names=global_name)

    def _taken(self) -> dict[nn.Parameter, Tensor | FlatShard | None]:
        return {one: gradient for chunk in self.chunks for one, gradient in gradients_of(chunk).items()}

    def noting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """An optimizer's ``step``, noting the gradients that it is given and the norm that it tells."""

        @wraps(step)
        def noted(*arguments: Any, **named: Any) -> Any:
            self._gradients = self._taken()
            result = step(*arguments, **named)
            if isinstance(result, tuple) and len(result) == 3:
                _, self.norm, _ = result
            return result

        return noted


@contextmanager
def observed(
    chunks: Any, forward_step: ForwardStep, microbatches: Sequence[Any], reference: nn.Module, optimizer: Any = None
) -> Iterator[Observation]:
    """Observe the step that is trained inside this, from the weights of ``reference``.

    chunks: as Megatron's schedule is given them. optimizer: Megatron's, if the step calls it. Then its gradients are
    noted when it is called, and the norm when it returns. Without it, gradients are what there is at ``handed_back``.
    Raises ``MegatronError`` for what is not covered.
    """
    chunks = list(chunks) if isinstance(chunks, list | tuple) else [chunks]
    check_config(bare(chunks[0]).config)
    load(chunks, reference)
    if hasattr(optimizer, "reload_model_params"):
        optimizer.reload_model_params()
    iterators = [iter(microbatches) for _ in chunks]
    seen = Observation(chunks, forward_step, iterators if len(chunks) > 1 else iterators[0])
    seen.forward_step = _losses_noted(forward_step, seen.losses)
    with ExitStack() as stack:
        for model in map(bare, chunks):
            stack.enter_context(_routed(model))
            watch(model)
        if optimizer is not None:
            optimizer.step = seen.noting(optimizer.step)
            stack.callback(delattr, optimizer, "step")
        yield seen


def _losses_noted(forward_step: ForwardStep, losses: list[Tensor]) -> ForwardStep:
    """``forward_step``, noting every loss before Megatron divides it in place."""

    @wraps(forward_step)
    def noted(*arguments: Any, **named: Any) -> tuple[Any, Any]:
        output, function = forward_step(*arguments, **named)
        config = bare(arguments[1]).config

        def loss_noted(*given: Any, **more: Any) -> Any:
            results = function(*given, **more)
            losses.append(undivided(results, config).detach().clone())
            return results

        return output, loss_noted

    return noted


_COVERED = {
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "num_moe_experts": None,
    "mtp_num_layers": None,
    "fp16": False,
    "bf16": False,
}


def check_config(config: Any) -> None:
    """Raise ``MegatronError`` for what would be judged wrongly."""
    for name, value in _COVERED.items():
        given = getattr(config, name, value)
        if given != value:
            raise MegatronError(f"{name} is {given}: pipeproof.megatron covers {value} only; set it so for the check")


def undivided(results: Sequence[Any], config: Any) -> Tensor:
    """A microbatch's loss, as the convention of a loss function with so many results has it.

    Of two, the first. Of three, the mean over the second, its tokens, unless the gradients are divided by all later.
    """
    loss: Tensor = results[0]
    if len(results) == 3 and not config.calculate_per_token_loss:
        return loss / torch.clamp(results[1], min=1)
    return loss


class Whole(nn.Module):
    """The whole model; called with all of a microbatch, it gives the loss."""

    def __init__(self, build: Callable[[], nn.Module], forward_step: ForwardStep) -> None:
        super().__init__()
        with alone():
            self.model = build()
        self._forward_step = forward_step
        config: Any = getattr(bare(self.model), "config", None)
        if (stages := getattr(config, "pipeline_model_parallel_size", None)) != 1:
            raise MegatronError(f"the reference is built with pipeline_model_parallel_size {stages}: expected 1")
        check_config(config)

    def results(self, *microbatch: Tensor) -> Sequence[Any]:
        """What the loss function makes of a microbatch."""
        with alone():
            output, function = self._forward_step(iter([microbatch]), self.model)
            results: Sequence[Any] = function(output)
        return results

    def forward(self, *microbatch: Tensor) -> Tensor:
        return undivided(self.results(*microbatch), bare(self.model).config)

    def divisor(self, microbatches: Sequence[Any]) -> float:
        """What losses are divided by: their number, or where the gradients are divided by tokens, that of all."""
        if not bare(self.model).config.calculate_per_token_loss:
            return len(microbatches)
        with torch.no_grad():
            counts = [self.results(*one)[1:-1] for one in microbatches]
        if not all(counts):
            raise MegatronError("calculate_per_token_loss needs a loss function of three results: loss, tokens, report")
        return float(sum(count.item() for (count,) in counts))


@contextmanager
def alone() -> Iterator[None]:
    """While this is open, Megatron believes that there is one rank."""
    state = core("parallel_state")
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    kept = {name: value for name, value in vars(state).items() if re.fullmatch(r"_[A-Z_]+", name)}
    vars(state).update({name: None for name in kept} | _of_one(kept))
    try:
        yield
    finally:
        vars(state).update(kept)
        if own:
            dist.destroy_process_group()


_ones: dict[int, tuple[Any, Any]] = {}  # by the id of a default group, that and a group of this rank alone


def _of_one(names: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's groups and their ranks, all of this rank alone."""
    whole = dist.group.WORLD
    if id(whole) not in _ones:
        _ones.clear()
        _ones[id(whole)] = whole, dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    _, group = _ones[id(whole)]
    groups = {name: group for name in names if re.search(r"_GROUP(_|$)", name)}
    ranks = {name: [dist.get_rank()] for name in names if re.search(r"_RANKS(_|$)", name)}
    return groups | ranks | {"_GLOBAL_MEMORY_BUFFER": core("utils").GlobalMemoryBuffer()}


def validate(
    step: Callable[[Any, list[Any]], Any],
    *,
    reference: Callable[[], nn.Module],
    forward_step: ForwardStep,
    microbatches: Sequence[Any],
    pp: int,
    dp: int = 1,
    optimizer: Callable[[nn.Module], Optimizer] | None = None,
    timeout_s: float | None = None,
    whitebox: WhiteBox | None = None,
) -> Verdict:
    """The verdict on ``step(reference, microbatches)``, which trains Megatron's chunks inside ``observed``.

    reference: builds the whole model, with a config for one stage. forward_step: as Megatron's schedule is given it.
    microbatches: tuples of tensors, as the data iterator gives them. pp, dp: how many ranks, as Megatron counts them.
    """
    core()
    whole = _Build(reference, forward_step)
    data = [tuple(one) if isinstance(one, tuple | list) else (one,) for one in microbatches]
    run = validated if whitebox is None else whitebox.validate
    return run(
        _Step(step),
        reference=whole,
        microbatches=data,
        ranks={"pp": pp, "dp": dp},
        loss_divisor=_divisor(whole, data),
        optimizer=optimizer,
        timeout_s=timeout_s,
    )


def _divisor(build: Callable[[], Whole], microbatches: Sequence[Any]) -> float | None:
    """What losses are divided by; None where the reference cannot tell, which the verdict will say."""
    try:
        return build().divisor(microbatches) if microbatches else None
    except MegatronError:
        raise
    except Exception:  # no one type: it is the user's code that runs
        return None


@dataclass(frozen=True)
class _Build:
    """Makes the reference; called as the user's function is."""

    build: Callable[[], nn.Module]
    forward_step: ForwardStep

    @property
    def __name__(self) -> str:
        return name_of(self.build)

    def __call__(self) -> Whole:
        return Whole(self.build, self.forward_step)


@dataclass(frozen=True)
class _Step:
    """A step that leaves Megatron's state as it was, so that the next layout can be another."""

    step: Callable[[Any, list[Any]], Any]

    @property
    def __name__(self) -> str:
        return name_of(self.step)

    def __call__(self, model: Any, microbatches: list[Any]) -> Any:
        state = core("parallel_state")
        before = state.model_parallel_is_initialized()
        try:
            return self.step(model, microbatches)
        finally:
            if not before:
                state.destroy_model_parallel()

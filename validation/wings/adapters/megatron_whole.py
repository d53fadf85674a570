"""The reference for a Megatron-core step: the whole model on one rank, or a chunk as a stage, by one forward step."""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof.core.observe.per_rank_globals import belongs_to_rank
from pipeproof.wings.adapters import on_cpu
from pipeproof.wings.adapters.framework import AdapterError, Framework

ForwardStep = Callable[..., tuple[Any, Any]]  # of a data iterator and a chunk: its output, and a function of that


MEGATRON = Framework(
    "megatron-core",
    "megatron.core",
    ("0.16",),
    "pip install --no-deps megatron-core==0.16.1",
    child="model",
    shim=on_cpu.megatron,
)
core = MEGATRON.module


def bare(chunk: Any) -> Any:
    """The model in ``chunk``, without DDP and conversions around it."""
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    return chunk


_COVERED = {
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "num_moe_experts": None,
    "mtp_num_layers": None,
    "fp16": False,
    "fp8": None,
    "fp4": None,
}
# Megatron's own default is 0.1: stages would draw other numbers than the whole model.
_STEADY = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def check_config(config: Any, *, draws: bool = False) -> None:
    """Raise ``AdapterError`` for unsupported use; ``draws``: random numbers can be repeated."""
    MEGATRON.covers(vars(config), _COVERED if draws else _COVERED | _STEADY)


def whole_loss(results: Sequence[Any], config: Any) -> Tensor:
    """Return a microbatch's loss, by Megatron's convention for the number of results.

    Two: the first. Three: the mean over the second, its tokens, unless gradients are later divided by all tokens.
    """
    loss: Tensor = results[0]
    if len(results) == 3 and not config.calculate_per_token_loss:
        return loss / torch.clamp(results[1], min=1)
    return loss


class WholeMegatron(nn.Module):
    """The whole model; called with a full microbatch, it returns the loss."""

    def __init__(self, build: Callable[[], nn.Module], forward_step: ForwardStep) -> None:
        super().__init__()
        with pretend_alone():
            called = MEGATRON.build(build)
            config: Any = getattr(bare(called), "config", None)
            if bf16 := getattr(config, "bf16", False):  # a wrapper casts weights, inputs and outputs
                wraps = core("transformer.module").Float16Module
                called = called if isinstance(called, wraps) else wraps(config, called)
        self.model: nn.Module = bare(called) if bf16 else called
        self._called = (called,)  # in a tuple, so that wrappers do not change parameter names
        self._forward_step = forward_step
        if (stages := getattr(config, "pipeline_model_parallel_size", None)) != 1:
            raise AdapterError(f"the reference is built with pipeline_model_parallel_size {stages}: expected 1")
        check_config(config)

    def results(self, *microbatch: Tensor) -> Sequence[Any]:
        """Return the loss function's results on a microbatch."""
        with pretend_alone():
            output, function = self._forward_step(iter([microbatch]), *self._called)
            results: Sequence[Any] = function(output)
        return results

    def forward(self, *microbatch: Tensor) -> Tensor:
        return whole_loss(self.results(*microbatch), bare(self.model).config)

    def divisor(self, microbatches: Sequence[Any]) -> float:
        """Return the divisor of losses: microbatches, or all tokens if gradients are divided by tokens."""
        if not bare(self.model).config.calculate_per_token_loss:
            return len(microbatches)
        with torch.no_grad():
            counts = [self.results(*one)[1:-1] for one in microbatches]
        if not all(counts):
            raise AdapterError("calculate_per_token_loss needs a loss function of three results: loss, tokens, report")
        total = float(sum(count.item() for (count,) in counts))
        if not total:
            raise AdapterError(
                "the loss function counts 0 tokens in all microbatches: give some of which a label is not masked"
            )
        return total


@contextmanager
def pretend_alone() -> Iterator[None]:
    """Make Megatron see a single rank while open."""
    state = core("parallel_state")
    own = not dist.is_initialized()
    if own:
        store = dist.HashStore()  # type: ignore[attr-defined]  # it is public
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    kept = {name: value for name, value in vars(state).items() if re.fullmatch(r"_[A-Z_]+", name)}
    vars(state).update({name: None for name in kept} | _of_one(kept))
    try:
        with _draws_kept():
            yield
    finally:
        vars(state).update(kept)
        if own:
            _ones.clear()
            dist.destroy_process_group()


@contextmanager
def _draws_kept() -> Iterator[None]:
    """Keep Megatron's later random numbers unchanged by seeds set in this block."""
    place = core("tensor_parallel.random")
    trackers = {name: value for name, value in vars(place).items() if name.startswith("_CUDA_RNG_STATE_TRACKER")}
    tracker = trackers.get("_CUDA_RNG_STATE_TRACKER")
    kept = {} if tracker is None else {name: copy.copy(value) for name, value in vars(tracker).items()}
    try:
        yield
    finally:
        vars(place).update(trackers)
        if tracker is not None:
            vars(tracker).update(kept)


_ones: dict[int, tuple[Any, Any]] = {}  # by the id of a default group, that and a group of this rank alone
belongs_to_rank(__name__, "_ones", fresh=lambda _: {})


def _of_one(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron's groups and their ranks, each with this rank alone."""
    whole = dist.group.WORLD
    if id(whole) not in _ones:
        _ones.clear()
        _ones[id(whole)] = whole, dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    _, group = _ones[id(whole)]
    groups = {name: group for name in names if re.search(r"_GROUP(_|$)", name)}
    ranks = {name: [dist.get_rank()] for name in names if re.search(r"_RANKS(_|$)", name)}
    return groups | ranks | {"_GLOBAL_MEMORY_BUFFER": core("utils").GlobalMemoryBuffer()}


def forget_group() -> None:
    """Drop the group of this rank alone, before the job goes on."""
    for _, group in _ones.values():
        with suppress(ValueError):  # the job has let go of all groups
            dist.destroy_process_group(group)
    _ones.clear()


@contextmanager
def as_before(_: object) -> Iterator[None]:
    """Restore Megatron's state on exit, to allow another layout next."""
    state = core("parallel_state")
    before = state.model_parallel_is_initialized()
    try:
        yield
    finally:
        if not before:
            state.destroy_model_parallel()


_beside: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()  # the input set beside each model


class _Fed:
    """A Megatron model that gets the previous stage's output by a setter, and here as an argument too."""

    def set_input_tensor(self: Any, tensor: Any) -> None:
        _beside[self] = tensor[0] if isinstance(tensor, list) else tensor
        super().set_input_tensor(tensor)  # type: ignore[misc]  # of the model

    def __call__(self: Any, *arguments: Any, **named: Any) -> Any:
        return super().__call__(*arguments, **{"stage_input": _beside.get(self)} | named)  # type: ignore[misc]

    def forward(self: Any, *arguments: Any, stage_input: Any = None, **named: Any) -> Any:
        if stage_input is not _beside.get(self):  # a rerun, with its original inputs
            self.set_input_tensor(stage_input)
        return super().forward(*arguments, **named)  # type: ignore[misc]


@cache
def _fed_kind(kind: type) -> type:
    return type(kind.__name__, (_Fed, kind), {"__module__": kind.__module__})


@contextmanager
def fed(chunks: Sequence[Any]) -> Iterator[None]:
    """Pass the previous stage's output to models in ``chunks`` as an argument, for the observer, while open."""
    kinds = {bare(chunk): type(bare(chunk)) for chunk in chunks}
    for model, kind in kinds.items():
        model.__class__ = _fed_kind(kind)  # type: ignore[arg-type]  # a class can be hashed
    try:
        yield
    finally:
        for model, kind in kinds.items():
            model.__class__ = kind
            _beside.pop(model, None)


class _Giving(nn.Module):
    """Replaces a chunk with known output: returns it for any input."""

    def __init__(self, config: Any, output: Tensor) -> None:
        super().__init__()
        self.config, self._output = config, output

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self._output


class LossOf:
    """The undivided loss of the last of ``chunks`` on a microbatch, by the job's own ``forward_step``."""

    def __init__(self, chunks: Sequence[Any], forward_step: ForwardStep) -> None:
        self._config: Any = bare(chunks[-1]).config
        self._forward_step = forward_step
        kind, chunk = core("transformer.module").Float16Module, chunks[-1]
        while isinstance(chunk, nn.Module) and not isinstance(chunk, kind):
            chunk = getattr(chunk, "module", None)
        self._widens = chunk is not None  # a wrapper casts 16-bit outputs to fp32

    def __call__(self, output: Tensor, microbatch: Any) -> Tensor:
        given = output.float() if self._widens and output.dtype in (torch.bfloat16, torch.float16) else output
        made, function = self._forward_step(iter([microbatch]), _Giving(self._config, given))
        return whole_loss(function(made), self._config)

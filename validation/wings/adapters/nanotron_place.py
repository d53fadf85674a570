"""nanotron's environment: its package, its ranks' work inside a forward, and a context with a single rank."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import signature
from types import CellType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from torch import Tensor, nn

from pipeproof.core.observe.fence import Fence
from pipeproof.core.observe.hook import Hook
from pipeproof.wings.adapters import on_cpu
from pipeproof.wings.adapters.framework import AdapterError, Framework, around, launch_environment
from pipeproof.wings.adapters.step import Sight

NANOTRON = Framework(
    "nanotron",
    "nanotron",
    ("0.4",),
    "pip install --no-deps git+https://github.com/huggingface/nanotron && "
    "pip install dacite datasets einops psutil pyyaml transformers triton",
    child="model",
    shim=on_cpu.nanotron,
)


def core(name: str = "") -> ModuleType:
    """Import nanotron, or the module ``name`` in it. Raises ``AdapterError`` on failure."""
    try:
        return NANOTRON.module(name)
    except ImportError as error:
        raise AdapterError(f"nanotron does not import ({error}): PyPI has that of 2024; {NANOTRON.install}") from None


def bare(model: Any) -> Any:
    """The model in ``model``, without torch's DDP around it."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


class NanotronStage(nn.Module):
    """This rank's part of a model whose blocks receive and send inside its forward.

    It shows observers a stage with input and output tensors. It is called after a forward with ``taken``, the
    microbatch's local tensors and the previous stage's output, and returns ``made``: the output for the next stage, or
    the loss.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self.taken: list[Tensor] = []
        self.made: list[Tensor] = []
        self.fence = Fence()

    def require_observed(self, losses: list[Tensor]) -> list[Tensor]:
        """Return ``losses``; raises ``AdapterError`` if some forwards went unobserved."""
        if self.fence.broken:
            raise AdapterError(f"a forward of the model was not observed: {self.fence.broken}")
        return losses

    def forward(self, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.made)

    @contextmanager
    def noting(self, losses: list[Tensor]) -> Iterator[None]:
        """Call this stage after every forward of the model, and extend ``losses``, while open."""
        place = core("parallel.pipeline_parallel.block")

        def note_received(take: Any, *given: Any, **named: Any) -> Any:
            tensor = take(*given, **named)
            self.taken.append(tensor)
            return tensor

        def note_sent(send: Any, tensor: Tensor, *given: Any, **named: Any) -> Any:
            self.made.append(tensor)
            return send(tensor, *given, **named)

        def begins(_: nn.Module, __: Any, named: Mapping[str, Any]) -> None:
            self.taken = [named[name] for name in sorted(named) if isinstance(named[name], Tensor)]
            self.made = []

        def note_end(_: nn.Module, __: Any, ___: Any, output: Any) -> None:
            loss = output["loss"] if isinstance(output, Mapping) else output
            if isinstance(loss, Tensor):
                losses.append(loss.detach().clone())
                self.made.append(loss)
            self(*self.taken)
            self.taken, self.made = [], []

        with ExitStack() as stack:
            stack.enter_context(around(place, "recv_from_pipeline_state_buffer", note_received))
            stack.enter_context(around(place, "send_to_pipeline_state_buffer", note_sent))
            before, after = (Hook(self.model, self.fence.around(one)) for one in (begins, note_end))
            stack.callback(self.model.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(self.model.register_forward_hook(after, with_kwargs=True).remove)
            yield


@contextmanager
def clipping_noted(complete: Callable[[], None], bounds: list[float], sight: Sight) -> Iterator[None]:
    """Note the first norm of nanotron's clipping and its bound, while open.

    Scripts import the function by name, so the replacement goes inside torch's wrapper around it.
    """
    cell = _inside(core("optim.clip_grads").clip_grad_norm)
    clip = cell.cell_contents
    bound = signature(clip).bind

    @wraps(clip)
    def note(*given: Any, **named: Any) -> Any:
        complete()
        norm = clip(*given, **named)
        if not bounds:
            bounds.append(float(bound(*given, **named).arguments["max_norm"]))
            sight.norm(norm)
        return norm

    cell.cell_contents = note
    try:
        yield
    finally:
        cell.cell_contents = clip


def _inside(function: Any) -> CellType:
    """Return the cell in which torch's decorator keeps the wrapped function."""
    names = function.__code__.co_freevars
    if "func" not in names:
        raise AdapterError("clip_grad_norm is not wrapped by torch's record_function: this pipeproof knows no other")
    cell: CellType = function.__closure__[names.index("func")]
    return cell


@contextmanager
def as_launched(_: object = None) -> Iterator[None]:
    """Imitate a launcher for one step while open; nanotron's process-wide state lasts for this step alone."""
    ranks, states = core("distributed"), core("parallel.pipeline_parallel.state")
    kinds = (states.PipelineBatchState, states.PipelineTrainBatchState, states.PipelineEvalBatchState)
    queues = [one for kind in kinds for one in vars(kind).values() if isinstance(one, deque)]

    def forget() -> None:
        for cached in (ranks.get_rank, ranks.get_global_rank):
            cached.cache_clear()
        for queue in queues:
            queue.clear()

    forget()
    try:
        with launch_environment():
            yield
    finally:
        forget()


_ONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)  # a group of this rank alone, with nanotron's queries


def _gather(into: list[Any], what: Any, **_: Any) -> None:
    into[:] = [what]


def _nothing(*_: Any, async_op: bool = False, **__: Any) -> Any:
    return SimpleNamespace(wait=lambda: None) if async_op else None


_OF_ONE: dict[str, Callable[..., Any]] = {
    "is_initialized": lambda: True,
    "get_backend": lambda *_: "gloo",
    "get_rank": lambda *_, **__: 0,
    "get_world_size": lambda *_, **__: 1,
    "get_global_rank": lambda *_, **__: 0,
    "get_global_ranks": lambda *_, **__: (0,),
    "get_process_group_ranks": lambda *_, **__: [0],
    "new_group": lambda *_, **__: _ONE,
    "all_gather_object": _gather,
    **dict.fromkeys(("all_reduce", "all_reduce_coalesced", "barrier", "broadcast"), _nothing),
}


@contextmanager
def pretend_alone() -> Iterator[None]:
    """Make nanotron see a single rank while open, without a group."""
    place = core("distributed")
    with ExitStack() as stack:
        for name, function in _OF_ONE.items():
            stack.enter_context(mock.patch.object(place, name, function))
        default = SimpleNamespace(
            distributed_c10d=SimpleNamespace(_get_default_group=lambda: _ONE), is_initialized=lambda: True
        )
        stack.enter_context(mock.patch.object(core("logging.base"), "torch_dist", default))
        yield


def context_of_one() -> Any:
    """Build a ``ParallelContext`` for one rank."""
    kind = core("parallel.context").ParallelContext
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with mock.patch.dict(os.environ, one), mock.patch.object(kind, "set_device"):
        return kind(1, 1, 1)

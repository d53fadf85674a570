"""All private names of torch behind the simulated world.

Tested with torch 2.13, the oldest supported, and 2.14. Each has one stated purpose, so that an error with another torch
names the missing part.
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from threading import Thread, current_thread
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler as profilers
from torch.distributed import c10d_logger, device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.profiler import profiler
from torch.utils import checkpoint

from pipeproof.core.observe import posted_messages
from pipeproof.core.observe.per_rank_globals import belongs_to_rank, once_imported
from pipeproof.pipeline import waiting
from pipeproof.wings.simulated.engine.scheduler import NotSimulated

_NAMES = {  # fields in torch.distributed's record of groups
    "default_pg": None,
    "group_count": 0,
    **{name: dict for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")},
    "pg_coalesce_state": dict,
    "comms": list,
}
_HOOKS = [name for name in vars(modules) if name.startswith("_global_") and isinstance(vars(modules)[name], dict)]
_OPTIMIZER_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_BATCH = "_check_p2p_op_list"  # what batch_isend_irecv calls first
_LOGGED = "_get_msg_dict"  # facts about a call that raised, such as NCCL's version, which may be absent
_PROFILED = "_get_distributed_info"  # in a profile, such as NCCL's version
_RECORDS = "_maybe_attach_flight_recorder"  # since torch 2.15, of what a backend in C++ does
_GLOO, _NCCL = "ProcessGroupGloo", "ProcessGroupNCCL"
_BEGIN, _END = ("_prepare_profiler", "_enable_profiler"), "_disable_profiler"
SWITCHES = [  # of attention: getter and setter
    (getattr(torch._C, f"_get_{name}_sdp_enabled"), getattr(torch._C, f"_set_sdp_use_{name}"))
    for name in ("flash", "mem_efficient", "math", "cudnn")
]
MESSAGES = ("send", "recv", "recv_anysource")
P = ParamSpec("P")
T = TypeVar("T")


belongs_to_rank(
    c10d,
    "_world",
    fresh=lambda _: SimpleNamespace(**{name: make() if callable(make) else make for name, make in _NAMES.items()}),
)
belongs_to_rank(modules, *_HOOKS, fresh=lambda hooks: hooks.copy())
belongs_to_rank(optimizers, *_OPTIMIZER_HOOKS, fresh=lambda hooks: hooks.copy())
belongs_to_rank(os.environ, "_data", fresh=lambda variables: variables.copy())  # such as RANK
belongs_to_rank(torch.nn.Module, "zero_grad", fresh=lambda method: method)
belongs_to_rank(torch.optim.Optimizer, "zero_grad", fresh=lambda method: method)
belongs_to_rank(dist.ProcessGroup, *MESSAGES, fresh=lambda method: method)
belongs_to_rank(dist.Work, "wait", fresh=lambda method: method)
belongs_to_rank(checkpoint, "_enable_checkpoint_early_stop", fresh=lambda early: early)
belongs_to_rank(waiting, "_note", fresh=lambda _: None)
belongs_to_rank(
    posted_messages,
    *("_posted", "_messages", "_parting", "_ways", "_from_any", "_sent", "_received", "_fence", "_standing", "_done"),
    fresh=lambda noted: type(noted)(),
)


_numbers = itertools.count()
_number = next(_numbers)  # number of the running rank, unique over runs
belongs_to_rank(__name__, "_number", fresh=lambda _: next(_numbers))


def _dtensors() -> None:
    """Separate DTensor's process-wide state for each rank."""
    from torch.distributed.tensor import DTensor, _random
    from torch.distributed.tensor._dispatch import OpDispatcher

    handlers = "_custom_op_handlers"  # to which loss_parallel adds while it is open
    belongs_to_rank(DTensor._op_dispatcher, handlers, fresh=lambda _: vars(OpDispatcher())[handlers])
    belongs_to_rank(_random, "_rng_tracker", fresh=lambda _: None)


once_imported("torch.distributed.tensor", _dtensors)


@contextmanager
def standing_in(
    groups: Mapping[str, type], bare: type, messages: dict[str, Any], *, batch: Callable[[int], None]
) -> Iterator[None]:
    """Replace every group that torch makes by one of ``groups``, by torch's name for it, while open.

    ``bare``: the class for gloo groups made without torch.distributed. ``messages``: replacements for a process group's
    functions, by name. ``batch`` gets the number of messages in a batched call beforehand. Groups are registered for
    each thread separately.
    """
    checked, plugins = getattr(c10d, _BATCH), c10d.Backend._plugins
    mesh_class: Any = device_mesh.DeviceMesh
    make_mesh = mesh_class.__init__

    def note_mesh(mesh: Any, *given: Any, **named: Any) -> None:
        make_mesh(mesh, *given, **named)
        mesh._thread_id = _number  # meshes of two ranks must differ, or one would replace the other

    def note_operations(operations: list[Any]) -> None:
        checked(operations)
        batch(len(operations))

    changes: list[tuple[Any, str, Any]] = [
        *((c10d, name, group) for name, group in groups.items()),
        (c10d, _BATCH, note_operations),
        (c10d, _RECORDS, lambda *_, **__: None),
        (c10d, "is_nccl_available", lambda: True),
        (c10d, "_get_default_timeout", lambda backend: c10d.default_pg_timeout),
        (c10d_logger, _LOGGED, lambda name, *_, **__: {"func_name": name}),
        (profiler._KinetoProfile, _PROFILED, lambda _: None),
        (mesh_class, "__init__", note_mesh),
        (dist, _GLOO, bare),
        *((dist.ProcessGroup, name, message) for name, message in messages.items()),
    ]
    isolated: Any = torch._C._distributed_c10d  # the stubs leave this out
    with ExitStack() as stack:
        for holder, name, value in changes:
            stack.enter_context(mock.patch.object(holder, name, value, create=True))
        stack.enter_context(mock.patch.dict(plugins, _making(groups, plugins)))
        stack.callback(_forget_meshes)
        isolated._set_thread_isolation_mode(True)
        stack.callback(isolated._set_thread_isolation_mode, False)
        yield


@contextmanager
def one_profiler() -> Iterator[None]:
    """While open, refuse a second thread that starts a profiler, which would crash torch."""
    end, owner = vars(profilers)[_END], list[Thread]()

    def begins(begin: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if owner and owner[0] is not current_thread():
            raise NotSimulated("torch.profiler of two ranks at once")
        owner[:] = [current_thread()]
        return begin(*given, **named)

    def ends(*given: Any) -> Any:
        owner.clear()
        return end(*given)

    changes: dict[str, Any] = {_END: ends, **{name: partial(begins, vars(profilers)[name]) for name in _BEGIN}}
    with mock.patch.multiple(profilers, **changes):
        yield


def _forget_meshes() -> None:
    """Clear DTensor's cache of meshes, which keeps all of a run's objects."""
    remembered = getattr(sys.modules.get("torch.distributed.tensor._redistribute"), "_gen_transform_infos", None)
    if remembered is not None:
        remembered.cache_clear()


def _making(groups: Mapping[str, type], known: dict[str, Any]) -> dict[str, Any]:
    """Return group factories by backend, for torch 2.15 on, where plugins make torch's own groups too."""
    if "GLOO" not in known:
        return {}

    def plugin(group: type) -> Any:
        made: Any = lambda store, rank, size, _: group(store, rank, size)  # noqa: E731  # as torch calls it
        return known["GLOO"]._replace(creator_fn=made, extended_api=False)

    return {"GLOO": plugin(groups[_GLOO]), "NCCL": plugin(groups[_NCCL])}


def unwatch(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``function`` with torch's function modes disabled."""
    off: Any = torch._C.DisableTorchFunction

    @wraps(function)
    def run_unwatched(*arguments: P.args, **named: P.kwargs) -> T:
        with off():
            return function(*arguments, **named)

    return run_unwatched


def wait_for(tensor: Tensor) -> Tensor:
    """Return ``tensor`` after waiting for a functional collective behind it."""
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()  # type: ignore[no-untyped-call]  # in torch
    return tensor


def has_memory(tensor: Tensor) -> bool:
    """True if a tensor has its own memory: a wrapper's storage lacks an address."""
    try:
        return not tensor.is_meta and tensor.untyped_storage().data_ptr() is not None
    except (RuntimeError, NotImplementedError):
        return False


def places_of(tensor: Tensor) -> tuple[int, ...]:
    """Return two keys for identity or shared memory: the object's id, and the memory's address."""
    return (id(tensor), place) if (place := tensor.untyped_storage().data_ptr()) else (id(tensor),)


_Weak: Any = StorageWeakRef


class Memory:
    """A tensor's location in memory, without a reference to it."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storage = _Weak(storage)
        self._place = storage.data_ptr()
        self._bytes = storage.nbytes()
        self._dtype = tensor.dtype
        self._as = tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())

    @property
    def tensor(self) -> Tensor | None:
        """Return the original tensor; None if its memory was freed or moved."""
        kind: Any = torch.UntypedStorage
        storage = None if self._storage.expired() else kind._new_with_weak_ptr(self._storage.cdata)
        if storage is None or storage.data_ptr() != self._place or storage.nbytes() < self._bytes:
            return None
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._as)

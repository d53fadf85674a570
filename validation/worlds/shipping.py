"""Pack jobs and results: test module code travels by value, other code by name."""

import contextlib
import functools
import importlib
import inspect
import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

try:
    from cloudpickle import Pickler, register_pickle_by_value
except ModuleNotFoundError:  # a checkout with torch alone, as in `ci/accelerator`: all code travels by name
    from pickle import Pickler

    register_pickle_by_value = None

_OURS = frozenset({"pipeproof"})
FIRST: list[Callable[[], None]] = []  # called on ranks before unpacking a job, which imports its modules


def pack(value: object) -> bytes:
    """Serialize a value, closures and lambdas included; tensors travel as bytes, without shared memory.

    Unpicklable objects raise errors of any type.
    """
    buffer = io.BytesIO()
    _Packer(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """Restore a packed value. Only for bytes from own ranks: unpickling runs code."""
    return pickle.loads(data)


def pack_job(job: Callable[..., object], *arguments: object) -> bytes:
    """Serialize a job with its arguments and with this process's place: its path and its current folder."""
    folder = ""
    with contextlib.suppress(OSError):  # it may be gone
        folder = os.getcwd()
    return pack((sys.path, folder, FIRST, pack((job, arguments))))


def unpack_job(order: bytes) -> Any:
    """Restore a job with its arguments, in the place where they were packed. Their imports may need first calls."""
    sys.path[:], folder, first, job_and_arguments = unpack(order)
    with contextlib.suppress(OSError):  # absent on another host, or gone
        os.chdir(folder)
    for prepare in first:
        prepare()
    return unpack(job_and_arguments)


def unshippable(value: object) -> str:
    """Name a function's variable in ``value`` that cannot be packed, with a cure; empty if none."""
    for function in _functions(value):
        used = inspect.getclosurevars(function)
        for name, one in {**used.globals, **used.nonlocals}.items():
            try:
                pack(None if isinstance(one, FunctionType) else one)
            except Exception:  # any type: each object refuses in its own way
                kind = type(one).__qualname__
                return f"; {function.__name__} uses {name}, a {kind}, which cannot leave this process: make it in there"
    return ""


def _functions(value: object, depth: int = 4) -> Iterator[FunctionType]:
    """Yield functions in ``value``, including those they use."""
    if isinstance(value, FunctionType):
        yield value
    parts: list[object] = list(value) if isinstance(value, tuple) else []
    if isinstance(value, FunctionType):
        parts += [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
    elif isinstance(value, functools.partial):
        parts += [value.func, *value.args, *value.keywords.values()]
    elif is_dataclass(value):
        parts += vars(value).values()
    for part in parts if depth else ():
        yield from _functions(part, depth - 1)


class _Packer(Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and _plain(obj):
            return _tensor, (obj.reshape(-1).view(torch.uint8).numpy().tobytes(), obj.dtype, obj.shape)
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and _module(obj.__name__) is obj:
            return _module, (obj.__name__,)  # a module subclass, as torch.distributed.config, which pickle rejects
        if register_pickle_by_value is None:
            return NotImplemented
        if isinstance(obj, CodeType):
            return _from_its_file, (obj.co_filename, *self.dispatch_table[CodeType](obj))
        if isinstance(obj, FunctionType | type) and _travels_by_value(obj.__module__):
            register_pickle_by_value(sys.modules[obj.__module__])
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) == 6:
            make, arguments, state, _, _, complete = reduced
            return _class, (obj.__module__, obj.__qualname__, make, arguments), (complete, state), None, None, _complete
        return reduced


def _module(name: str) -> object:
    """Import a module, or return a package attribute, as ``torch.ops.aten``; None if absent."""
    package, _, last = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except (ImportError, ValueError, TypeError):
        return getattr(_module(package), last, None) if package else None


@functools.cache
def _travels_by_value(name: str) -> bool:
    # A module rewritten by pytest would lack its assertion messages when imported in a worker, or under
    # `--import-mode=importlib` be missing. pytest also rewrites plugins, hence ours: those go by name.
    module = sys.modules.get(name)
    return module is not None and "@pytest_ar" in vars(module) and name.partition(".")[0] not in _OURS


# Torch archives each tensor separately, which dominates results with hundreds of tensors.
def _plain(tensor: Tensor) -> bool:
    """True if elements alone describe the tensor."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not vars(tensor)
    )


def _tensor(data: bytes, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)  # torch's own memory, aligned like all its tensors
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
    return tensor


# cloudpickle 3.1.3 drops a code object's file; verdicts need it for user lines.
def _from_its_file(name: str, make: Callable[..., CodeType], arguments: tuple[Any, ...]) -> CodeType:
    return make(*arguments).replace(co_filename=name)


# A class that returns after travel by value is the original, unchanged by its copy. The same holds on torchrun's other
# ranks, with a module under the same name.
def _class(module: str, qualname: str, make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    return _at_home(module, qualname) or make(*arguments)


def _complete(made: type, instructions: tuple[Callable[[type, Any], None], Any]) -> None:
    complete, state = instructions
    if _at_home(made.__module__, made.__qualname__) is not made:
        complete(made, state)


def _at_home(module: str, qualname: str) -> type | None:
    found: object = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, type) else None

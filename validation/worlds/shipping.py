"""Jobs and results as bytes: a test module's code travels by value, all other code by name."""

import functools
import importlib
import inspect
import io
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
except ModuleNotFoundError:  # a checkout beside torch alone, as `ci/accelerator` runs it: all code travels by name
    from pickle import Pickler

    register_pickle_by_value = None

_OURS = frozenset({"pipeproof"})
FIRST: list[Callable[[], None]] = []  # what ranks call before they unpack a job, which imports what its code uses


def pack(value: object) -> bytes:
    """The value as bytes, closures and lambdas included; tensors travel as their bytes, not as shared memory.

    Raises whatever an object that cannot be pickled raises: there is no one type for it.
    """
    buffer = io.BytesIO()
    _Packer(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """The value that ``pack`` was given. Only for bytes of a rank of one's own: unpickling runs code."""
    return pickle.loads(data)


def unpack_job(order: bytes) -> Any:
    """The job and its arguments. The path, and what comes first, may be needed to unpack them."""
    sys.path[:], first, job_and_arguments = unpack(order)
    for prepare in first:
        prepare()
    return unpack(job_and_arguments)


def unshippable(value: object) -> str:
    """Which variable of a function in ``value`` cannot be packed, and the cure; empty where none is found."""
    for function in _functions(value):
        used = inspect.getclosurevars(function)
        for name, one in {**used.globals, **used.nonlocals}.items():
            if not isinstance(one, FunctionType) and not _packs(one):
                kind = type(one).__qualname__
                return f"; {function.__name__} uses {name}, a {kind}, which is of this process alone: make it in there"
    return ""


def _functions(value: object, depth: int = 4) -> Iterator[FunctionType]:
    """The functions in ``value``: itself, what it holds, and what those use."""
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


def _packs(value: object) -> bool:
    try:
        pack(value)
    except Exception:  # no one type: every object has its own way to refuse
        return False
    return True


class _Packer(Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and _plain(obj):
            return _tensor, (obj.reshape(-1).view(torch.uint8).numpy().tobytes(), obj.dtype, obj.shape)
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and _module(obj.__name__) is obj:
            return _module, (
                obj.__name__,
            )  # of a kind of its own, as torch.distributed.config, which nobody can pickle
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
    """The module of that name, or what its package calls by it, as ``torch.ops.aten``; None where there is none."""
    package, _, last = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except (ImportError, ValueError, TypeError):
        return getattr(_module(package), last, None) if package else None


@functools.cache
def _travels_by_value(name: str) -> bool:
    # A module that pytest rewrote would be imported in a worker without its telling assertions, or under
    # `--import-mode=importlib` not at all. pytest also rewrites plugins, hence ours: those go by name.
    module = sys.modules.get(name)
    return module is not None and "@pytest_ar" in vars(module) and name.partition(".")[0] not in _OURS


# Torch's own way makes an archive of each tensor, which takes most of the time of a result that has hundreds of them.
def _plain(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but its elements."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not vars(tensor)
    )


def _tensor(data: bytes, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)  # in memory of torch's own, aligned as all its tensors are
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
    return tensor


# cloudpickle 3.1.3 leaves out of which file code is; a verdict names the user's lines.
def _from_its_file(name: str, make: Callable[..., CodeType], arguments: tuple[Any, ...]) -> CodeType:
    return make(*arguments).replace(co_filename=name)


# A class that travelled by value and comes back is the class it was, not a copy; nor is it changed by its copy.
# That also holds on the other ranks of torchrun, which have a module of the same name.
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

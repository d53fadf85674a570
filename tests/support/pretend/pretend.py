"""A device that is none: torch's PrivateUse1 under the name ``pretend``, whose tensors are computed on the host.

It refuses what a device refuses, an operation on its own tensors and the host's together. With this folder on
PYTHONPATH torch starts it in every process, by the entry point beside this file. Of autocast it knows nothing.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import backend_registration

NAME = "pretend"
_HOST = torch.device("cpu")
_ACROSS = ("aten::copy_", "aten::_to_copy", "aten::_copy_from")  # what takes tensors of both


class Pretended(Tensor):
    """A tensor of the device; ``raw`` has its elements. A view of one has a view of the other."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: type, raw: Tensor) -> "Pretended":
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        made.raw = raw
        return made

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, other: "Pretended") -> None:
        Tensor.data.__set__(self, other)
        self.raw = other.raw

    def tolist(self) -> Any:
        return self.raw.tolist()

    def untyped_storage(self) -> Any:
        return self.raw.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _Call(func).made(args, kwargs or {})


class _Call:
    """One operation, on what its tensors really are."""

    def __init__(self, func: Any) -> None:
        self._func = func
        self._own: dict[int, Pretended] = {}  # by what they really are
        self._hosts = ""  # a device of a tensor that is not ours; numbers without a dimension may go anywhere
        self._wanted = False  # whether an argument names our device

    def made(self, args: Any, kwargs: dict[str, Any]) -> Any:
        name = self._func._schema.name
        given, named = [self._raw(one) for one in args], {key: self._raw(one) for key, one in kwargs.items()}
        if self._own and self._hosts and name not in _ACROSS and not name.startswith("aten::index"):
            raise RuntimeError(f"Expected all tensors to be on the same device, but {name} has {NAME}:0, {self._hosts}")
        if name == "aten::is_pinned":
            return False
        if name == "aten::_to_copy":
            ours = self._wanted if kwargs.get("device") is not None else bool(self._own)
            out = self._func(*given, **{**named, "device": _HOST, "non_blocking": False})
            return Pretended(out.clone() if out is given[0] else out) if ours else out
        out = self._func(*given, **named)
        return self._wrapped(out) if self._own or self._wanted else out

    def _raw(self, one: Any) -> Any:
        if isinstance(one, Pretended):
            self._own[id(one.raw)] = one
            return one.raw
        if isinstance(one, Tensor) and one.dim():
            self._hosts = str(one.device)
        if isinstance(one, torch.device) and one.type == NAME:
            self._wanted = True
            return _HOST
        return [self._raw(each) for each in one] if isinstance(one, list | tuple) else one

    def _wrapped(self, out: Any) -> Any:
        if isinstance(out, Tensor):
            same = self._own.get(id(out))
            return Pretended(out) if same is None else same
        return type(out)(map(self._wrapped, out)) if isinstance(out, list | tuple) else out


class _Module(backend_registration._DummyBackendModule):
    """What torch looks for under ``torch.pretend``."""

    def get_rng_state(self, device: int = 0) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: int = 0) -> None:
        torch.set_rng_state(state)

    def get_device_name(self, device: int = 0) -> str:
        return "pretended device"


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **others: Any) -> Tensor:
    return Pretended(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **others: Any) -> Tensor:
    return Pretended(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    source, own = (one.raw if isinstance(one, Pretended) else one for one in (source, target))
    own.copy_(source)
    return target


def _keeping_ties(own: Any) -> Any:
    """``nn.Module.to``, after which tensors of a Python class would no longer be shared by two modules."""

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        first: dict[int, str] = {}
        named = self.named_parameters(remove_duplicate=False)
        ties = [(name, first[id(p)]) for name, p in named if first.setdefault(id(p), name) != name]
        moved: nn.Module = own(self, *args, **kwargs)
        for name, other in ties:
            path, _, leaf = name.rpartition(".")
            setattr(moved.get_submodule(path), leaf, moved.get_parameter(other))
        return moved

    return to


def start() -> None:
    """Make it this process's accelerator: one device, which waits for nothing and counts no memory."""
    global _library
    backend_registration._setup_privateuseone_for_python_backend(rename=NAME, backend_module=_Module())
    accelerator: Any = torch.accelerator
    accelerator.device_count = lambda: 1
    accelerator.current_device_index = lambda: 0
    accelerator.synchronize = accelerator.set_device_index = accelerator.reset_peak_memory_stats = lambda *_: None
    accelerator.memory_allocated = accelerator.max_memory_allocated = lambda *_: 0
    _library = torch.library.Library("aten", "IMPL")
    for name, kernel in (
        ("empty.memory_format", _empty),
        ("empty_strided", _empty_strided),
        ("_copy_from", _copy_from),
    ):
        _library.impl(name, kernel, "PrivateUse1")
    nn.Module.to = _keeping_ties(nn.Module.to)  # type: ignore[method-assign]

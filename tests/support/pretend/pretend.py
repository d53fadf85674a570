"""A device that is none: torch's PrivateUse1 under the name ``pretend``, whose tensors are computed on the host.

It refuses what a device refuses: an operation on its own tensors and the host's together, the host's look at its
memory. It does what it is given later, in streams (pretend_streams.py), and draws numbers of its own. With this folder
on PYTHONPATH torch starts it in every process, by the entry point beside this file. Of autocast it knows nothing.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

import pretend_streams
import torch
from pretend_streams import current
from torch import Tensor, nn
from torch.utils import backend_registration

NAME = "pretend"
_HOST, _META = torch.device("cpu"), torch.device("meta")
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
        current().synchronize()
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
            return self._moved(given, named, ours=self._wanted if kwargs.get("device") is not None else bool(self._own))
        if name in _ACROSS and self._hosts:
            _copy(given[1], given[0], self._own, *given[2:], **named)
            return args[0]
        if self._func.is_view:
            return self._wrapped(self._func(*given, **named))
        return self._later(given, named)

    def _moved(self, given: list[Any], named: dict[str, Any], *, ours: bool) -> Any:
        """What ``Tensor.to`` makes: on the device from what is there, or across."""
        (source,), waits = given, not named.pop("non_blocking", False)
        named |= {"device": _HOST}
        if ours and self._own:
            return self._later(given, named)
        shape = self._func(_meta(source), **{**named, "device": _META})
        out = spoiled(torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype))
        made = Pretended(out) if ours else pinned(out)
        _copy(source, out, {id(out): made} if ours else {id(source): made}, not waits)
        return made

    def _later(self, given: list[Any], named: dict[str, Any]) -> Any:
        """Queue the operation, if torch knows the form of what it makes; else it is waited for."""
        schema = self._func._schema
        drawn = torch.Tag.nondeterministic_seeded in self._func.tags
        written = [one for one, of in zip(given, schema.arguments, strict=False) if of.is_write]
        written += [named[of.name] for of in schema.arguments if of.is_write and of.name in named]
        tensors = all(str(one.type) in ("Tensor", "List[Tensor]") for one in schema.returns)
        fresh = [one for one in schema.returns if one.alias_info is None]
        grows = any(not one.numel() for one in written if isinstance(one, Tensor))  # such as what arange is put into
        if drawn or grows or not tensors or (written and fresh) or "resize" in schema.name or "::set_" in schema.name:
            return self._now(given, named, drawn=drawn)
        kept = [self._kept(one) for one in given], {key: self._kept(one) for key, one in named.items()}
        if written:
            current().give(lambda: self._func(*kept[0], **kept[1]))
            outs = self._wrapped(written[: len(schema.returns)])
            return None if not outs else outs[0] if len(schema.returns) == 1 else tuple(outs)
        try:
            form = self._func(*map(_meta, given), **{key: _meta(one) for key, one in named.items()})
        except (NotImplementedError, RuntimeError, ValueError, TypeError):  # depends on what tensors hold
            return self._now(given, named)
        outs = [form] if isinstance(form, Tensor) else list(form)
        raws = [
            one if one is None else spoiled(torch.empty_strided(one.shape, one.stride(), dtype=one.dtype))
            for one in outs
        ]

        def run() -> None:
            found = self._func(*kept[0], **kept[1])
            for raw, one in zip(raws, [found] if isinstance(found, Tensor) else found, strict=True):
                if raw is not None:
                    raw.copy_(one)

        current().give(run)
        made = [raw if raw is None else Pretended(raw) for raw in raws]
        return made[0] if isinstance(form, Tensor) else type(form)(made)

    def _now(self, given: list[Any], named: dict[str, Any], *, drawn: bool = False) -> Any:
        """Wait for the stream and carry the operation out."""
        current().synchronize()
        if any(isinstance(one, torch.Generator) for one in (*given, *named.values())):
            raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")
        with _numbers() if drawn else nullcontext():
            out = self._func(*given, **named)
        return self._wrapped(out) if self._own or self._wanted else out

    def _kept(self, one: Any) -> Any:
        """What the host may change once it has queued the operation is read now."""
        if isinstance(one, list | tuple):
            return [self._kept(each) for each in one]
        return one.clone() if isinstance(one, Tensor) and id(one) not in self._own else one

    def _raw(self, one: Any) -> Any:
        if isinstance(one, Pretended):
            self._own[id(one.raw)] = one
            return one.raw
        if isinstance(one, Tensor) and one.dim():
            self._hosts = str(one.device)
        if isinstance(one, torch.device) and one.type == NAME:
            self._wanted = True
            return _there(one)
        return [self._raw(each) for each in one] if isinstance(one, list | tuple) else one

    def _wrapped(self, out: Any) -> Any:
        if isinstance(out, Tensor):
            same = self._own.get(id(out))
            return Pretended(out) if same is None else same
        return type(out)(map(self._wrapped, out)) if isinstance(out, list | tuple) else out


def _there(device: torch.device) -> torch.device:
    """Where the elements really are. Raises for a device that there is not."""
    if device.index not in (None, 0):
        raise RuntimeError(f"{device}: invalid device ordinal, there is {NAME}:0 alone")
    return _HOST


def _meta(one: Any) -> Any:
    if isinstance(one, Tensor):
        return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=_META)
    if isinstance(one, list | tuple):
        return [_meta(each) for each in one]
    return _META if isinstance(one, torch.device) else one


def spoiled(tensor: Tensor) -> Tensor:
    """``tensor`` with what its memory may hold before anything was written there."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.fill_(torch.nan)
    return tensor.fill_(255 if tensor.dtype is torch.uint8 else 0)


_pinned: WeakValueDictionary[int, Tensor] = WeakValueDictionary()


def pinned(tensor: Tensor) -> Tensor:
    """A tensor of the host that the device reads and writes by itself."""
    _pinned[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def _copy(source: Tensor, target: Tensor, own: Collection[int], non_blocking: bool = False) -> None:
    """Copy across. The host waits, unless it says not to and its side is pinned."""
    ours, host = id(target) in own, source if id(target) in own else target
    if non_blocking and host.untyped_storage().data_ptr() in _pinned:
        current().give(lambda: target.copy_(source))
    elif ours and non_blocking:
        kept = source.clone()  # a driver takes what is not pinned along
        current().give(lambda: target.copy_(kept))
    else:
        current().synchronize()
        target.copy_(source)


_generator = torch.Generator()


@contextmanager
def _numbers() -> Iterator[None]:
    """Numbers are drawn from the device's generator meanwhile."""
    host = torch.get_rng_state()
    torch.set_rng_state(_generator.get_state())
    try:
        yield
    finally:
        _generator.set_state(torch.get_rng_state())
        torch.set_rng_state(host)


class _Module(backend_registration._DummyBackendModule):
    """What torch looks for under ``torch.pretend``."""

    def get_rng_state(self, device: int = 0) -> Tensor:
        return _generator.get_state()

    def set_rng_state(self, state: Tensor, device: int = 0) -> None:
        _generator.set_state(state)

    def manual_seed_all(self, seed: int) -> None:
        _generator.manual_seed(seed + 1)  # a device's numbers are others than the host's from the same seed

    def get_device_name(self, device: int = 0) -> str:
        return "pretended device"


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, device: Any = None, **others: Any) -> Tensor:
    _there(device or torch.device(NAME))
    return Pretended(spoiled(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format)))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **others: Any) -> Tensor:
    _there(device or torch.device(NAME))
    return Pretended(spoiled(torch.empty_strided(size, stride, dtype=dtype)))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    raws = [one.raw if isinstance(one, Pretended) else one for one in (source, target)]
    if all(isinstance(one, Pretended) for one in (source, target)):
        current().give(lambda: raws[1].copy_(raws[0]))
    else:
        _copy(*raws, [id(one.raw) for one in (source, target) if isinstance(one, Pretended)], non_blocking)
    return target


def _with_pinned(own: Any) -> Any:
    """``torch.empty``, which may be asked for pinned memory."""

    def empty(*size: Any, pin_memory: bool = False, **named: Any) -> Tensor:
        made: Tensor = own(*size, **named)
        return pinned(made) if pin_memory else made

    return empty


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
    """Make it this process's accelerator: one device, which counts no memory."""
    global _library
    backend_registration._setup_privateuseone_for_python_backend(rename=NAME, backend_module=_Module())
    accelerator: Any = torch.accelerator
    accelerator.device_count = lambda: 1
    accelerator.current_device_index = lambda: 0
    accelerator.set_device_index = lambda device: _there(torch.device(NAME, device))
    accelerator.reset_peak_memory_stats = lambda *_: None
    accelerator.synchronize, accelerator.current_stream = pretend_streams.synchronize, current
    accelerator.set_stream = pretend_streams.use
    torch.Stream, torch.Event = pretend_streams.Stream, pretend_streams.Event  # type: ignore[misc,assignment]
    torch.empty = _with_pinned(torch.empty)
    accelerator.memory_allocated = accelerator.max_memory_allocated = lambda *_: 0
    _library = torch.library.Library("aten", "IMPL")
    for name, kernel in (
        ("empty.memory_format", _empty),
        ("empty_strided", _empty_strided),
        ("_copy_from", _copy_from),
    ):
        _library.impl(name, kernel, "PrivateUse1")
    nn.Module.to = _keeping_ties(nn.Module.to)  # type: ignore[method-assign]

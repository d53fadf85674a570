"""Objects in reach of code, part by part, and how to restore each part in place."""

import argparse
import concurrent.futures
import functools
import io
import itertools
import queue
import random
import sys
import threading
import types
import weakref
from array import array
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from gc import get_referents
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from pipeproof.reference.generators import OF_ONE_STATE, GeneratorState

_GONE = object()  # stands for a missing value
_CLOSED = frozenset({*sys.stdlib_module_names, "torch", "numpy", "pytest", "_pytest", "pipeproof"})
_OPEN: tuple[type, ...] = (nn.Module, Tensor, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_OPEN += (torch.amp.GradScaler, argparse.Namespace, types.SimpleNamespace, threading.local, functools.cached_property)
_OPEN += (functools.partialmethod, UserDict, UserList, ChainMap)
_WORKERS = (threading.Thread, queue.Queue, queue.SimpleQueue, concurrent.futures.Executor)
_INDEXED: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))), type(iter("")))
PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type(...), range, slice, torch.dtype, torch.device, torch.Size}
    | {types.CodeType, types.FrameType, torch.memory_format, torch.layout}
)  # these have no parts, and nothing in them changes


class NotPutBack(Exception):
    """An irreversible change."""


@dataclass(frozen=True)
class Item:
    """An object's part: references, a test for changes, and restoration."""

    leads_to: Iterable[object]
    is_same: Callable[[], bool] = lambda: True
    put_back: Callable[[], object] = lambda: None


def keepers_of(kind: type) -> list[Callable[[Any], Iterable[Item]]]:
    """Part finders by class. Members may be restored on objects of a user's class, and of a few others."""
    if kind in PLAIN or issubclass(kind, numpy.generic | types.ModuleType):
        return []
    found = [keep for base, keep in _BY_CLASS if issubclass(kind, base)]
    keeps_states = all(callable(getattr(kind, one, None)) for one in ("get_states", "set_states"))
    if (issubclass(kind, OF_ONE_STATE) or keeps_states) and not issubclass(kind, random.SystemRandom):
        found.append(_generator)
    is_open = _root(kind.__module__) not in _CLOSED or issubclass(kind, _OPEN)
    return [*found, _members] if is_open and not issubclass(kind, type | types.FunctionType) else found


def _root(name: object) -> str:
    return name.partition(".")[0] if isinstance(name, str) else ""


def _value(read: Callable[[], Any], put: Callable[[Any], object], delete: Callable[[], object]) -> Item:
    """A value that may be missing."""

    def now() -> object:
        try:
            return read()
        except (AttributeError, LookupError, ValueError):
            return _GONE

    kept = now()
    return Item([kept], lambda: now() is kept, lambda: delete() if kept is _GONE else put(kept))


def _state(now: Callable[[], Any], put: Callable[[Any], object], leads_to: Iterable[object] = ()) -> Item:
    """A state that can be compared."""
    kept = now()
    return Item(leads_to, lambda: bool(now() == kept), lambda: put(kept))


def _dict(one: dict[Any, Any]) -> Iterator[Item]:
    kept = list(_base(one).items(one))
    leads = [each for pair in kept for each in pair]
    leads += [one.default_factory] if isinstance(one, defaultdict) else []

    def is_same() -> bool:
        pairs = zip(_base(one).items(one), kept, strict=False)
        return dict.__len__(one) == len(kept) and all(a is c and b is d for (a, b), (c, d) in pairs)

    yield Item(leads, is_same, lambda: _refill(one, kept))


def _refill(one: dict[Any, Any], kept: list[tuple[Any, Any]]) -> None:
    """Refill ``one`` with few writes, since another thread may look into it."""
    base, names = _base(one), dict(kept)
    for name in [name for name in base.keys(one) if name not in names]:
        base.__delitem__(one, name)
    if list(base.keys(one)) != [name for name, _ in kept]:  # something is missing, or the order is another
        base.clear(one)
    for name, value in kept:
        if dict.get(one, name, _GONE) is not value:
            base.__setitem__(one, name, value)


def _base(one: dict[Any, Any]) -> Any:
    """The builtin base class with its methods: an ``OrderedDict`` has an order beside the dict's."""
    return OrderedDict if issubclass(type(one), OrderedDict) else dict


def _list(one: list[Any]) -> Iterator[Item]:
    kept = list.copy(one)
    yield Item(kept, lambda: _equal(list.__iter__(one), kept), lambda: list.__setitem__(one, slice(None), kept))


def _equal(now: Iterable[Any], kept: Iterable[Any]) -> bool:
    """True if all are identical objects."""
    return all(one is other for one, other in itertools.zip_longest(now, kept, fillvalue=_GONE))


def _deque(one: deque[Any]) -> Iterator[Item]:
    kept = list(deque.__iter__(one))
    yield Item(kept, lambda: _equal(deque.__iter__(one), kept), lambda: (deque.clear(one), deque.extend(one, kept)))


def _set(one: set[Any]) -> Iterator[Item]:
    kept = {id(each): each for each in set.__iter__(one)}
    again = kept.values()
    yield Item(
        again, lambda: {*map(id, set.__iter__(one))} == {*kept}, lambda: (set.clear(one), set.update(one, again))
    )


def _partial(one: functools.partial[Any]) -> Iterator[Item]:
    if _root(getattr(one.func, "__module__", "")) != "pipeproof":
        yield Item(get_referents(one))


def _array(one: numpy.ndarray[Any, Any]) -> Iterator[Item]:
    """Restore an array's own bytes, also under views."""
    kept, form = numpy.array(one, copy=True, subok=False), (one.shape, one.strides)

    def is_same() -> bool:
        return (one.shape, one.strides) == form and one.tobytes() == kept.tobytes()

    def put_back() -> None:
        if one.shape != kept.shape:
            one.resize(kept.shape, refcheck=False)
        numpy.copyto(one, kept)

    inner = one.ravel().tolist() if one.dtype.hasobject else ()
    yield Item([one.base, *inner], is_same, put_back) if one.flags.writeable else Item([one.base, *inner])


def _members(one: Any) -> Iterator[Item]:
    """Yield an object's members, and its class. Threads and queues change meanwhile: their owners are skipped."""
    try:
        base = threading.local if issubclass(type(one), threading.local) else object  # it has one for each thread
        own = base.__getattribute__(one, "__dict__")
    except AttributeError:
        own = {}
    if any(issubclass(type(each), _WORKERS) for each in own.values()):
        return
    yield Item([type(one)])
    yield from _dict(own)
    for kind in type(one).__mro__:
        if "__slots__" in vars(kind):
            slots = (each for each in vars(kind).values() if isinstance(each, types.MemberDescriptorType))
            yield from (
                _value(partial(each.__get__, one, kind), partial(each.__set__, one), partial(each.__delete__, one))
                for each in slots
            )


def _class(kind: type) -> Iterator[Item]:
    """Attributes on a user's class, and references from its methods."""
    if _root(kind.__module__) in _CLOSED:
        return
    kept = dict(vars(kind))

    def put_back() -> None:
        for name in [each for each in vars(kind) if each not in kept]:
            type.__delattr__(kind, name)
        for name, value in kept.items():
            if vars(kind).get(name, _GONE) is not value:
                type.__setattr__(kind, name, value)

    def is_same() -> bool:
        now = vars(kind)
        return len(now) == len(kept) and all(now.get(name, _GONE) is value for name, value in kept.items())

    yield Item([*kind.__bases__, *kept.values()], is_same, put_back)


def _cell(one: types.CellType) -> Iterator[Item]:
    at = one, "cell_contents"  # it may be empty yet
    yield _value(partial(getattr, *at), partial(setattr, *at), partial(delattr, *at))


def _function(one: types.FunctionType) -> Iterator[Item]:
    """Its closure, defaults, and named globals, in its module and in modules there."""
    root = _root(one.__globals__.get("__name__"))
    if root == "pipeproof":  # our own notes do not belong to the job
        return
    defaults, named = one.__defaults__, one.__kwdefaults__

    def put_back() -> None:
        one.__defaults__, one.__kwdefaults__ = defaults, named

    leads = [*(one.__closure__ or ()), defaults, named, one.__dict__]
    yield Item(leads, lambda: one.__defaults__ is defaults and one.__kwdefaults__ is named, put_back)
    if root in _CLOSED:
        return
    names = names_in(one.__code__)
    spaces = [one.__globals__]
    spaces += [
        vars(each)
        for each in map(one.__globals__.get, names)
        if isinstance(each, types.ModuleType) and _root(each.__name__) not in _CLOSED
    ]
    for space in spaces:
        for name in names:
            at = partial(space.__getitem__, name), partial(space.__setitem__, name), partial(space.pop, name)
            yield _value(*at)


def names_in(code: types.CodeType) -> set[str]:
    """Globals and attributes that ``code`` names, also in functions inside."""
    inner = (names_in(one) for one in code.co_consts if isinstance(one, types.CodeType))
    return set(code.co_names).union(*inner)


def _generator(one: Any) -> Iterator[Item]:
    kept = GeneratorState.of(one)
    yield Item((), lambda: not kept.moved, kept.put_back)


def _iterator(one: Any) -> Iterator[Item]:
    def put_back(kept: Any) -> None:
        if not one.__reduce__()[2:]:
            _refuse(one)
        one.__setstate__(*kept)

    yield _state(lambda: one.__reduce__()[2:], put_back, get_referents(one))


def _running(one: "types.GeneratorType[Any, Any, Any]") -> Iterator[Item]:
    """A generator function: its position can be observed, not set."""

    def now() -> object:
        frame = one.gi_frame
        return None if frame is None else (frame.f_lasti, {name: id(each) for name, each in frame.f_locals.items()})

    own = [] if one.gi_frame is None else list(one.gi_frame.f_locals.values())
    yield _state(now, lambda _: _refuse(one), [*own, one.gi_yieldfrom])


def _file(one: io.IOBase) -> Iterator[Item]:
    """A file open for reading. Written content stays."""
    if not one.closed and one.seekable() and not one.writable():
        yield _state(one.tell, one.seek)


def _refuse(one: object) -> None:
    raise NotPutBack(f"a {type(one).__name__}")


_BY_CLASS: list[tuple[Any, Callable[[Any], Iterable[Item]]]] = [
    (dict, _dict),
    (list, _list),
    (set, _set),
    (deque, _deque),
    ((bytearray, array), lambda one: [_state(lambda: one[:], partial(one.__setitem__, slice(None)))]),
    (
        (tuple, frozenset, types.MappingProxyType, property, staticmethod, classmethod),
        lambda one: [Item(get_referents(one))],
    ),
    (functools.partial, _partial),
    (numpy.ndarray, _array),
    (type, _class),
    (types.CellType, _cell),
    (types.FunctionType, _function),
    ((types.MethodType, types.BuiltinMethodType), lambda one: [Item([one.__self__, getattr(one, "__func__", None)])]),
    (ContextVar, lambda one: [_value(lambda: one.get(_GONE), one.set, lambda: _refuse(one))]),
    (weakref.ref, lambda one: [Item([one()])]),
    (_INDEXED, _iterator),
    (types.GeneratorType, _running),
    (itertools.count, lambda one: [_state(lambda: repr(one), lambda _: _refuse(one))]),
    ((io.BytesIO, io.StringIO), lambda one: [_state(one.__getstate__, one.__setstate__)]),
    ((io.BufferedReader, io.TextIOWrapper), _file),
]

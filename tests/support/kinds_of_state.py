"""Every kind of state that a job may keep while its stages run: where it is held, and what it is."""

import argparse
import random
import threading
from array import array
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from io import BytesIO, StringIO
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

OF_THE_MODULE: Any = 0
VARIABLE: ContextVar[Any] = ContextVar("of a context")
LOCAL = threading.local()


class Slots:
    """Has one member, and no mapping of members."""

    __slots__ = ("it",)

    def __init__(self, it: Any) -> None:
        self.it = it


@dataclass
class Record:
    """A mutable one."""

    it: Any


@dataclass(frozen=True)
class Frozen:
    """One that cannot be set, with what can be written to."""

    it: Any


class Named(NamedTuple):
    """A tuple with a name."""

    it: Any


class OfAClass:
    """Its class has the state."""

    it: Any = 0


class Weight(nn.Parameter):
    """A parameter with an attribute."""


Access = tuple[Callable[[], Any], Callable[[Any], None]]


def _attribute(of: Any, it: Any) -> Access:
    setattr(of, "it", it)  # noqa: B010  # whatever it is an attribute of
    return (lambda: of.it), (lambda value: setattr(of, "it", value))


def _fixed(it: Any, read: Callable[[], Any]) -> Access:
    return read, lambda value: None


def _closure(it: Any) -> Access:
    def put(value: Any) -> None:
        nonlocal it
        it = value

    return (lambda: it), put


def _default(it: Any) -> Access:
    def read(found: Any = it) -> Any:
        return found

    return read, lambda value: setattr(read, "__defaults__", (value,))


def _keyword(it: Any) -> Access:
    def read(*, found: Any = it) -> Any:
        return found

    return read, lambda value: read.__kwdefaults__.update(found=value)


def _global(it: Any) -> Access:
    def put(value: Any) -> None:
        global OF_THE_MODULE
        OF_THE_MODULE = value

    put(it)
    return (lambda: OF_THE_MODULE), put


def _variable(it: Any) -> Access:
    VARIABLE.set(it)
    return (lambda: VARIABLE.get()), (lambda value: (VARIABLE.set(value), None)[1])


def _in(holder: Any, key: Any) -> Access:
    return (lambda: holder[key]), (lambda value: holder.__setitem__(key, value))


HOLDERS: dict[str, Callable[[Any], Access]] = {
    "a slot": lambda it: _attribute(Slots(it), it),
    "a dataclass": lambda it: _attribute(Record(it), it),
    "a frozen dataclass": lambda it: _fixed(it, partial(getattr, Frozen(it), "it")),
    "a named tuple": lambda it: _fixed(it, partial(getattr, Named(it), "it")),
    "a class": lambda it: _attribute(OfAClass, it),
    "a closure": _closure,
    "a default": _default,
    "a keyword's default": _keyword,
    "a global": _global,
    "a context": _variable,
    "a thread's own": lambda it: _attribute(LOCAL, it),
    "a function": lambda it: _attribute(lambda: None, it),
    "a partial function": lambda it: _fixed(it, partial(lambda found: found, it)),
    "a namespace": lambda it: _attribute(SimpleNamespace(), it),
    "options": lambda it: _attribute(argparse.Namespace(), it),
    "a weight": lambda it: _attribute(Weight(torch.zeros(1)), it),
    "a buffer": lambda it: _attribute(torch.zeros(1), it),
    "a dict of lists": lambda it: _in({"lists": [[it]]}["lists"][0], 0),
    "a defaultdict": lambda it: _in(defaultdict(list, {0: it}), 0),
    "an OrderedDict": lambda it: _in(OrderedDict({0: it}), 0),
    "a UserDict": lambda it: _in(UserDict({0: it}), 0),
    "a deque": lambda it: _in(deque([it]), 0),
    "an array of objects": lambda it: _in(numpy.array([it, None], dtype=object), 0),
}


class TwoViews:
    """Two views of one storage."""

    def __init__(self) -> None:
        whole = torch.zeros(6)
        self.first, self.last = whole[:4], whole[2:]

    def move(self) -> None:
        self.first.add_(1)
        self.last.mul_(1.5)


def _renewed(box: Slots) -> None:
    box.it = box.it + 1


def _of_data(tensor: Tensor) -> None:
    tensor.data.add_(1)
    tensor.detach().mul_(1.01)
    tensor.numpy()[0] += 0.25


def _graded(weight: nn.Parameter) -> None:
    if weight.grad is None or weight.grad[0] > 2:
        weight.grad = torch.zeros(2)
    weight.grad.add_(0.5)


def _iterated(box: list[Any]) -> None:
    with suppress(StopIteration):
        next(box[0])


def _written(file: Any) -> None:
    file.write("x" if isinstance(file, StringIO) else b"x")


@dataclass(frozen=True)
class Content:
    """How a state begins, what moves it, and what it comes to."""

    make: Callable[[], Any]
    move: Callable[[Any], object]
    read: Callable[[Any], Any]


def _tensor(one: Tensor) -> list[float]:
    return one.double().flatten().tolist()


CONTENTS: dict[str, Content] = {
    "a tensor": Content(lambda: torch.zeros(3), lambda one: one.add_(0.5), _tensor),
    "a tensor's data": Content(lambda: torch.zeros(3), _of_data, _tensor),
    "a sparse tensor": Content(
        lambda: torch.eye(3).to_sparse(), lambda one: one.mul_(1.5), lambda s: _tensor(s.to_dense())
    ),
    "views": Content(TwoViews, TwoViews.move, lambda one: _tensor(one.first) + _tensor(one.last)),
    "a gradient": Content(lambda: nn.Parameter(torch.ones(2)), _graded, lambda one: _tensor(one.grad)),
    "a tensor that grows": Content(
        lambda: torch.zeros(1), lambda one: one.resize_(len(one) + 1).fill_(len(one)), _tensor
    ),
    "another tensor": Content(lambda: Slots(torch.zeros(3)), _renewed, lambda one: _tensor(one.it)),
    "a number": Content(lambda: Slots(0), _renewed, lambda one: one.it),
    "a list": Content(list, lambda one: one.append(1.5), list),
    "a set": Content(set, lambda one: one.add(len(one)), sorted),
    "a dict": Content(dict, lambda one: one.update({len(one): 1}), lambda one: [*one.items()]),
    "an ordered one": Content(
        lambda: OrderedDict(a=1, b=2), lambda one: one.move_to_end(next(iter(one))), lambda one: [*one]
    ),
    "a Counter": Content(Counter, lambda one: one.update("ab"), lambda one: [*one.items()]),
    "a deque": Content(lambda: deque([1, 2, 3], maxlen=3), lambda one: one.rotate(), list),
    "bytes": Content(bytearray, lambda one: one.extend(b"x"), bytes),
    "an array": Content(lambda: array("d"), lambda one: one.append(1.0), list),
    "numpy's": Content(lambda: numpy.zeros(3), lambda one: one.__iadd__(0.5), lambda one: one.tolist()),
    "a view of numpy's": Content(
        lambda: numpy.zeros((3, 2))[::2, 1], lambda one: one.__iadd__(1), lambda one: one.tolist()
    ),
    "torch's generator": Content(
        torch.Generator, lambda one: torch.rand(2, generator=one), lambda one: hash(bytes(one.get_state().tolist()))
    ),
    "Python's generator": Content(lambda: random.Random(1), lambda one: one.random(), lambda one: hash(one.getstate())),
    "numpy's generator": Content(
        lambda: numpy.random.default_rng(1), lambda one: one.random(), lambda one: repr(one.bit_generator.state)
    ),
    "an iterator": Content(lambda: [iter([*range(5000)])], _iterated, lambda one: one[0].__length_hint__()),
    "a file in memory": Content(BytesIO, _written, lambda one: one.getvalue()),
    "a text in memory": Content(StringIO, _written, lambda one: one.getvalue()),
}


def naturals() -> Iterator[int]:
    """Moves on by itself, and nobody can set it."""
    yield from count()


class Kinds:
    """One of each, to be moved as a stage runs."""

    def __init__(self) -> None:
        self.contents = {name: one.make() for name, one in CONTENTS.items()}
        self.holders = {name: hold([0.0]) for name, hold in HOLDERS.items()}

    def move(self) -> None:
        """All of them."""
        for name, one in self.contents.items():
            CONTENTS[name].move(one)
        for read, put in self.holders.values():
            put([sum(read()) + 1.0])
            read().append(1.0)

    def read(self) -> dict[str, Any]:
        """What each comes to."""
        found = {name: CONTENTS[name].read(one) for name, one in self.contents.items()}
        return found | {name: [*read()] for name, (read, _) in self.holders.items()}

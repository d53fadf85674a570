"""Sources of a computation's random numbers."""

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from os import sep
from pathlib import Path
from sys import getrefcount
from types import BuiltinMethodType, CodeType, FrameType, FunctionType, MethodType
from typing import Any

import numpy
import torch
from torch.overrides import TorchFunctionMode

from pipeproof.reference.generators import (
    OF_ONE_STATE,
    Generator,
    GeneratorState,
    content,
    has_generators,
    is_generator,
    own_generators,
    states_on,
)

_SEEDING = frozenset({"seed", "manual_seed", "set_state", "setstate"})  # later draws do not depend on earlier ones
_READING = frozenset({"get_state", "graphsafe_get_state", "clone_state"})
_SETTING = frozenset({"set_state", "graphsafe_set_state"})
_SHORT = 100  # members that are looked at
_OURS = 2  # references to a generator without other holders: it was made for the computation alone
_TORCH = f"{Path(torch.__file__).parent}{sep}"  # code that has no generator of numpy, and much of which compiles
_FURTHER = 4  # steps from a name to a generator
_HOLDERS: tuple[Any, ...] = (dict, list, tuple, deque, set)
_PLAIN = (type(None), bool, int, float, str, bytes, FunctionType, CodeType)  # these have no members of interest


class KeptElsewhere(Exception):
    """A computation draws from a hidden state: only its keeper can restore it."""


class DrawnFrom(TorchFunctionMode):
    """Collect ``others``: generators that a computation draws from, except known ones.

    Torch's, Python's and numpy's own are known. One seeded before its first draw is no other, in any hands. Raises
    ``KeptElsewhere``, in the computation, if torch's own get a state that neither they had since the start, nor any of
    ``devices`` has, without a known keeper of states. While the job runs under cProfile, only generators given to torch
    operators are observed.
    """

    def __init__(self, known: Iterable[Generator], devices: Iterable[torch.device]) -> None:
        super().__init__()
        self.others: list[Generator] = []
        devices = list(devices)
        given, own = list(known), list(own_generators(devices))
        self._without = [one for one in devices if not has_generators(one)]
        self._torch = {id(one) for one in own if isinstance(one, torch.Generator)}
        self._known = {id(one): one for one in (*own, *given)}
        self._keeper = any(not isinstance(one, OF_ONE_STATE) for one in given)
        self._states = {GeneratorState.of(one).content for one in own if id(one) in self._torch}
        self._mentioned: dict[int, GeneratorState] = {}
        self._read: set[CodeType] = set()
        self._outer: Any = None

    def __enter__(self) -> "DrawnFrom":
        super().__enter__()  # type: ignore[no-untyped-call]  # in torch
        self._outer = sys.getprofile()
        if self._can_profile:
            sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # in torch
        if self._can_profile:
            sys.setprofile(self._outer)
        for kept in self._mentioned.values():
            if id(kept.generator) not in self._known and kept.moved and getrefcount(kept.generator) > _OURS:
                self.others.append(kept.generator)

    @property
    def _can_profile(self) -> bool:
        """True if the current profiler can be restored: impossible for one in C, such as cProfile."""
        return self._outer is None or callable(self._outer)

    def __torch_function__(self, func: Any, types: Any, *given: Any) -> Any:
        args, kwargs = (*given, None, None)[:2]
        for one in (*(args or ()), *(kwargs or {}).values()):
            if isinstance(one, torch.Generator):
                self._used(one, "")
        return func(*(args or ()), **(kwargs or {}))

    def _profile(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            self._read_code(frame)
            return
        one, name, begins = getattr(called, "__self__", None), getattr(called, "__name__", ""), event == "c_call"
        if event not in ("c_call", "c_return") or not isinstance(one, OF_ONE_STATE) or not is_generator(one):
            return
        if id(one) not in self._torch:
            if begins:
                self._used(one, name)
        elif begins and name in _READING:
            self._states.add(GeneratorState.of(one).content)
        elif not begins and name in _SETTING and not self._keeper:
            # Known are torch's earlier states, and those of devices without generators, which draw by them.
            now, known = GeneratorState.of(one).content, map(content, states_on(self._without).values())
            if now not in self._states and now not in known:
                raise KeptElsewhere

    def _read_code(self, frame: FrameType) -> None:
        """Look for numpy's generators by name: they are compiled, and profilers see no call."""
        if frame.f_code in self._read or frame.f_code.co_filename.startswith(_TORCH):
            return
        self._read.add(frame.f_code)
        names = frame.f_code.co_names
        for one in _reach([*map(frame.f_globals.get, names), *frame.f_locals.values()], names):
            if issubclass(type(one), numpy.random.Generator | numpy.random.RandomState):
                self._mentioned.setdefault(id(one), GeneratorState.of(one))

    def _used(self, one: Generator, name: str) -> None:
        if id(one) in self._known:
            return
        self._known[id(one)] = one
        with suppress(AttributeError):  # it is just being made, and has no state yet
            GeneratorState.of(one)
            self.others += [one] if name not in _SEEDING else []


def _reach(found: Iterable[Any], names: Iterable[str]) -> Iterator[Any]:
    """Yield objects that code with ``names`` may reach: ``self.noise.generator`` lies two further."""
    met: dict[int, Any] = {}
    for _ in range(_FURTHER):
        found = [one for one in _with_members(found) if id(one) not in met and type(one) not in _PLAIN]
        met |= {id(one): one for one in found}
        yield from found
        found = [own[name] for one in found for own in _members(one) for name in names if name in own]


def _with_members(found: Iterable[Any]) -> Iterator[Any]:
    """Yield objects, the content in short lists or mappings, and the objects behind methods and partial functions.

    Only their type is asked: their own answers are code of their own, which is not run.
    """
    for one in found:
        yield one
        kind = type(one)
        if (base := next((base for base in _HOLDERS if issubclass(kind, base)), None)) is not None:
            every = dict.values(one) if base is dict else base.__iter__(one)
            yield from list(every) if base.__len__(one) <= _SHORT else ()  # at once: other threads may change it
        elif issubclass(kind, partial):
            yield from (*_with_members([one.func]), *one.args, *one.keywords.values())
        elif issubclass(kind, MethodType | BuiltinMethodType):
            yield one.__self__


def _members(one: object) -> Iterator[Mapping[str, Any]]:
    """Yield members by name: the object's, then its classes'."""
    kind = type(one)
    with suppress(AttributeError):  # it has slots, or none
        yield object.__getattribute__(one, "__dict__")
    yield from map(vars, kind.__mro__)
    yield from map(vars, one.__mro__[1:] if isinstance(one, type) else ())

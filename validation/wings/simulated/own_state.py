"""Process-wide state, separate for each simulated rank: random numbers, settings, rank numbers, packages."""

import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache, partial
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from pipeproof.core.observe.per_rank_globals import belongings, belongs_to_rank
from pipeproof.wings.simulated.torch_inside import SWITCHES
from pipeproof.worlds.settings import OF_A_PROCESS, Setting

_NOBODYS = frozenset({*sys.stdlib_module_names, "__main__", "torch", "numpy"})  # a process cannot have two
_PATCHED = ("torch", "numpy")  # other packages patch these
_CACHED = type(lru_cache(lambda: None))

Attributes = dict[int, tuple[Any, dict[str, object]]]


class SharedModule(RuntimeError):
    """A shared module refers to objects that should be separate for each rank."""

    def __init__(self, place: str, name: str, owned: str) -> None:
        super().__init__(
            f"{place}.{name} is of {owned}, which each simulated rank has of its own, and {place} is shared by all: "
            f"import {owned} where the step is written, not in it, or run this on real ranks, in World()"
        )


class OwnModules:
    """The named packages and modules, and modules that took something from them at import.

    Their patches to torch are separate for each rank, too; new ranks start with the attributes ``before``.
    """

    def __init__(self, roots: Sequence[str], before: Attributes) -> None:
        self.roots = frozenset(roots)
        self._known: dict[str, bool] = {}
        while roots and (more := {place for holder, place, *_ in self._holders() if not _is_nobodys(holder, place)}):
            self.roots |= more
            self._known.clear()
        for holder, _, name, _ in self._shared():
            _, had = before.get(id(holder), (None, {}))
            first = had.get(name, getattr(super(holder, holder), name, None) if isinstance(holder, type) else None)
            belongs_to_rank(holder, name, fresh=partial(lambda first, value: value if first is None else first, first))

    def here(self) -> dict[str, ModuleType]:
        """Return the imported modules."""
        return {name: module for name, module in sys.modules.items() if self._is_owned(name)} if self.roots else {}

    def put(self, modules: dict[str, ModuleType]) -> None:
        """Import exactly these modules."""
        for name in self.here():
            del sys.modules[name]
        sys.modules.update(modules)
        for name, parent, leaf in self._in_others:
            if (holder := sys.modules.get(parent)) is not None:
                if name in modules:
                    setattr(holder, leaf, modules[name])
                else:
                    vars(holder).pop(leaf, None)

    def check(self) -> None:
        """Raise ``SharedModule`` if a shared module holds something from these."""
        for _, place, name, of in self._shared():
            raise SharedModule(place, name, of)

    @cached_property
    def _in_others(self) -> list[tuple[str, str, str]]:
        """Return submodules, and the shared packages with them as attributes."""
        parts = [(name, *name.rpartition(".")[::2]) for name in self.roots]
        return [one for one in parts if one[1] and not self._is_owned(one[1])]

    def _shared(self) -> list[tuple[Any, str, str, str]]:
        """Return those of the holders whose attribute is not a rank's own."""
        own = {(id(one.holder), one.name) for one in belongings()}
        return [one for one in self._holders() if (id(one[0]), one[2]) not in own] if self.roots else []

    def _holders(self) -> Iterator[tuple[Any, str, str, str]]:
        """Yield holders of their objects: holder, its name, the attribute, and the module of origin.

        A package holds its own modules, which is fine.
        """
        for holder, place in _places():
            for name, value in list(vars(holder).items()) if not self._is_owned(place) else ():
                of = _origin(value)
                if self._is_owned(of) and of != f"{place}.{name}":
                    yield holder, place, name, of

    def _is_owned(self, name: str) -> bool:
        if name not in self._known:
            parents = name
            while parents and parents not in self.roots:
                parents = parents.rpartition(".")[0]
            self._known[name] = bool(parents)
        return self._known[name]


def attributes() -> Attributes:
    """Return the current attributes of torch's modules and classes, by id."""
    return {id(one): (one, dict(vars(one))) for one, place in _places() if _is_patched(place)}


def _places() -> Iterator[tuple[Any, str]]:
    """Yield all modules, and classes that others patch."""
    visited = set()
    everything: dict[str, Any] = dict(sys.modules)  # anybody may put anything there
    for place, module in everything.items():
        if not isinstance(module, ModuleType):
            continue
        yield module, place
        for name, value in list(vars(module).items()) if _is_patched(place) else ():
            if isinstance(value, type) and id(value) not in visited and _is_patched(value.__module__):
                visited.add(id(value))
                yield value, f"{place}.{name}"


def _origin(value: object) -> str:
    """Return a value's module: itself, or the module that defines it or its class."""
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, FunctionType):  # a wrapper may copy __module__
        return str(value.__globals__.get("__name__", ""))
    found = getattr(value if isinstance(value, type | _CACHED) else type(value), "__module__", None)
    return found if isinstance(found, str) else ""


def _is_patched(place: str) -> bool:
    return place.partition(".")[0] in _PATCHED


def _is_nobodys(holder: object, place: str) -> bool:
    ours = place.startswith("pipeproof.") and not place.startswith(_RANKS)
    return ours or isinstance(holder, type) or place.partition(".")[0] in _NOBODYS


_RANKS = ("pipeproof.own.", "pipeproof.wings.specimens.")  # of ours, what plays a user's part
_numpys: Any = np.random  # stubs lack the generator's setter
_VALUES: tuple[Setting, ...] = (
    (torch.get_rng_state, torch.set_rng_state),
    (random.getstate, random.setstate),
    (_numpys.get_bit_generator, _numpys.set_bit_generator),  # as an object: its state takes longer than a step
)
_SWITCHES: tuple[Setting, ...] = (  # which people set for a block of code, and ranks take turns
    *OF_A_PROCESS,
    *SWITCHES,
    (torch.get_default_dtype, torch.set_default_dtype),
)

belongs_to_rank(sys, "stdout", "stderr", fresh=lambda stream: stream)
belongs_to_rank(warnings, "filters", fresh=lambda filters: [*filters])
belongs_to_rank(warnings, "showwarning", "_showwarnmsg_impl", fresh=lambda shown: shown)


class OwnState:
    """One rank's state, or the process's own before and after a run."""

    def __init__(self, own: OwnModules) -> None:
        self._own = own
        self.leave()

    @staticmethod
    def fresh(rank: int, own: OwnModules) -> "OwnState":
        """Return the state of a new process. Entropy from the system is seeded."""
        found = OwnState(own)
        found._modules = {}
        found._values = [torch.Generator().get_state(), random.Random(rank).getstate(), np.random.MT19937(rank)]
        found._belonging = [one.fresh(one.value) for one in belongings()]
        return found

    def take(self) -> None:
        """Install this state."""
        self._own.put(self._modules)
        for (_, put), value in zip(_VALUES, self._values, strict=True):
            put(value)
        for (get, put), value in zip(_SWITCHES, self._switches, strict=True):
            if get() != value:
                put(value)
        known = belongings()
        for one, value in zip(known, self._belonging, strict=False):
            if one.within[one.name] is not value:  # most are equal, so this saves time
                one.put(value)
        for one in known[len(self._belonging) :]:  # named since, by what another rank has imported
            one.put(one.fresh(one.first))

    def leave(self) -> None:
        """Save the current state."""
        self._modules = self._own.here()
        self._values = [get() for get, _ in _VALUES]
        self._switches = [get() for get, _ in _SWITCHES]
        self._belonging = [one.within[one.name] for one in belongings()]

"""A fault while it is planted: functions in place of torch's and hooks, and how often these changed anything."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeproof.core.observe.shards import held_here


@dataclass
class Planting:
    """A fault that is planted once, for as long as a step runs.

    left: puts back what may outlive the test, as a model of its module. hits: how often it changed anything. calls: how
    often it could. memory: of calls before. hooks: take those of torch's away that it has while it is planted.
    """

    left: ExitStack = field(default_factory=ExitStack)
    hits: int = 0
    calls: int = 0
    memory: dict[Any, Any] = field(default_factory=dict)
    hooks: ExitStack = field(default_factory=ExitStack)

    def is_turn(self, at: int | None) -> bool:
        """Count a call: is it number ``at``, if not each is meant?"""
        self.calls += 1
        return at in (None, self.calls - 1)


Plant = Callable[[Planting], AbstractContextManager[object]]  # while this is open, the fault is there


@contextmanager
def replaced(name: str, call: Callable[..., Any], *holders: Any) -> Iterator[None]:
    """While this is open, ``name`` of each holder is ``call``, which gets the original before all arguments."""

    def made(original: Any) -> Callable[..., Any]:
        return lambda *given, **named: call(original, *given, **named)  # a class binds this, and no partial

    kept = [(holder, vars(holder)[name], getattr(holder, name)) for holder in holders]
    for holder, _, original in kept:
        setattr(holder, name, made(original))
    try:
        yield
    finally:
        for holder, one, _ in kept:
            setattr(holder, name, one)


def in_place_of(name: str, call: Callable[..., Any], *holders: Any) -> Plant:
    """``call`` in place of a function; it gets the fault, the original, and what that is given."""
    return lambda fault: replaced(name, partial(call, fault), *holders)


def hooked(*looks: tuple[Callable[[Any], Any], Callable[..., Any]]) -> Plant:
    """Hooks of torch's, each with what registers it; they get the fault before all arguments."""

    @contextmanager
    def plant(fault: Planting) -> Iterator[None]:
        with fault.hooks:
            for register, look in looks:
                fault.hooks.callback(register(partial(look, fault)).remove)
            yield

    return plant


def several(given: Any) -> list[Any]:
    """A tensor, or many, or none."""
    return [] if given is None else [given] if isinstance(given, Tensor) else list(given)


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether this rank has other numbers of the two, which are of one form. No other rank is asked."""
    here, there = (part.to_dense() if part.layout != torch.strided else part for part in map(held_here, (one, other)))
    return bool(((here != there) & ~(here.isnan() & there.isnan())).any())

"""A planted fault: replaced torch functions and hooks, and a count of changes."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeproof.core.observe.shards import local_tensor


@dataclass
class Planting:
    """A fault planted for the duration of a step.

    left: restores what may outlive the test, such as a model's module. hits: number of changes. calls: number of
    chances. memory: data from earlier calls. hooks: remove torch's hooks.
    """

    left: ExitStack = field(default_factory=ExitStack)
    hits: int = 0
    calls: int = 0
    memory: dict[Any, Any] = field(default_factory=dict)
    hooks: ExitStack = field(default_factory=ExitStack)

    def is_turn(self, at: int | None) -> bool:
        """Count a call; return true for number ``at``, or for each if None."""
        self.calls += 1
        return at in (None, self.calls - 1)


Plant = Callable[[Planting], AbstractContextManager[object]]  # plants the fault while open


@contextmanager
def replace_call(name: str, call: Callable[..., Any], *holders: Any) -> Iterator[None]:
    """Replace ``name`` in each holder by ``call``, which gets the original before all arguments, while open."""

    def make(original: Any) -> Callable[..., Any]:
        return lambda *given, **named: call(original, *given, **named)  # a class binds this, and no partial

    kept = [(holder, vars(holder)[name], getattr(holder, name)) for holder in holders]
    for holder, _, original in kept:
        setattr(holder, name, make(original))
    try:
        yield
    finally:
        for holder, one, _ in kept:
            setattr(holder, name, one)


def in_place_of(name: str, call: Callable[..., Any], *holders: Any) -> Plant:
    """Replace a function by ``call``, which gets the fault, the original, and the arguments."""
    return lambda fault: replace_call(name, partial(call, fault), *holders)


def plant_in_hooks(*looks: tuple[Callable[[Any], Any], Callable[..., Any]]) -> Plant:
    """Register torch hooks, given with their registrars; they get the fault before all arguments."""

    @contextmanager
    def plant(fault: Planting) -> Iterator[None]:
        with fault.hooks:
            for register, look in looks:
                fault.hooks.callback(register(partial(look, fault)).remove)
            yield

    return plant


def several(given: Any) -> list[Any]:
    """Return a tensor, several, or none in a list."""
    return [] if given is None else [given] if isinstance(given, Tensor) else list(given)


def differ(one: Tensor, other: Tensor) -> bool:
    """True if this rank's two tensors, in one form, have different numbers. Sends no messages."""
    here, there = (
        part.to_dense() if part.layout != torch.strided else part for part in map(local_tensor, (one, other))
    )
    return bool(((here != there) & ~(here.isnan() & there.isnan())).any())

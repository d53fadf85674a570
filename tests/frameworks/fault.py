"""A fault that is planted in a framework, and what is to be said of it."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

Plant = Callable[[ExitStack], None]


@dataclass(frozen=True)
class Fault:
    """A fault, a layout that shows it, and what the verdict is to say: a kind of cause, and all places that have it."""

    plant: Plant
    layout: Any
    kind: str
    places: tuple[str, ...] = ("everywhere",)


def patched(stack: ExitStack, place: Any, name: str, wrong: Callable[..., Any]) -> None:
    """Put ``wrong``, which is given the right one first, in its place."""
    stack.enter_context(mock.patch.object(place, name, partial(wrong, getattr(place, name))))

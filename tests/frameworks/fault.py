"""A fault that is planted in a framework, and what is to be said of it."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

from pipeproof import StepResult
from pipeproof.core.verdict import Verdict

Plant = Callable[[ExitStack], None]


@dataclass(frozen=True)
class Fault:
    """A fault, a layout that shows it, and what the verdict is to say: a kind of cause, and all places that have it."""

    plant: Plant
    layout: Any
    kind: str
    places: tuple[str, ...] = ("everywhere",)


def patched(stack: ExitStack, place: Any, name: str, wrong: Callable[..., Any]) -> None:
    """Put ``wrong``, which is given the right one first, and then the object of a method, in its place."""
    right = getattr(place, name)
    stack.enter_context(mock.patch.object(place, name, lambda *given, **named: wrong(right, *given, **named)))


def in_place_of(place: Any, name: str) -> Callable[[Callable[..., Any]], Plant]:
    """Make a fault of a function, as ``patched`` puts it there."""
    return lambda wrong: lambda stack: patched(stack, place, name, wrong)


def left_out(place: Any, name: str) -> Plant:
    """A fault: what this does is not done."""
    return in_place_of(place, name)(lambda *_, **__: None)


def planted(plant: Plant, step: Callable[..., StepResult], *given: Any) -> StepResult:
    """What ``step`` of these gives with a fault."""
    with ExitStack() as stack:
        plant(stack)
        return step(*given)


def named(verdict: Verdict) -> tuple[str, list[tuple[str, str]]]:
    """The outcome, and all causes with their places, the likeliest first."""
    return verdict.outcome, [(cause.kind, cause.place) for cause in verdict.causes]


def passed(verdict: Verdict) -> set[str]:
    """The laws that were held."""
    return {law.name for law in verdict.laws if law.outcome == "pass"}

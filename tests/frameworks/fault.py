"""A fault that is planted in a framework, and what is to be said of it."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
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
    """Put ``wrong``, which is given the right one first, in its place."""
    stack.enter_context(mock.patch.object(place, name, partial(wrong, getattr(place, name))))


def method(stack: ExitStack, kind: type, name: str, wrong: Callable[..., Any]) -> None:
    """Put ``wrong``, which is given the right method and its object first, in its place."""
    right = getattr(kind, name)
    stack.enter_context(mock.patch.object(kind, name, lambda *given, **named: wrong(right, *given, **named)))


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

"""How a user's function goes through several operations, and what is said where it does not."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pipeproof.foreign.handed_back import HandBackError
from pipeproof.foreign.operations import Operation, Operations

DUE = [Operation("train", [1]), Operation("eval", [2])]


def through(step: Callable[[Operations], Any]) -> tuple[list[object], list[int]]:
    """What was handed back, and the operations that began."""
    begun: list[int] = []
    operations = Operations(DUE, begun.append, step="step")
    return list(operations.handed_back(step(operations))), begun


def test_each_operation_begins_when_it_is_asked_for() -> None:
    seen: list[Any] = []

    def step(operations: Operations) -> Iterator[Any]:
        seen.append("set up")
        for operation, microbatches in operations:
            seen.append((operation, microbatches))
            yield operation
        seen.append("after")

    assert through(step) == (["train", "eval"], [0, 1])
    assert seen == ["set up", ("train", [1]), ("eval", [2]), "after"]


def plain(operations: Operations) -> Any:
    return "modules", "losses"


def all_at_once(operations: Operations) -> Iterator[Any]:
    yield from list(operations)


def too_few(operations: Operations) -> Iterator[Any]:
    for operation, _ in operations:
        yield operation
        return


def too_many(operations: Operations) -> Iterator[Any]:
    for operation, _ in operations:
        yield operation
        yield operation


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (plain, "step returned a tuple; with operations= it yields what it made of each"),
        (all_at_once, "step asked for another operation before it handed back operation 1: it yields"),
        (too_few, "step handed back 1 of 2 operations"),
        (too_many, "step handed back more than its operations"),
    ],
)
def test_what_goes_through_them_otherwise_is_told_so(step: Callable[[Operations], Any], sentence: str) -> None:
    with pytest.raises(HandBackError, match=sentence):
        through(step)

"""How often operations are judged."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from pipeproof.core.judge import Judge


@contextmanager
def counting_judgements() -> Iterator[list[int]]:
    """While this is open, the numbers of operations that are judged are noted, one after another."""
    found: list[int] = []
    inner = Judge._operation

    def counted(judge: Judge, number: int) -> None:
        found.append(number)
        inner(judge, number)

    with mock.patch.object(Judge, "_operation", counted):
        yield found

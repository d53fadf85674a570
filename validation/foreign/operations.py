"""The operations of a run that has several, as a user's function goes through them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pipeproof.foreign.handed_back import HandBackError

_HOW = "it yields what it made of each, as: for operation, microbatches in operations: ...; yield stage, losses"


class Operation(NamedTuple):
    """One operation: ``train``, ``accumulate`` or ``eval``, and this rank's microbatches."""

    name: str
    microbatches: list[Any]


class Operations:
    """An iterator of the ``due`` operations; before it gives one, it calls ``begins`` with its number, from 0.

    ``step``: what the function that goes through it is called.
    """

    def __init__(self, due: Sequence[Operation], begins: Callable[[int], None], *, step: str) -> None:
        self._due, self._begins, self._step = due, begins, step
        self._begun = self._made = 0

    def __iter__(self) -> Iterator[Operation]:
        return self

    def __next__(self) -> Operation:
        if self._begun > self._made:
            raise HandBackError(
                f"{self._step} asked for another operation before it handed back operation {self._begun}: {_HOW}"
            )
        if self._begun == len(self._due):
            raise StopIteration
        self._begins(self._begun)
        self._begun += 1
        return self._due[self._begun - 1]

    def handed_back(self, results: object) -> Iterator[object]:
        """What was handed back of each operation; ``results``: what the function gave that goes through them.

        Raises ``HandBackError`` where that is not one thing for each operation.
        """
        __tracebackhide__ = True
        if not isinstance(results, Iterator):
            raise HandBackError(f"{self._step} returned a {type(results).__name__}; with operations= {_HOW}")
        for result in results:
            if self._made == self._begun:
                raise HandBackError(f"{self._step} handed back more than its operations: {_HOW}")
            self._made += 1
            yield result
        if self._made < len(self._due):
            raise HandBackError(f"{self._step} handed back {self._made} of {len(self._due)} operations: {_HOW}")

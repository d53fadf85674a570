"""Common parts of schedules over a V: rank r holds stages r (chunk 0) and 2P-1-r (chunk 1), down and up again."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from pipeproof.pipeline.action import Action, Kind


def placement(ranks: int) -> tuple[int, ...]:
    """Ranks of the 2P stages."""
    return (*range(ranks), *reversed(range(ranks)))


class Row:
    """A rank's growing list: ``run("F0 B1")`` appends chunk 0's next forward and chunk 1's next backward.

    ``W``: the weight gradient for the oldest input gradient without one; ``W0``: the same in chunk 0.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.actions: list[Action] = []
        self._stages = (rank, 2 * ranks - 1 - rank)
        self._done: Counter[tuple[str, int]] = Counter()
        self._waiting: deque[tuple[int, int]] = deque()

    def run(self, steps: str, times: int = 1) -> None:
        """Append ``steps``, ``times`` times."""
        for step in steps.split() * times:
            self._append(step)

    def _append(self, step: str) -> None:
        letter = step[0]
        if letter == "W":
            wanted = [work for work in self._waiting if step in ("W", f"W{work[0]}")]
            if wanted:
                self._waiting.remove(wanted[0])
                chunk, microbatch = wanted[0]
                self.actions.append(Action(self._stages[chunk], Kind.BACKWARD_WEIGHT, microbatch))
            return
        chunk = int(step[1])
        direction = "F" if letter == "F" else "B"
        microbatch = self._done[direction, chunk]
        self._done[direction, chunk] += 1
        self.actions.append(Action(self._stages[chunk], Kind(letter), microbatch))
        if letter == "I":
            self._waiting.append((chunk, microbatch))


def below(limit: int, actions: Iterable[Action]) -> Iterator[Action]:
    """Keep actions for microbatches 0..limit-1."""
    return (action for action in actions if action.microbatch < limit)

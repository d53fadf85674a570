"""A fault that is planted: how often it changed anything, and what it leaves changed."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Planted:
    """Called whenever the fault changes anything. What lasts longer than a test is put back when that has ended."""

    hits: int = 0
    _left: list[Callable[[], object]] = field(default_factory=list)

    def __call__(self) -> None:
        self.hits += 1

    def leaves(self, put_back: Callable[[], object]) -> None:
        """It changed what may be there after the test, as a model of its module: this puts that back."""
        self._left.append(put_back)

    def end(self) -> None:
        """The test has ended: put back what it left changed."""
        while self._left:
            self._left.pop()()

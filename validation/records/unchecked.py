"""A step that is not checked: it runs as it would, and there is no verdict."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from pipeproof.core.verdict import Verdict
from pipeproof.foreign.handed_back import Gradient
from pipeproof.pipeline.step import Parts
from pipeproof.records.checked_step import CheckedStep, CheckError
from pipeproof.worlds.rank_report import RankReport


class Unchecked(CheckedStep):
    """In place of a check where it is another step's turn: nothing is looked at, and no rank waits for another."""

    def __init__(self) -> None:
        super().__init__({}, None, laws=())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """There is nothing to conclude."""

    @property
    def due(self) -> bool:
        return False

    @property
    def verdict(self) -> Verdict:
        raise CheckError("this step was not checked: ask check.due before its verdict")

    def gradients(self, named: Mapping[str, Gradient] | None = None) -> None:
        """Nothing is compared."""

    def report(
        self,
        *,
        losses: Sequence[float] | None = None,
        loss: float | None = None,
        norm: float | None = None,
    ) -> None:
        """Nothing is compared."""

    def begin(self, gradients: Mapping[str, Gradient]) -> None:
        """Nothing is compared."""

    def wrap(self, parts: Parts) -> Parts:
        return parts

    def _begin(self) -> str:
        return ""

    def _finish(self) -> None:
        """Nothing was compared."""

    def _part(self, about: RankReport) -> None:
        """Nobody asks."""

    def _concluded(self, parts: Sequence[object]) -> Verdict:
        raise AssertionError("a step that is not checked has no verdict")

    def _clear(self) -> None:
        """Nothing was laid out."""

"""A step compared with itself on its turn; an unchecked step runs as usual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from pipeproof.core.contract import DEFAULTS, Contract
from pipeproof.core.verdict import Verdict
from pipeproof.records.checked_step import CheckedStep, CheckError
from pipeproof.whitebox.handed_back import Gradient
from pipeproof.worlds.rank_report import RankReport

if TYPE_CHECKING:
    from torch import nn

    from pipeproof.pipeline.step import Parts
    from pipeproof.records.rank_part import Rename
    from pipeproof.records.step_expectation import StepExpectation
    from pipeproof.records.step_record import Pairs


class Unchecked(CheckedStep):
    """A placeholder on another step's turn: no comparison, and no wait between ranks."""

    def __init__(self) -> None:
        super().__init__({}, None, laws=())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Conclude nothing."""

    @property
    def active(self) -> bool:
        return False

    @property
    def verdict(self) -> Verdict:
        raise CheckError("this step was not checked: ask check.active before its verdict")

    def gradients(self, named: Mapping[str, Gradient] | None = None) -> None:
        """Compare nothing."""

    def report(
        self,
        *,
        losses: Sequence[float] | None = None,
        loss: float | None = None,
        norm: float | None = None,
    ) -> None:
        """Compare nothing."""

    def begin(self, gradients: Mapping[str, Gradient]) -> None:
        """Compare nothing."""

    def wrap(self, parts: Parts) -> Parts:
        return parts

    def _begin(self) -> str:
        return ""

    def _finish(self) -> None:
        """Finish nothing."""

    def _part(self, about: RankReport) -> None:
        """Return nothing: no rank asks."""

    def _conclude(self, parts: Sequence[object]) -> Verdict:
        raise AssertionError("a step that is not checked has no verdict")

    def _clear(self) -> None:
        """Withdraw nothing."""


def check_of(
    against: StepExpectation,
    modules: nn.Module | Mapping[int, nn.Module],
    microbatches: Pairs | None,
    *,
    rename: Rename,
    operation: int,
    timeout_s: float,
) -> CheckedStep:
    """Return the check by ``against`` on this step's turn; else a placeholder. Arguments as for ``check_step``."""
    if (turn := against.turn()) is None:
        return Unchecked()
    check = against.check_of(modules, microbatches, rename=rename, timeout_s=timeout_s, turn=turn)
    if operation:
        check.refuse(f"operation is {operation}: a step that is held against itself is one, so leave operation= out")
    said = against.contract if isinstance(against.contract, Contract) else DEFAULTS
    for word, cure in (
        ("names", "give rename=, from stage and name"),
        ("stages", "its modules are given by their numbers"),
    ):
        if getattr(said, word):
            check.refuse(f"{word} of the contract is not read by check_step: {cure}")
    return check

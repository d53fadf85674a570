"""Common behaviour of step checks in a running job: begin on all ranks, share the verdict, and end no job."""

from __future__ import annotations

import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torch import nn

from pipeproof.core.contract import ContractError
from pipeproof.core.ledger import Ledger
from pipeproof.core.observe.wrappers import AroundGradients
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import Crash, Verdict
from pipeproof.pipeline.waiting import DEFAULT_TIMEOUT_S
from pipeproof.records.as_given import pairs_of, require_names, stages_of
from pipeproof.records.rank_part import Arrival, RankStages, Rename, Run, own_name
from pipeproof.records.record import ContentError, RecordError, microbatch_digests
from pipeproof.records.step_parts import not_compared
from pipeproof.records.step_record import Pairs
from pipeproof.reference.unsharded import let_go
from pipeproof.whitebox.handed_back import Gradient
from pipeproof.whitebox.task import WhiteBoxError
from pipeproof.worlds.rank_report import Ending, RankReport
from pipeproof.worlds.side_store import Exchange, RanksAbsent, exchange
from pipeproof.worlds.timeout import END_S, seconds

if TYPE_CHECKING:
    from pipeproof.pipeline.step import Parts


class CheckError(ValueError):
    """A check in the wrong order."""


class CheckedStep(ABC):
    """A context manager around a step in a job. Every rank enters it.

    Call ``gradients`` between backward and clipping, and ``report`` anywhere. After the block there is a ``verdict``.
    """

    def __init__(
        self,
        modules: nn.Module | Mapping[int, nn.Module],
        microbatches: Pairs | None,
        *,
        laws: Sequence[str],
        rename: Rename = own_name,
        timeout_s: float = 300.0,
    ) -> None:
        """``laws``: all laws that it may compare. Further arguments follow ``check_step``."""
        self._modules, self._rename = modules, rename
        self._given = microbatches
        self._timeout_s, self._bound_s = timeout_s, DEFAULT_TIMEOUT_S
        self._own = RankStages({}, own_name)  # until the user's input is valid
        self._ledger = Ledger(laws)
        self._no_norm = ""  # why this rank withholds its norm
        self._problem = ""  # of this rank, with the user's input
        self._crash: Crash | None = None  # of this rank, which ends no job
        self._obstacle = ""  # why there is nothing to compare
        self._absent: RanksAbsent | None = None  # the missing ranks
        self._verdict: Verdict | None = None
        self._run = Run((0,), (), (None,))

    def __enter__(self) -> Self:
        self._began = perf_counter()
        self._exchange: Exchange = exchange()
        with self.noting():
            try:
                self._obstacle = self._begin()
            except RanksAbsent as absent:
                self._absent = absent
        return self

    def refuse(self, why: str) -> None:
        """Say why this rank's part cannot be judged, before or in the block: then the step stays unknown."""
        self._problem = self._problem or Reason.USE.doubt(why)

    @property
    def active(self) -> bool:
        """True if this check judges the step: some judge only every n-th."""
        return True

    @property
    def verdict(self) -> Verdict:
        """Verdict of all ranks together, equal on each. Raises ``CheckError`` before the end of the block."""
        if self._verdict is None:
            raise CheckError("the verdict is known at the end of the with block, on every rank")
        return self._verdict

    @abstractmethod
    def gradients(self, named: Mapping[str, Gradient] | None = None) -> None:
        """Compare this rank's gradients now, complete and before clipping.

        ``named``: gradients by the names of parameters in the whole model, or in the record, for a runtime that does
        not keep them in ``.grad``. Parts, in a DTensor or a ``FlatShard``, are joined at the end of the block. If ranks
        of a stage have a ``FlatShard``, an omitted gradient means no part.
        """

    @abstractmethod
    def report(
        self,
        *,
        losses: Sequence[float] | None = None,
        loss: float | None = None,
        norm: float | None = None,
    ) -> None:
        """Compare this rank's results: microbatch losses, undivided; their total; the norm.

        ``losses`` come in the order of the microbatches given to the check.
        """

    @abstractmethod
    def begin(self, gradients: Mapping[str, Gradient]) -> None:
        """Declare initial gradients, by the model's names: content from before the step."""

    def miss_norm(self, why: str) -> None:
        """Say why the rank withholds its norm."""
        self._no_norm = why

    def wrap(self, parts: Parts) -> Parts:
        """Hook into ``PipelineSchedule.wrap``: its steps then call ``gradients`` themselves, at the right moment."""
        return look_at(parts, self.gradients)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Catch errors and report them to all ranks at the end: the check failed, not the job."""
        try:
            yield
        except (RecordError, ContentError, WhiteBoxError, ContractError) as error:
            self._problem = self._problem or Reason.USE.doubt(str(error))
        except Exception as error:  # no one type, and no reason to end a job
            self._crash = self._crash or Crash.of(error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            with self.noting():
                self._finish()
        ending = Ending.FINISHED if error is None else Ending.RAISED
        message = "" if error is None else f"{type(error).__name__}: {error}"
        mine = self._part(RankReport(self._exchange.rank, ending, message))
        what = "the end of the checked step"
        bound_s = self._bound_s if error is None else min(self._bound_s, END_S)
        try:
            parts = self._exchange.finish(mine, what=what, bound_s=bound_s)
        except RanksAbsent as absent:
            parts, self._absent = [mine], self._absent or absent
        try:
            self._verdict = self._conclude(parts)
        except Exception as crash:  # no one type, and no reason to end a job
            blank = not_compared(_crash(Crash.of(crash)))
            self._verdict = replace(blank, traceback=Crash.of(crash).traceback)
        self._clear()

    @abstractmethod
    def _begin(self) -> str:
        """Agree on an expectation; return obstacles to a comparison, in sentences, or nothing."""

    @abstractmethod
    def _finish(self) -> None:
        """Compare results after a regular end of the step."""

    @abstractmethod
    def _part(self, about: RankReport) -> Any:
        """Return this rank's part for all ranks; ``about``: how its step ended."""

    @abstractmethod
    def _conclude(self, parts: Sequence[Any]) -> Verdict:
        """Judge the parts of all ranks present."""

    @abstractmethod
    def _clear(self) -> None:
        """Withdraw published data."""

    @property
    def _why(self) -> str:
        """Obstacles to a comparison on this rank, or nothing."""
        return self._problem or ("" if self._crash is None else _crash(self._crash))

    def _take_given(self) -> None:
        """Accept the user's input. Raises ``RecordError`` if invalid."""
        try:
            self._bound_s = seconds(self._timeout_s)
        except ValueError as error:
            raise RecordError(str(error)) from None
        stages = stages_of(self._modules, self._exchange.rank)
        for module in stages.values():
            let_go(module)
        self._own = RankStages(stages, require_names(self._rename))
        self._given = pairs_of(self._given)
        self._own.check_names()

    def _arrivals(self) -> list[Arrival]:
        """Gather all arrivals, including this rank's. Raises ``RanksAbsent``."""
        digests: tuple[str, ...] | None = None
        places: dict[str, int] = {}
        shards = {}
        with self.noting():
            if not self._why:
                digests = None if self._given is None else microbatch_digests(self._given)
                places, shards = self._own.places, self._own.shards
        return self._gather(Arrival(places, digests, self._why, shards), "the beginning of the checked step")

    def _timed(self, verdict: Verdict) -> Verdict:
        """Return ``verdict`` with the line to run the step again, and how long the check took."""
        rerun = f"torchrun --nproc-per-node {self._exchange.ranks} {shlex.join(sys.argv)}"
        return replace(verdict, rerun=rerun, seconds=perf_counter() - self._began)

    def _gather(self, value: object, what: str) -> list[Any]:
        return self._exchange.gather(value, what=what, bound_s=self._bound_s)


class Unchecked(CheckedStep):
    """A placeholder on another step's turn: no comparison, and no wait between ranks."""

    def __init__(self) -> None:
        super().__init__({}, None, laws=())

    def __enter__(self) -> Self:
        return self

    @property
    def active(self) -> bool:
        return False

    @property
    def verdict(self) -> Verdict:
        raise CheckError("this step was not checked: ask check.active before its verdict")

    def wrap(self, parts: Parts) -> Parts:
        return parts

    def _nothing(self, *_: Any, **__: Any) -> Any:
        """Compare, gather and conclude nothing."""

    __exit__ = gradients = report = begin = _begin = _finish = _part = _conclude = _clear = _nothing


def _crash(crash: Crash) -> str:
    return Reason.CRASH.doubt(f"the check raised {crash.said}")


def look_at(parts: Parts, look: Callable[[], None]) -> Parts:
    """Make ``parts`` call ``look`` between tied reduction and clipping."""
    return replace(parts, gradients=_LookedAt(parts, look))


class _LookedAt(AroundGradients):
    def __init__(self, parts: Parts, look: Callable[[], None]) -> None:
        super().__init__(parts.gradients, parts.stages)
        self._look = look

    def reduce_tied(self) -> None:
        self.inner.reduce_tied()
        self._look()

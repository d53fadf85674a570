"""What every check of a step in a running job is: it begins on all ranks, tells nobody but them, and ends no job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from pipeproof.records.as_given import bound_of, named_by, pairs_of, stages_of
from pipeproof.records.rank_part import Arrival, RankStages, Rename, Run, own_name
from pipeproof.records.record import ContentError, RecordError, microbatch_digests
from pipeproof.records.step_parts import not_compared
from pipeproof.records.step_record import Pairs
from pipeproof.reference.unsharded import let_go
from pipeproof.whitebox.handed_back import Gradient
from pipeproof.whitebox.task import WhiteBoxError
from pipeproof.worlds.rank_report import Ending, RankReport
from pipeproof.worlds.side_store import Exchange, RanksAbsent, exchange
from pipeproof.worlds.timeout import END_S

if TYPE_CHECKING:
    from pipeproof.pipeline.step import Parts


class CheckError(ValueError):
    """A check that is used in the wrong order."""


class CheckedStep(ABC):
    """A context manager around one step of a job. Every rank enters it.

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
        """``laws`` are what may be compared. All else is as for ``check_step``."""
        self._modules, self._rename = modules, rename
        self._given = microbatches
        self._timeout_s, self._bound_s = timeout_s, DEFAULT_TIMEOUT_S
        self._own = RankStages({}, own_name)  # as long as nobody knows that what was given is of use
        self._ledger = Ledger(laws)
        self._no_norm = ""  # why, where this rank was told one and reports none
        self._problem = ""  # of this rank, with what was given
        self._crash: Crash | None = None  # of this rank, which ends no job
        self._obstacle = ""  # why there is nothing to compare
        self._absent: RanksAbsent | None = None  # who did not come
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
        """Say why this rank's part cannot be judged, before the block or in it: the step is unknown then."""
        self._problem = self._problem or Reason.USE.doubt(why)

    @property
    def due(self) -> bool:
        """Whether this step is checked: of some, only one of so many is."""
        return True

    @property
    def verdict(self) -> Verdict:
        """The verdict of all ranks together, the same on each. Raises ``CheckError`` before the end of the block."""
        if self._verdict is None:
            raise CheckError("the verdict is known at the end of the with block, on every rank")
        return self._verdict

    @abstractmethod
    def gradients(self, named: Mapping[str, Gradient] | None = None) -> None:
        """Compare this rank's gradients now: they must be complete, and not clipped yet.

        ``named``: gradients by the names of parameters in the whole model, for a runtime that does not keep them in
        ``.grad``.
        """

    @abstractmethod
    def report(
        self,
        *,
        losses: Sequence[float] | None = None,
        loss: float | None = None,
        norm: float | None = None,
    ) -> None:
        """Compare what this rank knows: the losses of its microbatches, undivided; what they are together; the norm.

        ``losses`` come in the order in which microbatches were given to the check.
        """

    @abstractmethod
    def begin(self, gradients: Mapping[str, Gradient]) -> None:
        """Say what gradients will be added to, by the model's names: what is there by then is no part of the step."""

    def moved(self, stages: Iterable[int]) -> frozenset[int]:
        """Those of ``stages`` whose weights are known to be others than those that the step began with."""
        return frozenset()

    def miss_norm(self, why: str) -> None:
        """Say why this rank does not report the norm that it was told."""
        self._no_norm = why

    def wrap(self, parts: Parts) -> Parts:
        """For ``PipelineSchedule.wrapped``: its steps then call ``gradients`` themselves, at the right moment."""
        return looked_at(parts, self.gradients)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Keep what is raised inside for all ranks to know in the end: it is the check that failed, and not the job."""
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
            self._verdict = self._concluded(parts)
        except Exception as crash:  # no one type, and no reason to end a job
            blank = not_compared(_crash(Crash.of(crash)))
            self._verdict = replace(blank, traceback=Crash.of(crash).traceback)
        self._clear()

    @abstractmethod
    def _begin(self) -> str:
        """Agree on what is expected; what stands in the way of a comparison, in sentences, or nothing."""

    @abstractmethod
    def _finish(self) -> None:
        """Compare what the step has left, where it has ended as it should."""

    @abstractmethod
    def _part(self, about: RankReport) -> Any:
        """What all ranks are to know of this one, ``about`` how its step ended."""

    @abstractmethod
    def _concluded(self, parts: Sequence[Any]) -> Verdict:
        """The verdict that follows from the parts of all ranks that came."""

    @abstractmethod
    def _clear(self) -> None:
        """Take back what was laid out for others."""

    @property
    def _why(self) -> str:
        """What stands in the way of a comparison on this rank, or nothing."""
        return self._problem or ("" if self._crash is None else _crash(self._crash))

    def _take_given(self) -> None:
        """Take what the user gave. Raises ``RecordError`` for what is of no use."""
        self._bound_s = bound_of(self._timeout_s)
        stages = stages_of(self._modules, self._exchange.rank)
        for module in stages.values():
            let_go(module)
        self._own = RankStages(stages, named_by(self._rename))
        self._given = pairs_of(self._given)
        self._own.check_names()

    def _arrivals(self) -> list[Arrival]:
        """What all ranks bring, where this one brings what was taken. Raises ``RanksAbsent``."""
        digests: tuple[str, ...] | None = None
        places: dict[str, int] = {}
        shards = {}
        with self.noting():
            if not self._why:
                digests = None if self._given is None else microbatch_digests(self._given)
                places, shards = self._own.places, self._own.shards
        return self._gather(Arrival(places, digests, self._why, shards), "the beginning of the checked step")

    def _gather(self, value: object, what: str) -> list[Any]:
        return self._exchange.gather(value, what=what, bound_s=self._bound_s)


def _crash(crash: Crash) -> str:
    return Reason.CRASH.doubt(f"the check raised {crash.said}")


def looked_at(parts: Parts, look: Callable[[], None]) -> Parts:
    """``parts`` that have somebody ``look`` at gradients between the tied reduction and the clipping."""
    return replace(parts, gradients=_LookedAt(parts, look))


class _LookedAt(AroundGradients):
    def __init__(self, parts: Parts, look: Callable[[], None]) -> None:
        super().__init__(parts.gradients, parts.stages)
        self._look = look

    def reduce_tied(self) -> None:
        self.inner.reduce_tied()
        self._look()

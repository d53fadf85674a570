"""Run a function on several ranks and get every rank's result, wherever the ranks are."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self, TypeVar, cast

from pipeproof.extensions import extension
from pipeproof.worlds.accelerator import refusal, split
from pipeproof.worlds.kinds import KINDS, REAL
from pipeproof.worlds.launcher import under_torchrun
from pipeproof.worlds.processes import Processes
from pipeproof.worlds.rank_report import Ending, NeedsMoreRanks, RankFailed, RankReport, WorldError, culprit_of
from pipeproof.worlds.shipping import FIRST, pack, unpack, unshippable
from pipeproof.worlds.timeout import seconds
from pipeproof.worlds.worker import RankContext

if TYPE_CHECKING:
    from pipeproof.pipeline.transports import Transport

__all__ = ["NeedsMoreRanks", "RankContext", "RankFailed", "RankReport", "World", "WorldError"]

Result = TypeVar("Result")


class Place(Protocol):
    """Where ranks are: each does its part of a packed job, and there is one report of each, in rank order."""

    def run(
        self, order: bytes, *, label: str, ranks: int, timeout_s: float, meanwhile: Iterable[object]
    ) -> Sequence[RankReport]: ...

    def close(self) -> None: ...


class Decision(Protocol):
    """What decides a run where the machine does not: a seed, say.

    ``decider``: who does, in words. ``options``, ``pytest_options``: how a command line and pytest's say all of it.
    """

    @property
    def transport(self) -> "Transport": ...
    @property
    def first(self) -> object: ...
    @property
    def decider(self) -> str: ...
    @property
    def options(self) -> str: ...
    @property
    def pytest_options(self) -> str: ...


class World:
    """Ranks to run functions on.

    Under torchrun they are the ranks that it started, and every one of them must call ``run`` alike; anywhere else they
    are processes of this machine, started when first needed and used again. A world is not for several threads.

    Other kinds of worlds are subclasses, in which something else than the machine may decide how a run goes.
    ``own_modules``: packages that keep a rank's state, which ranks that share a process have one each of.
    ``seed_option``: pytest's, where a replay of a test has to say it.
    """

    kind = REAL

    def __init__(
        self,
        *,
        device: str = "cpu",
        timeout_s: float = 120.0,
        silent: bool = False,
        most_groups: int | None = None,
    ) -> None:
        """``device``: of a type such as ``cpu`` or ``cuda``, which the ranks of a host share in turn, or ``cuda:0``, on
        which they all are. ``timeout_s`` bounds each run, in seconds. Others raise ValueError.

        ``silent``: what ranks print is not shown, but for the last lines of one that dies. ``most_groups``: processes
        in which jobs have left more process groups than this are replaced after a run, and what jobs changed there is
        gone; None: never. A group cannot be ended for torch caches what uses it, and each of gloo's keeps two threads.
        Not under torchrun.
        """
        if why := refusal(split(device)[0]):
            raise ValueError(why)
        self.device = device
        self.timeout_s = seconds(timeout_s)
        self.seed_option = ""
        self.own_modules: frozenset[str] = frozenset()
        self._silent = silent
        self._most_groups = most_groups
        self._place: Place | None = None

    @property
    def decision(self) -> Decision | None:
        """What decides the next run; None where the machine does."""
        return None

    @property
    def searches(self) -> bool:
        """Whether a case is to be run in more than one way."""
        return False

    @property
    def searched(self) -> str:
        """What the search was, in a sentence; empty where there was none."""
        return ""

    def decide(self, decision: Any) -> None:
        """Let ``decision`` say what decides the next runs."""
        raise AssertionError(f"the machine decides about real ranks, and not {decision}")

    def set_transport(self, transport: "Transport") -> None:
        """Let messages of the next runs go by the rules of ``transport``."""
        raise AssertionError(f"messages of real ranks go as they do, and not by {transport}")

    def interleavings(self) -> Iterator[None]:
        """Once for each way in which a case is to be run, which is then this world's: real ranks have one."""
        yield

    def reduce(self, fails: Callable[[], bool]) -> None:
        """Leave in this world the least of what decides its runs with which ``fails`` still is true."""

    def complete(self, verdict: Any) -> Any:
        """``verdict``, which is on the last run, with what else this world knows of that."""
        return verdict

    def run(
        self,
        job: Callable[..., Result],
        *args: object,
        ranks: int,
        timeout_s: float | None = None,
        meanwhile: Iterable[object] = (),
    ) -> list[Result]:
        """Call ``job(context, *args)`` on each of ``ranks`` ranks: the results in rank order, the same list everywhere.

        Job, arguments and results travel as bytes, so closures are welcome. Let results be on the CPU. What a job
        changes stays on its rank, also for later jobs there: a default dtype, say.

        timeout_s: bounds this run. meanwhile: work of the caller's own, step by step, for which busy ranks may leave
        room. Some of it is done, none, or all. Keep steps short: ranks are looked after between two of them. What a
        step raises ends the run.

        Raises ``WorldError`` for a job that cannot travel, and ``NeedsMoreRanks`` where a launcher started fewer.
        Raises ``RankFailed``, culprit first, if a rank raises, dies, or has not finished when the bound is reached.
        Raises the skip if every rank skips for one reason.
        """
        __tracebackhide__ = True  # in a test's traceback the test's own line is what matters
        if ranks < 1:
            raise ValueError(f"a job runs on at least 1 rank, not {ranks}")
        bound_s = self.timeout_s if timeout_s is None else seconds(timeout_s)
        order = _order(job, args)
        if self._place is None:
            self._place = self._started()
        return _results(self._place.run(order, label=_label(job), ranks=ranks, timeout_s=bound_s, meanwhile=meanwhile))

    def _started(self) -> Place:
        if under_torchrun():
            from pipeproof.worlds.torchrun import Torchrun  # elsewhere nothing of it is needed

            return Torchrun(self.device, silent=self._silent)
        return Processes(self.device, silent=self._silent, most_groups=self._most_groups)

    def close(self) -> None:
        """End the processes of this world, whatever they do, within a bound. A later run starts fresh ones."""
        if self._place is not None:
            self._place.close()
            self._place = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_world(kind: str, **options: Any) -> World:
    """A world of this kind, of which ``options`` are its own. Raises ValueError for a kind that there is not."""
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}: expected {' or '.join(KINDS)}")
    make: Callable[..., World] = World if kind == REAL else cast("Callable[..., World]", extension("worlds", kind))
    return make(**options)


def _order(job: Callable[..., object], arguments: tuple[object, ...]) -> bytes:
    """The job as bytes. Raises ``WorldError`` where something in it cannot leave this process."""
    try:
        return pack((sys.path, FIRST, pack((job, arguments))))
    except Exception as error:  # no one type: every object has its own way to refuse
        told = f"the job cannot be sent to the ranks: {type(error).__name__}: {error}"
        raise WorldError(told + unshippable((job, *arguments))) from error


def _label(job: Callable[..., object]) -> str:
    named = job if hasattr(job, "__qualname__") else type(job)  # a functools.partial has no name of its own
    return f"{named.__module__}.{named.__qualname__}"


def _results(answers: Sequence[RankReport]) -> list[Any]:
    __tracebackhide__ = True
    if not any(answer.failed for answer in answers):
        return [_result(answer) for answer in answers]
    reports = [replace(answer, payload=b"") for answer in answers]  # who catches the error keeps no results
    if len({report.message for report in reports}) == 1 and all(r.ending is Ending.SKIPPED for r in reports):
        _skip(reports[0].message)
    raise RankFailed(reports, _cause(answers[culprit_of(reports)]))


def _result(answer: RankReport) -> object:
    try:
        return unpack(answer.payload)
    except Exception as error:  # no one type: an object's own code runs when it is unpacked
        raise WorldError(f"the result of rank {answer.rank} cannot be read here: {error!r}") from error


def _cause(answer: RankReport) -> ValueError | None:
    try:
        cause = unpack(answer.payload) if answer.payload else None
    except Exception:  # an exception whose constructor wants more than it kept; the report has its text
        return None
    return cause if isinstance(cause, ValueError) else None


def _skip(reason: str) -> NoReturn:
    __tracebackhide__ = True
    import pytest  # a job that skips has imported it; a world outside tests does without

    raise pytest.skip.Exception(reason, _use_item_location=True)

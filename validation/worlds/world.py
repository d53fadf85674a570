"""Run a function on several ranks and return every rank's result, wherever ranks live."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, cast

from pipeproof.extensions import extension
from pipeproof.worlds.accelerator import refusal, split
from pipeproof.worlds.kinds import KINDS, REAL
from pipeproof.worlds.launcher import under_torchrun
from pipeproof.worlds.processes import Processes
from pipeproof.worlds.rank_report import Ending, NeedsMoreRanks, RankFailed, RankReport, WorldError, culprit_of
from pipeproof.worlds.shipping import pack_job, unpack, unshippable
from pipeproof.worlds.timeout import seconds
from pipeproof.worlds.worker import RankContext

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from pipeproof.pipeline.transports import Transport

__all__ = ["NeedsMoreRanks", "RankContext", "RankFailed", "RankReport", "World", "WorldError"]

Result = TypeVar("Result")


class Place(Protocol):
    """Runs a packed job on ranks, with one report per rank, in rank order."""

    def run(
        self, order: bytes, *, label: str, ranks: int, timeout_s: float, meanwhile: Iterable[object]
    ) -> Sequence[RankReport]: ...

    def close(self) -> None: ...


class Decision(Protocol):
    """Decides a simulated run, such as by a seed.

    decider: its name in words. options, pytest_options: command line and pytest options that reproduce it.
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

    Under torchrun they are its ranks, and all must call ``run`` alike; elsewhere they are local processes, started on
    first use and reused. Not thread-safe.

    Subclasses are other kinds of worlds, whose runs something besides the machine may decide. own_modules: packages
    with state per rank, separate for ranks in one process. seed_option: pytest's, if a test's replay needs it.
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
        """``device``: a type such as ``cpu`` or ``cuda``, whose devices a host's ranks share in turn, or ``cuda:0`` for
        all ranks. ``timeout_s`` bounds each run, in seconds. Invalid values raise ValueError.

        ``silent``: hide ranks' output, except a dying rank's last lines. ``most_groups``: processes with more leftover
        process groups than this are replaced after a run, which drops all changes made by jobs; None: never. Groups
        cannot be ended, as torch caches their users, and each gloo group keeps two threads. Ignored under torchrun.
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
        """Decision for the next run. None if the machine decides."""
        return None

    @property
    def searches(self) -> bool:
        """True if a case runs in several ways."""
        return False

    @property
    def searched(self) -> str:
        """The search in a sentence; empty without one."""
        return ""

    def decide(self, decision: Any) -> None:
        """Apply ``decision`` to later runs."""
        raise AssertionError(f"the machine decides about real ranks, and not {decision}")

    def decisions(self) -> "SearchStrategy[Decision] | None":
        """What a campaign draws beside each case: what decides its run; None where the world is left as it is."""
        return None

    def clock(self) -> float:
        """A time in seconds, the same on all ranks of torchrun, which have to decide alike how long to go on."""
        return self.run(lambda context: perf_counter(), ranks=1)[0] if under_torchrun() else perf_counter()

    def set_transport(self, transport: "Transport") -> None:
        """Apply ``transport``'s message rules to later runs."""
        raise AssertionError(f"messages of real ranks go as they do, and not by {transport}")

    def interleavings(self) -> Iterator[None]:
        """Iterate over this world's ways to run a case: real ranks have one."""
        yield

    def reduce(self, fails: Callable[[], bool]) -> None:
        """Reduce this world's decisions to the least for which ``fails`` stays true."""

    def complete(self, verdict: Any) -> Any:
        """Add this world's knowledge about the last run to ``verdict``."""
        return verdict

    def run(
        self,
        job: Callable[..., Result],
        *args: object,
        ranks: int,
        timeout_s: float | None = None,
        meanwhile: Iterable[object] = (),
    ) -> list[Result]:
        """Call ``job(context, *args)`` on ``ranks`` ranks. Returns results in rank order, the same list everywhere.

        Job, arguments and results travel as bytes, closures included. Return results on the CPU. A job's changes to its
        process persist for later jobs, such as a default dtype.

        timeout_s: bounds this run. meanwhile: the caller's own work in short steps, for idle time while ranks are busy.
        Some steps may stay undone. Ranks are polled between steps. A step's error ends the run.

        Raises ``WorldError`` for a job that cannot travel, and ``NeedsMoreRanks`` if a launcher started fewer. Raises
        ``RankFailed``, culprit first, if a rank raises, dies, or misses the bound. Raises the skip if all ranks skip
        for one reason.
        """
        __tracebackhide__ = True  # a test's traceback should show the test's own line
        if ranks < 1:
            raise ValueError(f"a job runs on at least 1 rank, not {ranks}")
        bound_s = self.timeout_s if timeout_s is None else seconds(timeout_s)
        try:
            order = pack_job(job, *args)
        except Exception as error:  # any type: each object refuses in its own way
            reason = f"the job cannot be sent to the ranks: {type(error).__name__}: {error}"
            raise WorldError(reason + unshippable((job, *args))) from error
        if self._place is None:
            self._place = self._start_ranks()
        named = job if hasattr(job, "__qualname__") else type(job)  # a functools.partial is unnamed
        label = f"{named.__module__}.{named.__qualname__}"
        return _results(self._place.run(order, label=label, ranks=ranks, timeout_s=bound_s, meanwhile=meanwhile))

    def _start_ranks(self) -> Place:
        if under_torchrun():
            from pipeproof.worlds.torchrun import Torchrun  # unused elsewhere

            return Torchrun(self.device, silent=self._silent)
        return Processes(self.device, silent=self._silent, most_groups=self._most_groups)

    def close(self) -> None:
        """End this world's processes within a bound, whatever they do. A later run starts fresh ones."""
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
    """Open a world of this kind, with its ``options``. Raises ValueError for an unknown kind."""
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}: expected {' or '.join(KINDS)}")
    make: Callable[..., World] = World if kind == REAL else cast("Callable[..., World]", extension("worlds", kind))
    return make(**options)


def _results(answers: Sequence[RankReport]) -> list[Any]:
    __tracebackhide__ = True
    if any(answer.failed for answer in answers):
        reports = [replace(answer, payload=b"") for answer in answers]  # the error's holder keeps no results
        if len({report.message for report in reports}) == 1 and all(r.ending is Ending.SKIPPED for r in reports):
            import pytest  # a job that skips has imported it; a world outside tests does without

            raise pytest.skip.Exception(reports[0].message, _use_item_location=True)
        cause, packed = None, answers[culprit_of(reports)].payload
        with suppress(Exception):  # its constructor may need more than it stored; the report has its text
            cause = unpack(packed) if packed else None
        raise RankFailed(reports, cause if isinstance(cause, ValueError) else None)
    results = []
    for answer in answers:
        try:
            results.append(unpack(answer.payload))
        except Exception as error:  # any type: unpacking runs the object's own code
            raise WorldError(f"the result of rank {answer.rank} cannot be read here: {error!r}") from error
    return results

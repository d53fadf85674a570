"""Run a function on several ranks and get every rank's result, wherever the ranks are."""

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, cast

from pipeproof.pipeline.transports import RULES, Transport, keeps_none, transport_of
from pipeproof.worlds.accelerator import CPU, refusal, split, too_old
from pipeproof.worlds.kinds import KINDS, REAL, SIMULATED
from pipeproof.worlds.launcher import under_torchrun
from pipeproof.worlds.processes import Processes
from pipeproof.worlds.rank_report import Ending, NeedsMoreRanks, RankFailed, RankReport, WorldError, culprit_of
from pipeproof.worlds.shipping import FIRST, pack, unpack, unshippable
from pipeproof.worlds.simulated.exploration import Course, Exploration
from pipeproof.worlds.simulated.guide import Guide
from pipeproof.worlds.simulation import SLEEP_ALONE, Manner, Simulation
from pipeproof.worlds.timeout import seconds
from pipeproof.worlds.torchrun import Torchrun
from pipeproof.worlds.worker import RankContext

if TYPE_CHECKING:
    from pipeproof.worlds.simulated.place import Simulated

__all__ = ["NeedsMoreRanks", "RankContext", "RankFailed", "RankReport", "World", "WorldError"]

Result = TypeVar("Result")
_MOST_ROOM = 1 << 40  # bytes: more than ranks of one process can send


class World:
    """Ranks to run functions on.

    Under torchrun they are the ranks that it started, and every one of them must call ``run`` alike; anywhere else they
    are processes of this machine, started when first needed and used again. A world is not for several threads.
    """

    def __init__(
        self,
        *,
        device: str = "cpu",
        timeout_s: float = 120.0,
        silent: bool = False,
        most_groups: int | None = None,
        kind: str = REAL,
        seed: int = 0,
        transport: str = "gloo",
    ) -> None:
        """``device``: of a type such as ``cpu`` or ``cuda``, which the ranks of a host share in turn, or ``cuda:0``, on
        which they all are. ``timeout_s`` bounds each run, in seconds; one of simulated ranks may take five times as
        long while it moves on. Others raise ValueError.

        ``silent``: what ranks print is not shown, but for the last lines of one that dies. ``most_groups``: processes
        in which jobs have left more process groups than this are replaced after a run, and what jobs changed there is
        gone; None: never. A group cannot be ended for torch caches what uses it, and each of gloo's keeps two threads.
        Not under torchrun.

        ``kind``: ``real``, or ``simulated``: all ranks are threads of one process, of which one runs at a time, also
        under torchrun. ``seed`` then decides who is next and when messages move, within what ``transport`` allows, a
        name of ``pipeline.transports``. Both may be set anew between runs, and ``seeds``: under which of them who looks
        for races runs each case. With ``most`` it runs all interleavings that differ, but no more than so many, and
        adds to ``explorations`` what is known of them. ``noted``: keep the ``course`` of the next run. ``timing``: what
        takes time besides sleep, which takes none of the machine's. ``fine``: another rank may also be next wherever
        one calls a function of torch. ``room``: how many bytes of what one rank sends to another are kept until they
        are received, where messages keep their order. Modules are shared by such ranks: what code keeps there is not
        one rank's, but for packages that ``own_modules`` names.
        """
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}: expected {' or '.join(KINDS)}")
        if kind == SIMULATED and device != CPU:
            raise ValueError(f"device is {device!r}: simulated ranks are on {CPU}, there is no other device in there")
        if why := refusal(split(device)[0]) or (too_old() if kind == SIMULATED else ""):
            raise ValueError(why)
        self.device = device
        self.timeout_s = seconds(timeout_s)
        self._silent = silent
        self._most_groups = most_groups
        self.kind = kind
        self.seed: int | Guide = seed
        self.transport = transport_of(transport)
        self.seeds: Sequence[int | Guide] = ()
        self.most: int | None = None
        self.timing = SLEEP_ALONE
        self.fine = False
        self.room = 0
        self.explorations: list[Exploration] = []
        self.course: Course | None = None
        self.noted = False
        self.seed_option = ""  # pytest's, where a replay of a test has to say it
        self.own_modules: frozenset[str] = frozenset()
        self._again: Callable[[], Sequence[RankReport]] | None = None  # the last run, on simulated ranks
        self._source: Processes | Torchrun | Simulated | None = None

    @property
    def simulation(self) -> Simulation | None:
        """What decides the next run; None where the machine does."""
        if self.kind != SIMULATED:
            return None
        return Simulation(self.transport, self.seed, fine=self.fine, room=self.room)

    def decide(self, simulation: Simulation) -> None:
        """Let ``simulation`` say what decides the next runs."""
        self.transport, self.seed = simulation.transport, simulation.first
        self.seeds, self.most = simulation.seeds, simulation.most
        self.fine, self.room = simulation.fine, simulation.room

    @property
    def room(self) -> int:
        """How many bytes of what one rank sends to another are kept."""
        return self._room

    @room.setter
    def room(self, room: int) -> None:
        """Raises ValueError for what is no number of bytes."""
        if not isinstance(room, int) or isinstance(room, bool) or room < 0:
            raise ValueError(f"room is {room!r}: expected a number of bytes, as 4096, or 0 for none")
        self._room = room

    @property
    def searches(self) -> bool:
        """Whether a case is to be run under more than one interleaving."""
        return self.kind == SIMULATED and (self.most is not None or len(self.seeds) > 1)

    def interleavings(self) -> Iterator[None]:
        """Once for each seed that a case is to be run under, which is then this world's; real ranks have no seed.

        Where all are to be had, what the first run is like says which are left.
        """
        if self.most is None:
            for seed in self.seeds or (self.seed,):
                self.seed = seed
                yield
            return
        self.explorations.append(exploration := Exploration(self.most))
        for guide in exploration.guides():
            self.seed, self.noted = guide, True
            yield
            exploration.learn(self.course)

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
        if self.room and self.kind == SIMULATED and (why := keeps_none(self.transport)):
            raise ValueError(f"room is {self.room}: {why}, or room 0")
        order = _order(job, args)
        if self._source is None:
            self._source = self._started()
        if (simulated := self._simulated) is not None:
            simulated.manner = self._manner(self.transport, noted=self.noted)
        run = partial(self._source.run, order, label=_label(job), ranks=ranks, timeout_s=bound_s)
        answers = run(meanwhile=meanwhile)
        if simulated is not None:
            self._again = partial(run, meanwhile=()) if simulated.in_time else None
            self.course, self.noted = simulated.course if self.noted else self.course, False
        return _results(answers)

    def hangs_on(self) -> Mapping[Transport, bool]:
        """Whether the last run hangs, by the transport: it runs again on each.

        Empty where ranks are real, and where some rank computes or sleeps for ever, of which nobody knows that.
        """
        found = {}
        for transport in Transport:
            if (reports := self._run_again(transport, self.room)) is None:
                return {}
            found[transport] = any(report.failed for report in reports) and RankFailed(reports).hang
        return found

    def least_room(self) -> int | None:
        """With room for how many bytes at least the last run, which failed on its transport, is one that ends.

        None where no room helps, and where nothing is known. Another seed may want another room.
        """
        if RULES[self.transport].by_name or not self._ends_with(_MOST_ROOM):
            return None
        powers = [2**power for power in range(self.room.bit_length(), _MOST_ROOM.bit_length())]
        enough: int = powers[bisect_left(powers[:-1], True, key=self._ends_with)]
        least = range(max(enough // 2, self.room) + 1, enough)
        return least.start + bisect_left(least, True, key=self._ends_with)

    def may_end(self) -> bool:
        """Whether the last run, which hangs, may end on NCCL: it does where programs go on while their devices wait.

        With what numbers, or whether none of them would have waited for one, is not known.
        """
        self._run_again(self.transport, self.room)
        return self._simulated is not None and self._simulated.may_end

    def _ends_with(self, room: int) -> bool:
        reports = self._run_again(self.transport, room)
        return reports is not None and not any(report.failed for report in reports)

    def _run_again(self, transport: Transport, room: int) -> Sequence[RankReport] | None:
        """How ranks end in the last run if it is on ``transport``; None where that cannot be known."""
        if (simulated := self._simulated) is None or self._again is None:
            return None
        simulated.manner = replace(self._manner(transport), room=room)
        reports = self._again()
        return reports if simulated.in_time else None

    @property
    def _simulated(self) -> "Simulated | None":
        """Where simulated ranks are, once some are started."""
        return cast("Simulated | None", self._source) if self.kind == SIMULATED else None

    def _manner(self, transport: Transport, *, noted: bool = False) -> Manner:
        own = tuple(sorted(self.own_modules))
        return Manner(self.seed, transport, self.timing, noted, own, self.fine, self.room)

    def _started(self) -> "Processes | Torchrun | Simulated":
        if self.kind == SIMULATED:
            from pipeproof.worlds.simulated.place import Simulated

            return Simulated(silent=self._silent)
        if under_torchrun():
            return Torchrun(self.device, silent=self._silent)
        return Processes(self.device, silent=self._silent, most_groups=self._most_groups)

    def close(self) -> None:
        """End the processes of this world, whatever they do, within a bound. A later run starts fresh ones."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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

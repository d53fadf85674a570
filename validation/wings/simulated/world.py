"""A world of simulated ranks: one lasting process for all, so that a hang cannot stop the caller."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from pipeproof.core.verdict import Verdict
from pipeproof.pipeline.sizes import MOST_SEED, some
from pipeproof.pipeline.transports import RULES, Transport, keeps_none, transport_of
from pipeproof.wings.simulated.engine.decisions import Guide, Preemption, parse_interleaving, preemptions
from pipeproof.wings.simulated.engine.exploration import Course, Exploration, describe_explorations
from pipeproof.wings.simulated.engine.scheduler import WHOLE
from pipeproof.wings.simulated.engine.simulation import SLEEP_ALONE, Simulation, Timing
from pipeproof.wings.simulated.play import Played, RunOrder, play
from pipeproof.worlds.accelerator import CPU, too_old
from pipeproof.worlds.kinds import SIMULATED
from pipeproof.worlds.processes import Processes
from pipeproof.worlds.rank_report import Ending, RankFailed, RankReport
from pipeproof.worlds.shipping import pack_job, unpack
from pipeproof.worlds.timeout import BUDGET, END_S
from pipeproof.worlds.world import World

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

_WHICH = ", nor did another: simulated ranks share a process, and which of them holds it is not known"
_AHEAD = "; on NCCL a program goes on after wait() while its device waits: there it may end"
_MOST_ROOM = 1 << 40  # bytes: more than ranks of one process can send


class SimulatedWorld(World):
    """Ranks as threads of one process, one running at a time. Every run begins anew.

    ``seed``: decides turns and message moves within the rules of ``transport``; the same seed gives the same run. Both
    may change between runs. ``seeds``: seeds for each case in a search for races. ``most``: run all distinct
    interleavings, up to this number, and add the result to ``explorations``. ``noted``: keep the next run's ``course``,
    None if it did not end. ``may_end``: the last run hangs, and may end on NCCL, where programs go on while their
    devices wait; how far is unknown, as they stop where they ask for a number.
    ``timing``: sources of delay besides sleep, which takes no real time. ``room``: bytes buffered between two ranks, on
    a transport that keeps order. Ranks share modules, and all state in them, except for packages named in
    ``own_modules``.
    """

    kind = SIMULATED

    parse_interleaving = staticmethod(parse_interleaving)

    def __init__(
        self,
        *,
        seed: int | Guide = 0,
        transport: str = "gloo",
        timing: Timing = SLEEP_ALONE,
        timeout_s: float = 120.0,
        silent: bool = False,
        device: str = CPU,
    ) -> None:
        """``transport``: a name of ``pipeline.transports``. ``timeout_s``: a run may take five times as long while it
        moves on. ``silent``: as of ``World``. Raises ValueError for another ``device``, and a torch that is too old.
        """
        if device != CPU:
            raise ValueError(f"device is {device!r}: simulated ranks are on {CPU}, there is no other device in there")
        if why := too_old():
            raise ValueError(why)
        super().__init__(timeout_s=timeout_s, silent=silent)
        self.seed = seed
        self.transport = transport_of(transport)
        self.seeds: Sequence[int | Guide] = ()
        self.most: int | None = None
        self.timing = timing
        self.room = 0
        self.explorations: list[Exploration] = []
        self.noted = False
        self.course: Course | None = None
        self.may_end = False
        self._ranks = _Ranks(self, silent=silent)

    @property
    def decision(self) -> Simulation:
        """Settings of the next run."""
        return Simulation(self.transport, self.seed, room=self.room)

    def decide(self, decision: Simulation) -> None:
        """Set the settings of the next runs."""
        self.transport, self.seed = decision.transport, decision.first
        self.seeds, self.most = decision.seeds if decision.count > 1 else (), decision.most
        self.room = decision.room

    def decisions(self) -> "SearchStrategy[Simulation] | None":
        """Any seed, over this world's transport; None where it runs each case under several of its own."""
        if self.searches:
            return None
        from hypothesis import strategies as st  # of a campaign alone

        like = self.decision
        return st.integers(0, MOST_SEED).map(lambda seed: replace(like, first=seed))

    def clock(self) -> float:
        """The machine's: simulated ranks have others."""
        return perf_counter()

    def set_transport(self, transport: Transport) -> None:
        self.transport = transport

    @property
    def room(self) -> int:
        """Bytes buffered between two ranks."""
        return self._room

    @room.setter
    def room(self, room: int) -> None:
        """Set the room. Raises ValueError unless it is a number of bytes."""
        if not isinstance(room, int) or isinstance(room, bool) or room < 0:
            raise ValueError(f"room is {room!r}: expected a number of bytes, as 4096, or 0 for none")
        self._room = room

    @property
    def searches(self) -> bool:
        """True if a case runs under several interleavings."""
        return self.most is not None or len(self.seeds) > 1

    @property
    def searched(self) -> str:
        """Describe the share of interleavings that ran; empty without a search."""
        return describe_explorations(self.explorations)

    def interleavings(self) -> Iterator[None]:
        """Yield once for each seed of a case, after making it this world's seed.

        In an exploration, the first run determines the rest.
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

    def reduce(self, fails: Callable[[], bool]) -> None:
        """Keep the fewest preemptions under which the run still ``fails``; the seed if none does.

        Delta debugging, by Zeller and Hildebrandt (2002), without its complements: halves first, then quarters, ...
        """
        before, self.noted = self.seed, True
        if not fails() or self.course is None:
            return
        kept, left = preemptions(self.course.events), BUDGET

        def still(some: Sequence[Preemption]) -> bool:
            nonlocal left
            left -= 1
            self.seed = Guide(tuple(some))
            return fails()

        if not still(kept):
            self.seed = before
            return
        if still(()):
            return
        size = len(kept)
        while size > 1 and left > 0:
            size = (size + 1) // 2
            start = 0
            while start < len(kept) and left > 0:
                fewer = (*kept[:start], *kept[start + size :])
                if fewer and still(fewer):
                    kept = fewer
                else:
                    start += size
        self.seed = Guide(kept)

    def complete(self, verdict: Verdict) -> Verdict:
        """Add to the ``verdict`` of a hang the transports, and the room, that avoid it."""
        ahead = _AHEAD if self.may_end else ""
        found = self.hangs_on() if verdict.ended == "hang" else {}
        if not found.get(self.transport):  # other transports are unknown, or the hang did not repeat
            return verdict
        hanging, ending = ([one for one in found if found[one] is hangs] for hangs in (True, False))
        where = (
            f"transport {_list_transports(hanging)}, and not with {_list_transports(ending)}"
            if ending
            else "every transport"
        )
        room = self.least_room()
        kept = f"; with room for {some(room, 'byte')} from one rank to another it ends, under this seed" if room else ""
        return replace(verdict, headline=f"{verdict.headline}; it hangs with {where}{kept}{ahead}")

    def hangs_on(self) -> dict[Transport, bool]:
        """Whether the last run hangs, by the transport: it runs again on each.

        Empty if a rank computes or sleeps for ever, because the answer is then unknown.
        """
        found = {}
        for transport in Transport:
            if (reports := self._run_again(transport, self.room)) is None:
                return {}
            found[transport] = any(report.failed for report in reports) and RankFailed(reports).hang
        return found

    def least_room(self) -> int | None:
        """Find the least room, in bytes, that ends a run which failed on its transport.

        None if no room helps, or the answer is unknown. Another seed may need another room.
        """
        if RULES[self.transport].by_name or not self._ends_with(_MOST_ROOM):
            return None
        powers = [2**power for power in range(self.room.bit_length(), _MOST_ROOM.bit_length())]
        enough: int = powers[bisect_left(powers[:-1], True, key=self._ends_with)]
        least = range(max(enough // 2, self.room) + 1, enough)
        return least.start + bisect_left(least, True, key=self._ends_with)

    def _ends_with(self, room: int) -> bool:
        reports = self._run_again(self.transport, room)
        return reports is not None and not any(report.failed for report in reports)

    def _run_again(self, transport: Transport, room: int) -> Sequence[RankReport] | None:
        return self._ranks.again(replace(self.decision, transport=transport, room=room))

    def order(self, job: bytes, ranks: int, timeout_s: float) -> RunOrder:
        """Order the next run alone; it may note its course. Raises ValueError for room that the transport lacks."""
        if self.room and (why := keeps_none(self.transport)):
            raise ValueError(f"room is {self.room}: {why}, or room 0")
        noted, self.noted = self.noted, False
        own = tuple(sorted(self.own_modules))
        return RunOrder(job, ranks, timeout_s, self.decision, self.timing, own, noted)

    def _start_ranks(self) -> "_Ranks":
        return self._ranks


class _Ranks:
    """The process of simulated ranks, which plays a world's runs, and notes in it what it learns of them."""

    def __init__(self, world: SimulatedWorld, *, silent: bool = False) -> None:
        self._world = world
        self._last: tuple[RunOrder, str] | None = None
        self._process = Processes(CPU, silent=silent)

    def run(
        self, order: bytes, *, label: str, ranks: int, timeout_s: float, meanwhile: Iterable[object]
    ) -> Sequence[RankReport]:
        """One report for each rank, in rank order."""
        what = self._world.order(order, ranks, timeout_s)
        self._last = None
        played = self._play(what, label, meanwhile)
        if what.noted:
            self._world.course = played.course
        if played.in_time:
            self._last = what, label
        return played.reports

    def again(self, decision: Simulation) -> Sequence[RankReport] | None:
        """Repeat the last run with this decision, and return how its ranks end.

        None if unknown: a deadlock is recognized, endless computation or sleep is not.
        """
        self._world.may_end = False
        if self._last is None:
            return None
        what, label = self._last
        played = self._play(replace(what, decision=decision, noted=False), label, ())
        return played.reports if played.in_time else None

    def _play(self, what: RunOrder, label: str, meanwhile: Iterable[object]) -> Played:
        self._world.may_end = False
        job = pack_job(play, what)
        most_s = WHOLE * what.timeout_s + END_S
        (answer,) = self._process.run(job, label=label, ranks=1, timeout_s=most_s, meanwhile=meanwhile)
        if answer.failed:  # the process with all ranks, so all failed
            if answer.ending is Ending.STUCK:  # its stack shows the wait for ranks
                answer = replace(answer, message=answer.message + _WHICH, traceback="")
            return Played([replace(answer, rank=rank) for rank in range(what.ranks)], sound=False, in_time=False)
        played = unpack(answer.payload)
        assert isinstance(played, Played), f"a run gives what was played, not {type(played)}"
        self._world.may_end = played.may_end
        if not played.sound:
            self._process.close()
        return played

    def close(self) -> None:
        """End the process."""
        self._process.close()


def _list_transports(transports: Sequence[Transport]) -> str:
    names = [f"{one.value} ({', '.join(known)})" if (known := RULES[one].known_as) else one.value for one in transports]
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))

"""A place for simulated ranks: one process for all of them, kept, so that nothing they do can hold up the caller."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pipeproof.worlds.accelerator import CPU
from pipeproof.worlds.processes import Processes
from pipeproof.worlds.rank_report import Ending, RankReport
from pipeproof.worlds.shipping import pack, unpack
from pipeproof.worlds.simulated.exploration import Course
from pipeproof.worlds.simulated.patience import WHOLE
from pipeproof.worlds.simulated.play import Played, RunOrder, play
from pipeproof.worlds.simulation import Manner
from pipeproof.worlds.timeout import END_S

_WHICH = ", nor did another: simulated ranks share a process, and which of them holds it is not known"


class Simulated:
    """Ranks that are threads of one process. Every run begins anew, and is the same for the same seed.

    ``manner``: how the next runs go. ``course``: what the last one was like, where that was to be noted.
    ``in_time``: whether it ended within its bound: who waits for ever is known to, and who computes or sleeps is not.
    ``may_end``: it hangs, and may not where programs go on while their devices wait.
    """

    def __init__(self, *, silent: bool = False) -> None:
        self.course: Course | None = None
        self.in_time = True
        self.may_end = False
        self.manner = Manner()
        self._process = Processes(CPU, silent=silent)

    def run(
        self, order: bytes, *, label: str, ranks: int, timeout_s: float, meanwhile: Iterable[object]
    ) -> Sequence[RankReport]:
        """One answer for each rank, in rank order."""
        self.course, self.in_time, self.may_end = None, False, False
        what = pack((sys.path, (), pack((play, (RunOrder(order, ranks, timeout_s, self.manner),)))))
        most_s = WHOLE * timeout_s + END_S
        (answer,) = self._process.run(what, label=label, ranks=1, timeout_s=most_s, meanwhile=meanwhile)
        if answer.failed:  # the process that has all ranks: none of them can have done better
            if answer.ending is Ending.STUCK:  # its stack is that of who waits for the ranks
                answer = replace(answer, message=answer.message + _WHICH, traceback="")
            return [replace(answer, rank=rank) for rank in range(ranks)]
        played = unpack(answer.payload)
        assert isinstance(played, Played), f"a run gives what was played, not {type(played)}"
        self.course, self.in_time, self.may_end = played.course, played.in_time, played.may_end
        if not played.sound:
            self._process.close()
        return played.reports

    def close(self) -> None:
        """End the process."""
        self._process.close()

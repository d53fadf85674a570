"""One simulated rank: a thread that joins the group, does its part, and tells how that ended."""

import os
from collections.abc import Callable
from dataclasses import replace
from threading import Thread

from torch.distributed import Store  # type: ignore[attr-defined]  # not in __all__

from pipeproof.worlds.launcher import place_of
from pipeproof.worlds.rank_report import RankReport
from pipeproof.worlds.simulated.clock import goes_by
from pipeproof.worlds.simulated.network import Network
from pipeproof.worlds.simulated.torch_inside import joined, without_autograd_threads
from pipeproof.worlds.simulated.uses import Uses
from pipeproof.worlds.worker import RankContext, attempt


class Rank(Thread):
    """``report`` is there once it has ended, unless it was made to give up."""

    def __init__(
        self, rank: int, ranks: int, part: Callable[[RankContext], object], store: Store, network: Network
    ) -> None:
        super().__init__(name=f"rank {rank} of {ranks}", daemon=True)
        self.report: RankReport | None = None
        self._rank, self._ranks = rank, ranks
        self._part, self._store, self._network = part, store, network

    def run(self) -> None:
        """Wait for the first turn, do the part, and hand the turn on for good."""
        scheduler = self._network.scheduler
        goes_by(scheduler.seats[self._rank].clock, scheduler.pause)
        scheduler.await_turn(self._rank)
        try:
            with without_autograd_threads():
                report = attempt(self._rank, self._joined)
        finally:
            if not scheduler.over:
                self.report = replace(report, at_s=float(scheduler.ended))  # in the order of this run
            scheduler.finish()

    def _joined(self) -> object:
        __tracebackhide__ = True
        os.environ.update(place_of(self._rank, self._ranks, self._rank, self._ranks))
        group = joined(self._network.rules.backend, self._rank, self._ranks, self._store)
        if (history := self._network.scheduler.history) is not None:
            history.joins(self._rank)
        with Uses(self._network, self._rank):
            try:
                result = self._part(RankContext(self._rank, self._ranks, "cpu", group))
            except Exception:
                self._network.scheduler.tell_again()
                raise
            self._network.leave(self._rank)
        return result

"""torchrun's ranks: each runs its part in its own worker, and all receive every answer."""

import os
import tempfile
from collections.abc import Iterable, Sequence

from pipeproof.pipeline.waiting import DEFAULT_TIMEOUT_S
from pipeproof.worlds.launcher import Seat, loopback
from pipeproof.worlds.processes import Pool
from pipeproof.worlds.rank_report import NeedsMoreRanks, RankFailed, RankReport, of_absent
from pipeproof.worlds.side_store import RanksAbsent, side_store
from pipeproof.worlds.timeout import LAUNCHER_S


class Torchrun:
    """A place with torchrun's ranks, which all join every run, even smaller ones.

    A rank's own process never waits inside a group, since such waits cannot be ended. Its worker does.
    """

    _newest_group = 0  # shared by all places here, as group numbers are never reused

    def __init__(self, device: str, *, silent: bool = False) -> None:
        self._device = device
        self._silent = silent
        self._side = side_store()
        self._pools: dict[int, tuple[int, Pool]] = {}  # by world size: group number, and this rank's worker

    def run(
        self, order: bytes, *, label: str, ranks: int, timeout_s: float, meanwhile: Iterable[object]
    ) -> Sequence[RankReport]:
        """Return one answer per rank, in rank order, the same on all torchrun ranks.

        ``meanwhile`` stays undone: it would take time from the rank's worker. Raises NeedsMoreRanks, and RankFailed if
        ranks are absent or bring another job.
        """
        del meanwhile
        if ranks > self._side.ranks:
            raise NeedsMoreRanks(ranks, self._side.ranks)
        try:
            answers = self._run(order, label, ranks, timeout_s)
        except RanksAbsent as absent:
            self._discard(ranks)
            raise RankFailed(of_absent(absent.reasons, self._side.ranks, {})) from None
        if any(answer.failed for answer in answers):
            self._discard(ranks)
        return answers

    def close(self) -> None:
        """End this rank's workers."""
        for ranks in list(self._pools):
            self._discard(ranks)

    def _run(self, order: bytes, label: str, ranks: int, timeout_s: float) -> list[RankReport]:
        what = f"the run of {label} on {ranks} ranks"
        pool = self._pool(ranks, what, max(timeout_s, DEFAULT_TIMEOUT_S))
        failed = f"{self._side.latest}/failed"
        mine = pool.run(order, timeout_s=timeout_s, cancelled=lambda: self._side.has(failed)) if pool else []
        if any(answer.failed for answer in mine):
            self._side.put(failed, b"")
        everyone = self._side.gather(mine, what=what, bound_s=DEFAULT_TIMEOUT_S + timeout_s + LAUNCHER_S)
        return [answer for answers in everyone for answer in answers]

    def _pool(self, ranks: int, what: str, bound_s: float) -> Pool | None:
        """Return this rank's worker, grouped with the others'. None for a rank beyond the run's size."""
        number, pool = self._pools.get(ranks, (0, None))
        # Its worker's group number, or 0, and the newest known number.
        mine = number if pool is not None and pool.alive else 0, Torchrun._newest_group
        arrivals: list[tuple[int, int]] = self._side.gather(mine, what=what, bound_s=bound_s)
        groups = {group for group, _ in arrivals[:ranks]}
        if len(groups) > 1 or groups == {0}:
            self._discard(ranks)
            Torchrun._newest_group = number = 1 + max(newest for _, newest in arrivals)
            pool = None
            if (rank := self._side.rank) < ranks:
                local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self._side.ranks))
                seat = Seat(
                    rank=rank,
                    ranks=ranks,
                    local_rank=int(os.environ.get("LOCAL_RANK", rank)),
                    local_ranks=min(ranks, local_ranks),
                    device=self._device,
                    store=f"{self._side.address}/group-{number}",
                    folder=tempfile.mkdtemp(prefix="pipeproof-"),
                    environment=loopback() if local_ranks == self._side.ranks else {},
                    silent=self._silent,
                )
                pool = Pool([seat])
                self._pools[ranks] = number, pool
        return pool

    def _discard(self, ranks: int) -> None:
        if ranks in self._pools:
            self._pools.pop(ranks)[1].close()

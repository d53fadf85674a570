"""Ranks as processes of this machine: one pool of workers for each number of ranks, made when first needed."""

import tempfile
from collections.abc import Iterable, Sequence

from validation.worlds.launcher import loopback
from validation.worlds.pool import Pool
from validation.worlds.seat import Seat
from validation.worlds.worker import Answer


class Processes:
    """A place for ranks: processes started for them, kept, and used again until one fails."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._pools: dict[int, Pool] = {}

    def run(
        self, order: bytes, *, label: str, ranks: int, timeout_s: float, meanwhile: Iterable[object]
    ) -> Sequence[Answer]:
        """One answer for each rank, in rank order. There is one controller, so nobody else to agree on the label."""
        del label
        pool = self._pools.get(ranks)
        if pool is None or not pool.alive:
            pool = self._pools[ranks] = Pool(self._seats(ranks))
        # A GPU's memory is the ranks' alone while they are busy.
        return pool.run(order, timeout_s=timeout_s, meanwhile=meanwhile if self._device == "cpu" else ())

    def close(self) -> None:
        """End all workers."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def _seats(self, ranks: int) -> list[Seat]:
        folder = tempfile.mkdtemp(prefix="pipeproof-")
        return [
            Seat(
                rank=rank,
                ranks=ranks,
                local_rank=rank,
                local_ranks=ranks,
                device=self._device,
                store=f"file://{folder}/store",
                folder=folder,
                environment=loopback(),
            )
            for rank in range(ranks)
        ]

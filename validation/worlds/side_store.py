"""Side channel between a launcher's ranks, beside the group under test, to agree on failures."""

import functools
import itertools
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not in torch's __all__

from pipeproof.core.observe.per_rank_globals import belongs_to_rank
from pipeproof.worlds.launcher import under_torchrun
from pipeproof.worlds.shipping import pack, unpack
from pipeproof.worlds.timeout import LOOK_S

_CHUNK = 4 << 20  # bytes; the store drops connections that send 8 MiB at once
_stores = itertools.count()  # each store in a process, and so each rank, has its own keys


class RanksAbsent(Exception):
    """Some ranks missed an exchange. ``reasons``: predicates by rank.

    late: they missed the full bound, for unknown reasons.
    """

    def __init__(self, reasons: Mapping[int, str], *, late: bool = False) -> None:
        super().__init__(dict(reasons))
        self.reasons = dict(reasons)
        self.late = late

    def __str__(self) -> str:
        return "; ".join(f"rank {rank} {reason}" for rank, reason in self.reasons.items())


class SideStore:
    """Exchanges among all ranks over ``store``, from torchrun's agent or the default group.

    Exchanges belong to a scope, which ``end_scope`` closes on all ranks. So a rank that left a test early is known to
    be gone once it waits at the scope's end, and never meets the others' next test.
    """

    def __init__(self, store: Store, *, rank: int, ranks: int, address: str = "") -> None:
        self.rank = rank
        self.ranks = ranks
        self.address = address
        self._store = store
        self._hurry = ""
        self._scope = 0
        self._exchanges = 0
        self._outdated: list[str] = []  # this rank's keys from the last complete exchange

    @classmethod
    def of_torchrun(cls) -> "SideStore":
        """Open a side store on torchrun's agent."""
        environ = os.environ
        rank, ranks = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        prefix = f"pipeproof/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_stores)}"
        agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        server = TCPStore(host, port, is_master=not agent and rank == 0, wait_for_workers=False)
        return cls(PrefixStore(prefix, server), rank=rank, ranks=ranks, address=f"tcp://{host}:{port}/{prefix}")

    def gather(self, value: object, *, what: str, bound_s: float) -> list[Any]:
        """Return every rank's value, in rank order. ``what`` names the exchange in errors.

        Raises RanksAbsent if a rank misses the bound in seconds, is known to be gone, or joined another exchange.
        """
        self._exchanges += 1
        return self._gather(self.latest, value, what, bound_s)

    def end_scope(self, value: object, *, what: str, bound_s: float) -> list[Any]:
        """Gather, then start a new scope. A rank that waits here takes part in no other exchange of its scope."""
        try:
            return self._gather(self._end, value, what, bound_s)
        finally:
            self._scope += 1
            self._exchanges = 0

    def hurry(self, reason: str) -> None:
        """Stop waiting; ``reason`` completes the sentence about absent ranks. For signal handlers."""
        self._hurry = reason

    @property
    def hurried(self) -> bool:
        """True after ``hurry``."""
        return bool(self._hurry)

    def leave(self, reason: str) -> None:
        """Announce departure: others must not wait for this rank."""
        self.put(f"left/{self.rank}", reason.encode())

    def has_left(self, rank: int) -> bool:
        """True if ``rank`` announced departure."""
        return self.has(f"left/{rank}")

    @property
    def latest(self) -> str:
        """Name of the latest exchange: a unique key prefix known to all ranks."""
        return f"scope {self._scope}/{self._exchanges}"

    def put(self, key: str, data: bytes) -> list[str]:
        """Publish data under a key. Returns all keys in use."""
        first, *more = [data[start : start + _CHUNK] for start in range(0, max(len(data), 1), _CHUNK)]
        parts = {f"{key}/part {index}": chunk for index, chunk in enumerate(more)}
        parts[key] = b"%d\n" % len(more) + first  # last, because others look for this key
        for part, chunk in parts.items():
            self._store.set(part, chunk)  # type: ignore[arg-type]  # bytes are accepted, and return as bytes
        return list(parts)

    def get(self, key: str) -> bytes | None:
        """Return data under a key, or None."""
        if not self.has(key):
            return None
        parts, _, first = self._store.get(key).partition(b"\n")
        return b"".join([first, *(self._store.get(f"{key}/part {index}") for index in range(int(parts)))])

    def take(self, key: str) -> bytes | None:
        """Return data and free its key, or None."""
        if (data := self.get(key)) is not None:
            parts = int(self._store.get(key).partition(b"\n")[0])
            self.drop([key, *(f"{key}/part {index}" for index in range(parts))])
        return data

    def drop(self, keys: Sequence[str]) -> None:
        """Free these keys."""
        for key in keys:
            self._store.delete_key(key)

    def has(self, key: str) -> bool:
        """True if the key has data."""
        return bool(self._store.check([key]))

    def wait_for(self, key: str, bound_s: float) -> bool:
        """Wait for data under a key, at most the bound in seconds. True if present."""
        deadline_s = time.monotonic() + bound_s
        while not (there := self.has(key)) and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
        return there

    @property
    def _end(self) -> str:
        return f"scope {self._scope}/end"

    def _gather(self, name: str, value: object, what: str, bound_s: float) -> list[Any]:
        keys = [f"{name}/{rank}" for rank in range(self.ranks)]
        written = self.put(keys[self.rank], pack((what, pack(value))))  # value for ranks in the same exchange
        deadline_s, pause_s = time.monotonic() + bound_s, LOOK_S / 64
        while not self._store.check(keys):
            late = self._hurry or (f"within {bound_s:g} s" if time.monotonic() > deadline_s else "")
            missing = {}
            for rank, key in enumerate(keys):
                reason = self._departure(rank) or late  # before its key, as a rank may come and then go
                if reason and not self.has(key):
                    missing[rank] = f"did not come to {what} {reason}"
            if missing:
                self.put(f"{name}/given up", b"")
                raise RanksAbsent(missing, late=bool(late) and not self._hurry)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_S)
        if self.has(f"{name}/given up"):
            raise RanksAbsent({self.rank: f"did not come to {what} before the others gave it up"})
        gathered = [unpack(self.get(key) or b"") for key in keys]
        self.drop(self._outdated)  # all ranks are past the previous exchange
        self._outdated = written
        meant = {rank: theirs for rank, (theirs, _) in enumerate(gathered) if theirs != gathered[0][0]}
        if meant:
            came_to = gathered[0][0]
            raise RanksAbsent({rank: f"did not come to {came_to}, but to {theirs}" for rank, theirs in meant.items()})
        return [unpack(data) for _, data in gathered]

    def _departure(self, rank: int) -> str:
        if (reason := self.get(f"left/{rank}")) is not None:
            return f"as it had left: {reason.decode()}"
        return "as it had ended its part already" if self.has(f"{self._end}/{rank}") else ""


@functools.cache
def side_store() -> SideStore:
    """Return this process's side store: a single one, so that exchanges share a count."""
    return SideStore.of_torchrun()


_of_groups: "WeakKeyDictionary[dist.ProcessGroup, SideStore]" = WeakKeyDictionary()


def _of_default_group() -> SideStore:
    """Return the side store on the default group's store: one per group."""
    group = dist.group.WORLD
    assert group is not None, "asked where torch.distributed is initialised"
    if group not in _of_groups:
        store = PrefixStore("pipeproof", dist.distributed_c10d._get_default_store())
        _of_groups[group] = SideStore(store, rank=dist.get_rank(), ranks=dist.get_world_size())
    return _of_groups[group]


_exchanges = itertools.count()  # ranks create them in one order, so equal numbers mean equal exchanges
belongs_to_rank(__name__, "_exchanges", fresh=lambda _: itertools.count())


class Exchange:
    """Gathers values on all ranks, which call ``gather`` and ``finish`` alike; tensors go to any reader.

    side: the channel; None for a single rank.
    """

    def __init__(self, side: SideStore | None) -> None:
        self._side = side
        self._prefix = f"exchange {next(_exchanges)}"
        self._laid_out: dict[str, Tensor] = {}  # for a single rank
        self.rank, self.ranks = (0, 1) if side is None else (side.rank, side.ranks)

    def gather(self, value: object, *, what: str, bound_s: float) -> list[Any]:
        """Return every rank's value. Raises ``RanksAbsent`` for ranks absent after the bound in seconds."""
        if self._side is None:
            return [value]
        return self._side.gather(value, what=what, bound_s=bound_s)

    def finish(self, value: object, *, what: str, bound_s: float) -> list[Any]:
        """Gather for the last time: a rank here takes part in no earlier exchange."""
        if self._side is None:
            return [value]
        return self._side.end_scope(value, what=what, bound_s=bound_s)

    def give(self, name: str, tensor: Tensor) -> None:
        """Publish a tensor under a unique name."""
        if self._side is None:
            self._laid_out[name] = tensor.detach()
        else:
            self._side.put(f"{self._prefix}/{name}", pack(tensor.detach().cpu().contiguous()))

    def take(self, name: str, *, bound_s: float) -> Tensor:
        """Return a tensor once published. Raises ``RanksAbsent`` after the bound in seconds."""
        if self._side is None:
            return self._laid_out[name]
        key = f"{self._prefix}/{name}"
        if not self._side.wait_for(key, bound_s):
            raise RanksAbsent({self.rank: f"waited {bound_s:g} s in vain for {name}"}, late=True)
        found: Tensor = unpack(self._side.get(key) or b"")
        return found

    def clear(self, names: Iterable[str]) -> None:
        """Free these names."""
        for name in names:
            self._laid_out.pop(name, None)
            if self._side is not None:
                self._side.take(f"{self._prefix}/{name}")


def exchange() -> Exchange:
    """Return the exchange for this job's ranks, over torchrun's store or their default group's."""
    if under_torchrun():
        return Exchange(side_store())
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return Exchange(_of_default_group())
    return Exchange(None)


def rank_in_job() -> tuple[int, int]:
    """Return this process's rank and the rank count, as in ``exchange``, without communication."""
    if under_torchrun():
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1

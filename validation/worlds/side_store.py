"""What the ranks of a launcher tell each other beside the group under test, so that they can agree about failures."""

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

from pipeproof.core.observe.belongings import belongs_to_rank
from pipeproof.worlds.launcher import under_torchrun
from pipeproof.worlds.shipping import pack, unpack
from pipeproof.worlds.timeout import LOOK_S

_CHUNK = 4 << 20  # bytes; the store drops the connection of whoever sends 8 MiB at once
_stores = itertools.count()  # every store of a process, and so of every rank, has keys of its own


class RanksAbsent(Exception):
    """Some ranks did not come to an exchange. ``reasons`` says of each what is known, as a predicate.

    ``late``: they had all the time that there was, and nobody knows more.
    """

    def __init__(self, reasons: Mapping[int, str], *, late: bool = False) -> None:
        super().__init__(dict(reasons))
        self.reasons = dict(reasons)
        self.late = late

    def __str__(self) -> str:
        return "; ".join(f"rank {rank} {reason}" for rank, reason in self.reasons.items())


class SideStore:
    """Exchanges among all ranks, over ``store``: that of torchrun's agent, or of the group of all ranks.

    Exchanges belong to a scope, which ``end_scope`` closes on all ranks together. So a rank that left a test early is
    known to be gone as soon as it waits at the end of the scope, and can never meet the others' next test.
    """

    def __init__(self, store: Store, *, rank: int, ranks: int, address: str = "") -> None:
        self.rank = rank
        self.ranks = ranks
        self.address = address
        self._store = store
        self._hurry = ""
        self._scope = 0
        self._exchanges = 0
        self._outdated: list[str] = []  # this rank's keys of the last exchange that all ranks came to

    @classmethod
    def of_torchrun(cls) -> "SideStore":
        """The one over the store of torchrun's agent."""
        environ = os.environ
        rank, ranks = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        prefix = f"pipeproof/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_stores)}"
        agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        server = TCPStore(host, port, is_master=not agent and rank == 0, wait_for_workers=False)
        return cls(PrefixStore(prefix, server), rank=rank, ranks=ranks, address=f"tcp://{host}:{port}/{prefix}")

    def gather(self, value: object, *, what: str, bound_s: float) -> list[Any]:
        """Every rank's value, in rank order. ``what`` names the exchange for the reader of an error.

        Raises RanksAbsent when a rank has not come within the bound in seconds, is known never to come, or has come to
        something else.
        """
        self._exchanges += 1
        return self._gather(self.latest, value, what, bound_s)

    def end_scope(self, value: object, *, what: str, bound_s: float) -> list[Any]:
        """As ``gather``, and afterwards a new scope. A rank that waits here takes part in nothing else of its scope."""
        try:
            return self._gather(self._end, value, what, bound_s)
        finally:
            self._scope += 1
            self._exchanges = 0

    def hurry(self, reason: str) -> None:
        """From now on wait for nobody; ``reason`` ends the sentence that a rank did not come. For a signal handler."""
        self._hurry = reason

    @property
    def hurried(self) -> bool:
        """Whether this rank waits for nobody any more."""
        return bool(self._hurry)

    def leave(self, reason: str) -> None:
        """Tell the others not to wait for this rank in any exchange that it has not come to."""
        self.put(f"left/{self.rank}", reason.encode())

    def has_left(self, rank: int) -> bool:
        """Whether that rank has said that it leaves."""
        return self.has(f"left/{rank}")

    @property
    def latest(self) -> str:
        """The name of the latest exchange: a prefix for keys that all ranks know and nobody uses twice."""
        return f"scope {self._scope}/{self._exchanges}"

    def put(self, key: str, data: bytes) -> list[str]:
        """Make the data visible to all ranks under a key; the keys that it takes up."""
        first, *more = [data[start : start + _CHUNK] for start in range(0, max(len(data), 1), _CHUNK)]
        parts = {f"{key}/part {index}": chunk for index, chunk in enumerate(more)}
        parts[key] = b"%d\n" % len(more) + first  # last, because this is what the others look for
        for part, chunk in parts.items():
            self._store.set(part, chunk)  # type: ignore[arg-type]  # bytes are welcome and come back as bytes
        return list(parts)

    def get(self, key: str) -> bytes | None:
        """The data under this key, or None where there is none yet."""
        if not self.has(key):
            return None
        parts, _, first = self._store.get(key).partition(b"\n")
        return b"".join([first, *(self._store.get(f"{key}/part {index}") for index in range(int(parts)))])

    def take(self, key: str) -> bytes | None:
        """The data under this key, which then is free again; None where there is none yet."""
        if (data := self.get(key)) is not None:
            parts = int(self._store.get(key).partition(b"\n")[0])
            self.drop([key, *(f"{key}/part {index}" for index in range(parts))])
        return data

    def drop(self, keys: Sequence[str]) -> None:
        """Free what these keys take up."""
        for key in keys:
            self._store.delete_key(key)

    def has(self, key: str) -> bool:
        """Whether there is data under this key."""
        return bool(self._store.check([key]))

    def wait_for(self, key: str, bound_s: float) -> bool:
        """Wait until there is data under this key, at most for the bound in seconds; whether there is."""
        deadline_s = time.monotonic() + bound_s
        while not (there := self.has(key)) and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
        return there

    @property
    def _end(self) -> str:
        return f"scope {self._scope}/end"

    def _gather(self, name: str, value: object, what: str, bound_s: float) -> list[Any]:
        keys = [f"{name}/{rank}" for rank in range(self.ranks)]
        written = self.put(keys[self.rank], pack((what, pack(value))))  # the value for those who came to the same
        deadline_s, pause_s = time.monotonic() + bound_s, LOOK_S / 64
        while not self._store.check(keys):
            late = self._hurry or (f"within {bound_s:g} s" if time.monotonic() > deadline_s else "")
            if absent := self._absent(keys, late):
                self.put(f"{name}/given up", b"")
                told = {rank: f"did not come to {what} {reason}" for rank, reason in absent.items()}
                raise RanksAbsent(told, late=bool(late) and not self._hurry)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_S)
        if self.has(f"{name}/given up"):
            raise RanksAbsent({self.rank: f"did not come to {what} before the others gave it up"})
        gathered = [unpack(self.get(key) or b"") for key in keys]
        self.drop(self._outdated)  # everybody is past the exchange before this one
        self._outdated = written
        meant = {rank: theirs for rank, (theirs, _) in enumerate(gathered) if theirs != gathered[0][0]}
        if meant:
            came_to = gathered[0][0]
            raise RanksAbsent({rank: f"did not come to {came_to}, but to {theirs}" for rank, theirs in meant.items()})
        return [unpack(data) for _, data in gathered]

    def _absent(self, keys: Sequence[str], late: str) -> dict[int, str]:
        """Why ranks will not come any more, where that is known; ``late`` is the reason in want of a better one."""
        absent = {}
        for rank, key in enumerate(keys):
            reason = self._departure(rank) or late  # asked before its key, as a rank may come and then go
            if reason and not self.has(key):
                absent[rank] = reason
        return absent

    def _departure(self, rank: int) -> str:
        if (reason := self.get(f"left/{rank}")) is not None:
            return f"as it had left: {reason.decode()}"
        return "as it had ended its part already" if self.has(f"{self._end}/{rank}") else ""


@functools.cache
def side_store() -> SideStore:
    """This process's side store: one, so that all its exchanges are counted together."""
    return SideStore.of_torchrun()


_of_groups: "WeakKeyDictionary[dist.ProcessGroup, SideStore]" = WeakKeyDictionary()


def _of_default_group() -> SideStore:
    """The side store over what the group of all ranks met by: one for each such group."""
    group = dist.group.WORLD
    assert group is not None, "asked where torch.distributed is initialised"
    if group not in _of_groups:
        store = PrefixStore("pipeproof", dist.distributed_c10d._get_default_store())
        _of_groups[group] = SideStore(store, rank=dist.get_rank(), ranks=dist.get_world_size())
    return _of_groups[group]


_exchanges = itertools.count()  # all ranks make theirs in one order, so a number is the same exchange everywhere
belongs_to_rank(__name__, "_exchanges", fresh=lambda _: itertools.count())


class Exchange:
    """Every rank calls ``gather`` and ``finish`` alike; tensors are for whoever asks.

    It goes over ``side``; where there is none, one rank has nobody to speak with.
    """

    def __init__(self, side: SideStore | None) -> None:
        self._side = side
        self._prefix = f"exchange {next(_exchanges)}"
        self._laid_out: dict[str, Tensor] = {}  # by a rank that has nobody else
        self.rank, self.ranks = (0, 1) if side is None else (side.rank, side.ranks)

    def gather(self, value: object, *, what: str, bound_s: float) -> list[Any]:
        """Every rank's value. Raises ``RanksAbsent`` for ranks that have not come after the bound in seconds."""
        if self._side is None:
            return [value]
        return self._side.gather(value, what=what, bound_s=bound_s)

    def finish(self, value: object, *, what: str, bound_s: float) -> list[Any]:
        """As ``gather``, for the last time: a rank that is here takes part in nothing before it any more."""
        if self._side is None:
            return [value]
        return self._side.end_scope(value, what=what, bound_s=bound_s)

    def give(self, name: str, tensor: Tensor) -> None:
        """Lay a tensor out under a name that nobody else uses."""
        if self._side is None:
            self._laid_out[name] = tensor.detach()
        else:
            self._side.put(f"{self._prefix}/{name}", pack(tensor.detach().cpu().contiguous()))

    def take(self, name: str, *, bound_s: float) -> Tensor:
        """The tensor of that name, once it is there. Raises ``RanksAbsent`` after the bound in seconds."""
        if self._side is None:
            return self._laid_out[name]
        key = f"{self._prefix}/{name}"
        if not self._side.wait_for(key, bound_s):
            raise RanksAbsent({self.rank: f"waited {bound_s:g} s in vain for {name}"}, late=True)
        found: Tensor = unpack(self._side.get(key) or b"")
        return found

    def clear(self, names: Iterable[str]) -> None:
        """Free what these names take up."""
        for name in names:
            self._laid_out.pop(name, None)
            if self._side is not None:
                self._side.take(f"{self._prefix}/{name}")


def exchange() -> Exchange:
    """The exchange among this job's ranks, by torchrun's store or by that of their default group."""
    if under_torchrun():
        return Exchange(side_store())
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return Exchange(_of_default_group())
    return Exchange(None)


def rank_in_job() -> tuple[int, int]:
    """This process's rank among this job's, and how many there are, as ``exchange`` has it: nothing is exchanged."""
    if under_torchrun():
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1

"""How the ranks of a running job speak with each other beside the groups that are under test."""

import itertools
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from validation.worlds.launcher import under_torchrun
from validation.worlds.rank_report import WorldError
from validation.worlds.shipping import pack, unpack
from validation.worlds.side_store import RanksAbsent, SideStore, side_store

_exchanges = itertools.count()  # all ranks make theirs in one order, so a number is the same exchange everywhere


class Exchange:
    """Every rank calls ``gather`` and ``finish`` alike; tensors are for whoever asks.

    It goes over ``side``, the store of torchrun's agent; where there is none, one rank has nobody to speak with.
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
        return list(map(unpack, self._side.gather(pack(value), what=what, bound_s=bound_s)))

    def finish(self, value: object, *, what: str, bound_s: float) -> list[Any]:
        """As ``gather``, for the last time: a rank that is here takes part in nothing before it any more."""
        if self._side is None:
            return [value]
        return list(map(unpack, self._side.end_scope(pack(value), what=what, bound_s=bound_s)))

    def give(self, name: str, tensor: Tensor) -> None:
        """Lay a tensor out under a name that nobody else uses."""
        if self._side is None:
            self._laid_out[name] = tensor.detach()
        else:
            self._side.put(f"{self._prefix}/{name}", save({"": tensor.detach().cpu().contiguous()}))

    def take(self, name: str, *, bound_s: float) -> Tensor:
        """The tensor of that name, once it is there. Raises ``RanksAbsent`` after the bound in seconds."""
        if self._side is None:
            return self._laid_out[name]
        key = f"{self._prefix}/{name}"
        if not self._side.wait_for(key, bound_s):
            raise RanksAbsent({self.rank: f"waited {bound_s:g} s in vain for {name}"})
        return load(self._side.get(key) or b"")[""]

    def clear(self, names: Iterable[str]) -> None:
        """Free what these names take up."""
        for name in names:
            self._laid_out.pop(name, None)
            if self._side is not None:
                self._side.take(f"{self._prefix}/{name}")


def exchange() -> Exchange:
    """The exchange among this job's ranks. Raises ``WorldError`` for several ranks that torchrun did not start."""
    if under_torchrun():
        return Exchange(side_store())
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise WorldError(f"{dist.get_world_size()} ranks have no way to agree: start them with torchrun")
    return Exchange(None)

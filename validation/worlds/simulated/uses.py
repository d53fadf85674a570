"""Who uses a buffer that is on its way: what a rank calls is asked for what it takes and gives.

By functions and not by operators: a mode that sees operators changes what autograd keeps, and an observer must not.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pipeproof.worlds.simulated.network import Network, read_early
from pipeproof.worlds.simulated.races import overlap, place_of
from pipeproof.worlds.simulated.torch_inside import has_memory
from pipeproof.worlds.simulated.work import SimulatedWork
from pipeproof.worlds.stack import own_stack

# For a shape, a type or another tensor: names begin so, or are these.
_ONLY_ASK = ("new_", "empty", "zeros", "ones", "full", "rand", "__get__", "grad", "broadcast_tensors")
_READ = frozenset(
    "item tolist numpy backward isend send equal allclose __bool__ __float__ __int__ __repr__ __index__".split()
)
Works = Sequence[SimulatedWork]


class Uses(TorchFunctionMode):
    """While it is open, the functions that one rank's thread calls may not use what has not come yet.

    A read is what makes another tensor of the buffer, or a number. A view is none, nor what only asks for a shape.
    What writes into what is on its way, or frees it, is kept for who finds that it is a race.
    """

    def __init__(self, network: Network, rank: int) -> None:
        super().__init__()
        self._network = network
        self._rank = rank
        self._unmet = network.unmet(rank)

    def __torch_function__(  # type: ignore[override]  # torch always gives both, and the second may be None
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        posted = [*self._unmet]
        result = func(*args, **(kwargs or {}))
        if posted and (taken := _on_its_way((args, tuple((kwargs or {}).values())), posted)):
            unmet = [work for work in posted if not work.met]
            if not _only_asks(name := getattr(func, "__name__", "")):
                self._look(name, taken, result, [work for work in unmet if work.due])
            _note_writes(taken, unmet)
            self._network.unmet(self._rank)
        return result

    def _look(self, name: str, taken: Sequence[Tensor], result: object, pending: Works) -> None:
        for tensor in taken:
            for work in pending:
                if any(overlap(tensor, one) for one in work.due) and _is_read(name, result, tensor):
                    raise read_early(work, own_stack())


def _on_its_way(values: object, works: Works) -> list[Tensor]:
    """The tensors of these that some of ``works`` may hold: of most functions, none."""
    found = []
    for tensor in tensors_in(values):
        place = place_of(tensor)
        if any(place in work.places or id(tensor) in work.objects for work in works):
            found.append(tensor)
    return found


def _note_writes(taken: Sequence[Tensor], unmet: Works) -> None:
    """Whether this call has written into what is on its way is known only once that has moved."""
    for work in unmet:
        if not work.wrote and any(work.holds(tensor) for tensor in taken) and work.disturbed:
            work.wrote = own_stack()


@cache
def _only_asks(name: str) -> bool:
    return name.startswith(_ONLY_ASK) or name.rstrip("_").endswith("_as")


def _is_read(name: str, result: object, tensor: Tensor) -> bool:
    return name in _READ or any(not overlap(one, tensor) for one in tensors_in(result))


def tensors_in(values: object) -> Iterator[Tensor]:
    """Those in a nest of tuples and lists, with memory to speak of."""
    if isinstance(values, tuple | list):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, Tensor) and values.layout is torch.strided and has_memory(values):
        yield values

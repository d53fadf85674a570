"""Who uses a buffer that is on its way: what a rank calls is asked for what it takes and gives.

By functions and not by operators: a mode that sees operators changes what autograd keeps, and an observer must not.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pipeproof.worlds.simulated.network import Network
from pipeproof.worlds.simulated.races import Version, overlap, versions, within
from pipeproof.worlds.simulated.torch_inside import has_memory, places_of
from pipeproof.worlds.simulated.work import SimulatedWork
from pipeproof.worlds.simulated.works import read_early
from pipeproof.worlds.stack import own_stack

_ONLY_ASK = frozenset(("__get__", "broadcast_tensors"))  # for a shape or a type
_LIKE_FIRST = ("new_", "empty", "zeros", "ones", "full", "rand")  # of their first argument they do; names begin so
_READ = frozenset(
    "item tolist numpy backward isend send equal allclose __bool__ __float__ __int__ __repr__ __index__ __array__ "
    "__format__ __setitem__".split()
)
_GIVE_NOTHING = ("_fused_", "_amp_foreach_")  # and read what they take; names begin so
_TO_HOST = _READ - {"backward", "isend", "send", "__setitem__"} | frozenset(  # for which a program waits for a device
    "cpu nonzero argwhere unique unique_consecutive masked_select bincount is_nonzero __complex__ __contains__".split()
)
_ELSEWHERE = frozenset(("copy_", "__setitem__"))  # what they write into may lie on another device than what they read
_NESTS = (tuple, list)
_NONE: Mapping[str, object] = {}
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

    def __torch_function__(  # type: ignore[override]  # torch always gives both, and the second may be None
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        concerned = self._concerned(func, args, named)
        result = self._watched(concerned, func, args, named) if concerned else self._called(func, args, named)
        if self._network.fine:
            self._network.scheduler.pause()
        return result

    def _concerned(self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Works:
        """What has not been waited for and lies where arguments do. Most calls concern nothing, so they come first."""
        if _name(func) == "__get__" or not (unmet := self._network.works.unmet(self._rank)):
            return ()
        places = {place for tensor in tensors_in(args, named) for place in places_of(tensor)}
        return [work for work in unmet if not places.isdisjoint(work.places)]

    def _watched(self, concerned: Works, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """What it gives, which takes what is on its way. Who wrote there is known if nobody had before."""
        name, taken = _name(func), tensors_in(args, named)
        used = _used(name, args, named)
        before = [(work, versions(work.due), work.disturbed) for work in concerned]
        result = self._called(func, args, named)
        unmet = [one for one in before if not one[0].met]
        for work in [one for one, *_ in unmet if one.due]:
            for tensor in used:
                if any(overlap(tensor, one) for one in work.due) and _is_read(name, result, tensor):
                    self._network.scheduler.tell(read_early(work, own_stack()))
        for work, then, disturbed in unmet:
            work.rewritten |= _rewrites(taken, work.due, then)
            if not disturbed and work.disturbed:
                work.wrote = own_stack()
        return result

    def _called(self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """What it gives. A program that has gone ahead of its device waits for it where it wants a number of it."""
        if (ahead := self._network.scheduler.ahead) is None:
            return func(*args, **named)
        name, taken = _name(func), tensors_in(args, named)
        to_host = name == "cpu" or _names_host((*args[1:], *named.values()))
        if (waits := _waits(name, args)) is not False:
            self._network.works.asks(taken, surely=waits is True)
        elif name == "to" and to_host:
            self._network.works.asks(taken, surely=False)  # on a device it may be a copy to it, or from it
        if getattr(func, "__module__", "") == dist.distributed_c10d.__name__:  # which waits, and asks for nothing
            return func(*args, **named)
        ahead.inside[self._rank] += 1
        try:
            result = func(*args, **named)
        finally:
            ahead.inside[self._rank] -= 1
        if to_host:
            ahead.on_device.drop(taken)  # here a copy on the host may be the same memory: where that lies nobody knows
        elif ahead.on_device.meet(taken) and name not in _ELSEWHERE:  # what is made of that lies there, too
            ahead.on_device.add(tensors_in((result,)))
        return result


def _name(func: Any) -> str:
    return getattr(func, "__name__", "")


def _used(name: str, args: Sequence[Any], named: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a function may read: of some that it takes it asks only for a shape or a type."""
    if name in _ONLY_ASK:
        return []
    if name.rstrip("_").endswith("_as"):
        args, named = args[:1], {}
    elif name.startswith(_LIKE_FIRST):
        args, named = args[1:], {key: value for key, value in named.items() if key != "input"}
    elif name == "__setitem__":
        args = args[1:]
    return tensors_in(args, named)


def _waits(name: str, args: Sequence[Any]) -> bool | None:
    """Whether a program waits here for a device on which all lies that it gives; None where that is not known."""
    if name == "untyped_storage":  # as pickle calls it
        return None
    if name not in ("__getitem__", "__setitem__"):
        return name in _TO_HOST
    index = tensors_in(args[1:2])
    if not any(one.dtype is torch.bool for one in index):  # else how much it takes depends on numbers
        return False
    if name == "__getitem__" or len(index) > 1:
        return True
    value = args[2]
    if not isinstance(value, Tensor):  # a number is put under a mask on the device itself
        return False
    return None if value.numel() == 1 else True


def _names_host(given: Iterable[object]) -> bool:
    """Whether a place that is given is the host."""
    return any(str(one).startswith("cpu") for one in given if isinstance(one, str | torch.device))


def _rewrites(taken: Sequence[Tensor], due: Sequence[Tensor], before: Sequence[Version]) -> bool:
    """Whether a function that has read none of it has written there. One that gave it another shape wrote nothing.

    Of a tensor that is more than what is due another part may have been written.
    """
    pairs = zip(due, before, versions(due), strict=True)
    changed = [one for one, then, now in pairs if now[0] != then[0] and now[1:] == then[1:]]
    return any(within(other, one) for one in changed for other in taken)


def _is_read(name: str, result: object, tensor: Tensor) -> bool:
    made = tensors_in((result,))
    return name in _READ or name.startswith(_GIVE_NOTHING) or any(not overlap(one, tensor) for one in made)


def tensors_in(values: Sequence[object], named: Mapping[str, object] = _NONE) -> list[Tensor]:
    """Those in nests of tuples and lists, with memory to speak of; of a DTensor and its like, what it consists of."""
    found: list[Tensor] = []
    for value in (*values, *named.values()) if named else values:
        if is_traceable_wrapper_subclass(value):
            found += tensors_in([getattr(value, name) for name in value.__tensor_flatten__()[0]])
        elif isinstance(value, Tensor):
            if value.layout is torch.strided and has_memory(value):
                found.append(value)
        elif isinstance(value, _NESTS):
            found += tensors_in(value)
    return found

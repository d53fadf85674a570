"""Who uses a buffer that is on its way: what a rank calls is asked for what it takes and gives.

By functions and not by operators: a mode that sees operators changes what autograd keeps, and an observer must not.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pipeproof.core.observe.stack import own_stack
from pipeproof.wings.simulated.buffers import Version, overlap, versions, within
from pipeproof.wings.simulated.network import Network
from pipeproof.wings.simulated.torch_inside import has_memory, places_of
from pipeproof.wings.simulated.work import SimulatedWork, read_early

_ONLY_ASK = frozenset(("__get__", "broadcast_tensors"))  # for a shape or a type
_LIKE_FIRST = ("new_", "empty", "zeros", "ones", "full", "rand")  # of their first argument they do; names begin so
_READ = frozenset(
    "item tolist numpy backward isend send equal allclose __bool__ __float__ __int__ __repr__ __index__ __array__ "
    "__format__ __setitem__".split()
)
_GIVE_NOTHING = ("_fused_", "_amp_foreach_")  # and read what they take; names begin so
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
        return self._watched(concerned, func, args, named) if concerned else func(*args, **named)

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
        result = func(*args, **named)
        unmet = [one for one in before if not one[0].met]
        for work in [one for one, *_ in unmet if one.due]:
            for tensor in used:
                if any(overlap(tensor, one) for one in work.due) and _is_read(name, result, tensor):
                    self._network.scheduler.tell(read_early(work, own_stack()))
        for work, then, disturbed in unmet:
            work.rewritten |= _rewrites(taken, work.due, then)
            if not disturbed and work.disturbed:
                work.written_by(own_stack())
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

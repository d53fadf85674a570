"""Uses of buffers in flight: a rank's calls are checked by their inputs and outputs.

It watches functions and not operators, because a mode on operators changes autograd's saved tensors.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pipeproof.core.observe.stack import own_stack
from pipeproof.wings.simulated.buffers import is_within, overlap, versions
from pipeproof.wings.simulated.network import Network
from pipeproof.wings.simulated.torch_inside import has_memory, places_of
from pipeproof.wings.simulated.work import SimulatedWork, read_early

_ONLY_ASK = frozenset(("__get__", "broadcast_tensors"))  # for a shape or a type
_LIKE_FIRST = ("new_", "empty", "zeros", "ones", "full", "rand")  # of their first argument they do; names begin so
_READ = frozenset(
    "item tolist numpy backward isend send equal allclose __bool__ __float__ __int__ __repr__ __index__ __array__ "
    "__format__ __setitem__".split()
)
_GIVE_NOTHING = ("_fused_", "_amp_foreach_")  # prefixes of names; these read their inputs
_NESTS = (tuple, list)
_NONE: Mapping[str, object] = {}
Works = Sequence[SimulatedWork]


class Uses(TorchFunctionMode):
    """Forbid functions in one rank's thread to use buffers in flight, while open.

    A read makes another tensor or a number from the buffer; a view, or a query of its shape, is none. Writes to a
    buffer in flight, and frees, are recorded for the later race.
    """

    def __init__(self, network: Network, rank: int) -> None:
        super().__init__()
        self._network = network
        self._rank = rank

    def __torch_function__(  # type: ignore[override]  # torch always gives both, and the second may be None
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        # Most calls concern no unfinished work on arguments' memory, so this check comes first.
        if _name(func) == "__get__" or not (unmet := self._network.works.unmet(self._rank)):
            return func(*args, **named)
        places = {place for tensor in tensors_in(args, named) for place in places_of(tensor)}
        concerned = [work for work in unmet if not places.isdisjoint(work.places)]
        return self._watch(concerned, func, args, named) if concerned else func(*args, **named)

    def _watch(self, concerned: Works, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Call a function on buffers in flight; record the first writer."""
        name, taken = _name(func), tensors_in(args, named)
        used = _used(name, args, named)
        before = [(work, versions(work.expected), work.disturbed) for work in concerned]
        result = func(*args, **named)
        unmet = [one for one in before if not one[0].met]
        for work in [one for one, *_ in unmet if one.expected]:
            for tensor in used:
                if any(overlap(tensor, one) for one in work.expected) and _is_read(name, result, tensor):
                    self._network.scheduler.tell(read_early(work, own_stack()))
        for work, then, disturbed in unmet:
            # A new shape alone is no write, and a write to a larger tensor may concern another part.
            pairs = zip(work.expected, then, versions(work.expected), strict=True)
            changed = [one for one, was, now in pairs if now[0] != was[0] and now[1:] == was[1:]]
            work.rewritten |= any(is_within(other, one) for one in changed for other in taken)
            if not disturbed and work.disturbed:
                work.note_write(own_stack())
        return result


def _name(func: Any) -> str:
    return getattr(func, "__name__", "")


def _used(name: str, args: Sequence[Any], named: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that a function may read: for some arguments it needs only shape or type."""
    if name in _ONLY_ASK:
        return []
    if name.rstrip("_").endswith("_as"):
        args, named = args[:1], {}
    elif name.startswith(_LIKE_FIRST):
        args, named = args[1:], {key: value for key, value in named.items() if key != "input"}
    elif name == "__setitem__":
        args = args[1:]
    return tensors_in(args, named)


def _is_read(name: str, result: object, tensor: Tensor) -> bool:
    made = tensors_in((result,))
    return name in _READ or name.startswith(_GIVE_NOTHING) or any(not overlap(one, tensor) for one in made)


def tensors_in(values: Sequence[object], named: Mapping[str, object] = _NONE) -> list[Tensor]:
    """Return tensors with memory in nested tuples and lists; for DTensors and the like, their parts."""
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

"""Weights that ranks write after an operation has ended, when the next one first uses them: an overlapped gather."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from pipeproof.foreign.rank import ModulePart, RankMade
from pipeproof.foreign.shared_stages import began
from pipeproof.observers.digest import digest


def with_late_weights(made: Sequence[Sequence[RankMade]]) -> list[list[RankMade]]:
    """``made``, by operation, with weights after each as they are once all ranks have written them.

    A weight is late where ranks that hold it left others in it, and began the next operation with the same. After the
    last operation nobody sees what becomes of such a one.
    """
    operations = [[*one] for one in made]
    late: dict[tuple[int, int], set[int]] = {}
    for operation, following in zip(operations, made[1:], strict=False):
        for rank, one in enumerate(operation):
            pairs = list(zip(one.parts, following[rank].parts, strict=True))
            found = [dict(_written_late(*pair)) for pair in pairs]
            operation[rank] = replace(one, parts=tuple(map(_with_weights, one.parts, found)))
            for chunk, new in enumerate(found):
                late.setdefault((rank, chunk), set()).update(new)
    for rank, one in enumerate(operations[-1]):
        unseen = [dict.fromkeys(late.get((rank, chunk), ())) for chunk in range(len(one.parts))]
        operations[-1][rank] = replace(one, parts=tuple(map(_with_weights, one.parts, unseen)))
    return operations


def _written_late(part: ModulePart, following: ModulePart) -> Iterator[tuple[int, Tensor]]:
    """The late weights of ``part``, by number, as the ``following`` operation began with them."""
    for k in part.after:
        left = {digest(one.after[k][1]) for _, one in part.members if k in one.after and one.after[k][0] is None}
        begun = {began(one, k) for _, one in following.members if k not in one.lacks}
        if len(left) > 1 and len(begun) == 1 and k in following.values:
            yield k, following.values[k]


def _with_weights(part: ModulePart, new: Mapping[int, Tensor | None]) -> ModulePart:
    """``part``, whose weights after the operation are ``new`` (None: not seen), and those of no member of it."""
    known = {k: (None, weight) for k, weight in new.items() if weight is not None}
    members = tuple((rank, _without(one, new)) for rank, one in part.members)
    kept = _without(part, new)
    return replace(kept, members=members, after={**kept.after, **known}, late=frozenset(new))


def _without(part: ModulePart, late: Collection[int]) -> ModulePart:
    return replace(part, after={k: weight for k, weight in part.after.items() if k not in late})

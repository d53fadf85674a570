"""What a rank of a job draws of its data, by content: held against the microbatches that a check is given."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeproof.core.observe.digest import digest
from pipeproof.core.observe.fence import Fence, looking

Content = frozenset[tuple[bytes, int]]  # the digests of what is in a microbatch, in no order; equal ones are counted
NOT_GIVEN = (
    "the job drew data that is in none of the microbatches given to the check: pass those that this rank's replica "
    "trains in the step"
)


def content(microbatch: Any) -> Content:
    """That of the tensors in ``microbatch``, in whatever form a framework wants them."""
    counts = Counter(digest(leaf) for leaf in tree_leaves(microbatch) if isinstance(leaf, Tensor))
    return frozenset((one, number) for one, count in counts.items() for number in range(count))


def content_of_rows(tensors: Iterable[Any]) -> Content:
    """That of the rows of ``tensors``, of which a framework cuts or joins microbatches."""
    return frozenset(_rows(tensors))


def _rows(tensors: Iterable[Any]) -> Iterator[tuple[bytes, int]]:
    """The contents of the rows of ``tensors``, in their order."""
    yield from ((digest(row), 0) for one in tensors if isinstance(one, Tensor) and one.dim() for row in one)


class Drawn:
    """What was drawn so far. Where a rank draws nothing, or its adapter does not see it, that is nothing."""

    def __init__(self) -> None:
        self.fence = Fence()
        self._drawn: list[Content] = []
        self._targets: list[Content] = []

    @looking
    def note(self, microbatch: Any) -> None:
        """Note a microbatch, or a batch."""
        self._drawn.append(content(microbatch))

    @looking
    def note_rows(self, tensors: Iterable[Any]) -> None:
        """Note what goes into a pipeline that cuts it itself."""
        self._drawn.extend(frozenset([row]) for row in _rows(tensors))

    @looking
    def note_targets(self, tensors: Iterable[Any]) -> None:
        """Note the rows of targets, which tell the order of what is drawn where its inputs are not seen."""
        self._targets.extend(frozenset([row]) for row in _rows(tensors))

    def noting(self, source: Any) -> Any:
        """``source``, from which the job draws, noting what it does; None stays None."""
        return None if source is None else _Noted(source, self)

    def is_other_than(self, given: Collection[Content]) -> bool:
        """Whether something was drawn that is no part of what was ``given``, and of which nothing given is a part."""
        known = frozenset[tuple[bytes, int]]().union(*given)
        some = [one for one in given if one]
        return bool(known) and any(not one <= known and not any(its <= one for its in some) for one in self._drawn)

    def order(self, given: Sequence[Content]) -> Sequence[int]:
        """Which of the microbatches ``given`` was drawn first, which next; empty where content does not tell."""
        found: list[int] = []
        for one in self._drawn or self._targets:
            own = [k for k, its in enumerate(given) if its and (one <= its or its <= one)]
            if len(own) != 1:
                return ()
            found += own if own != found[-1:] else []
        return found if sorted(found) == [*range(len(given))] else ()


class _Noted:
    """An iterator whose items are noted; all else is as it is."""

    def __init__(self, source: Any, drawn: Drawn) -> None:
        self._source, self._drawn = source, drawn
        self._items: Iterator[Any] = iter(source)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = next(self._items)
        self._drawn.note(item)
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def contents(microbatches: Sequence[Any] | None) -> list[Content]:
    """That of each; nothing where a rank has none."""
    return [content(one) for one in microbatches or ()]

"""Content of the data drawn by a job's rank, compared with the microbatches given to a check."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeproof.core.observe.digest import digest
from pipeproof.core.observe.fence import Fence, looking

Content = frozenset[tuple[bytes, int]]  # digests of a microbatch, unordered; equal ones are counted
NOT_GIVEN = (
    "the job drew data that is in none of the microbatches given to the check: pass those that this rank's replica "
    "trains in the step"
)


def content(microbatch: Any) -> Content:
    """Return the content of all tensors in ``microbatch``, in any framework's form."""
    counts = Counter(digest(leaf) for leaf in tree_leaves(microbatch) if isinstance(leaf, Tensor))
    return frozenset((one, number) for one, count in counts.items() for number in range(count))


def content_of_rows(tensors: Iterable[Any]) -> Content:
    """Return the content of the rows of ``tensors``; frameworks cut or join microbatches by rows."""
    return frozenset(_rows(tensors))


def _rows(tensors: Iterable[Any]) -> Iterator[tuple[bytes, int]]:
    """Yield the content of each row in ``tensors``."""
    yield from ((digest(row), 0) for one in tensors if isinstance(one, Tensor) and one.dim() for row in one)


class Drawn:
    """Data drawn so far; empty if a rank draws none, or its adapter cannot observe it."""

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
        """Note the rows of a pipeline's input before the cut."""
        self._drawn.extend(frozenset([row]) for row in _rows(tensors))

    @looking
    def note_targets(self, tensors: Iterable[Any]) -> None:
        """Note rows of targets, which give the order if inputs go unobserved."""
        self._targets.extend(frozenset([row]) for row in _rows(tensors))

    def noting(self, source: Any) -> Any:
        """Wrap ``source``, the job's data, to note every draw; None stays None."""
        return None if source is None else _Noted(source, self)

    def is_other_than(self, given: Collection[Content]) -> bool:
        """True if some drawn content neither contains nor belongs to the content ``given``."""
        known = frozenset[tuple[bytes, int]]().union(*given)
        some = [one for one in given if one]
        return bool(known) and any(not one <= known and not any(its <= one for its in some) for one in self._drawn)

    def order(self, given: Sequence[Content]) -> Sequence[int]:
        """Return the order in which microbatches ``given`` were drawn; empty if content is ambiguous."""
        found: list[int] = []
        for one in self._drawn or self._targets:
            own = [k for k, its in enumerate(given) if its and (one <= its or its <= one)]
            if len(own) != 1:
                return ()
            found += own if own != found[-1:] else []
        return found if sorted(found) == [*range(len(given))] else ()


class _Noted:
    """An iterator that notes its items; otherwise like the original."""

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
    """Return the content of each microbatch; empty for None."""
    return [content(one) for one in microbatches or ()]

"""Who waits for whom: the ranks that nothing outside them would free."""

from collections.abc import Collection, Mapping


def unfreed(waits: Mapping[int, Collection[int]]) -> list[tuple[int, ...]]:
    """The groups of ranks that wait for none but each other; one that waits for nobody is such a group by itself.

    ``waits``: for each rank those that it may be waiting for. Whichever it is, it leads to one of these groups.
    """
    ends = {rank: _reached(rank, waits) for rank in {*waits, *(peer for peers in waits.values() for peer in peers)}}
    groups = {tuple(sorted(reached)) for rank, reached in ends.items() if all(rank in ends[one] for one in reached)}
    return sorted(groups)


def _reached(rank: int, waits: Mapping[int, Collection[int]]) -> set[int]:
    """``rank`` and all that it waits for, directly or through others."""
    found, left = {rank}, [rank]
    while left:
        new = set(waits.get(left.pop(), ())) - found
        found |= new
        left += new
    return found

"""A communicator: the ranks that use one group, by their numbers in it, and what they have posted there so far."""

from collections import Counter
from dataclasses import dataclass, field

from torch.distributed import Store  # type: ignore[attr-defined]  # not in __all__

from pipeproof.worlds.stack import Stack, own_stack

MEETING = "communicator"  # the key under which the first to come leaves its number, which nobody else sees


@dataclass(eq=False)
class Communicator:
    """One that ranks have in common. ``members``: each rank's number in the world, by that in here, once it is in.

    ``made``: where each of these made its group. ``on_host``: programs wait there, and no device for them.
    """

    number: int
    size: int
    on_host: bool
    members: dict[int, int] = field(default_factory=dict)
    made: dict[int, Stack] = field(default_factory=dict)
    calls: Counter[int] = field(default_factory=Counter)  # of collectives, by the rank's number in here

    def global_rank(self, rank: int) -> int | None:
        """What rank of the world has this number here; None where it has not come yet."""
        return self.members.get(rank)


class Communicators:
    """All of a run of so many ranks. Those who come with one store have one communicator."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._all: list[Communicator] = []

    def join(self, store: Store, rank: int, size: int, *, world_rank: int, on_host: bool) -> Communicator:
        """The communicator of ``store``, in which the rank of the world that comes has the number ``rank``."""
        made = Communicator(len(self._all), size, on_host)
        number = int(store.compare_set(MEETING, "", str(made.number)).decode())
        if number == made.number:
            self._all.append(made)
        found = self._all[number]
        if size == self._ranks and rank == world_rank:
            found.members |= {one: one for one in range(size) if one not in found.members}  # also those still to come
        found.members[rank] = world_rank
        found.made[world_rank] = own_stack()
        return found

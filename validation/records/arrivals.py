"""What the ranks bring to a check, and what follows from all of it together."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from validation.records.compare import other_microbatch
from validation.records.record import Place, RecordedOperation


@dataclass(frozen=True)
class Arrival:
    """What a rank brings to a check: parameters by name with their stage, its microbatches, and what is wrong."""

    held: Mapping[str, int]
    microbatches: tuple[str, ...] | None
    problem: str


def places_of(arrivals: Sequence[Arrival]) -> dict[str, list[Place]]:
    """Every parameter's ranks and stages, in the order of ranks."""
    places: dict[str, list[Place]] = {}
    for rank, arrival in enumerate(arrivals):
        for name, stage in arrival.held.items():
            places.setdefault(name, []).append((rank, stage))
    return places


@dataclass(frozen=True)
class Run:
    """Who ran what: the replica of the model that each rank works on, and the microbatches of the step by digest.

    ``shares``: the numbers of those that each rank's replica ran; None where nobody says.
    """

    replicas: tuple[int, ...]
    microbatches: tuple[str, ...]
    shares: tuple[tuple[int, ...] | None, ...]

    @property
    def count(self) -> int:
        return max(self.replicas) + 1

    @property
    def apart(self) -> bool:
        """Whether every replica says which microbatches are its own."""
        return self.count > 1 and None not in self.shares

    def as_in(self, expected: Sequence[str]) -> "Run":
        """This run, with microbatches numbered as in ``expected``, where they are those."""
        if not self.apart or sorted(expected) != sorted(self.microbatches):
            return self
        numbers: dict[str, list[int]] = {}
        for number, digest in reversed(list(enumerate(expected))):
            numbers.setdefault(digest, []).append(number)
        place = [numbers[digest].pop() for digest in self.microbatches]
        shares = tuple(tuple(place[number] for number in share or ()) for share in self.shares)
        return Run(self.replicas, tuple(expected), shares)

    def together(self, given: Sequence[Sequence[Any] | None]) -> list[Any]:
        """The microbatches of all replicas, of those that ranks have ``given``."""
        by_replica = {replica: one for replica, one in zip(self.replicas, given, strict=True) if one is not None}
        return [pair for _, one in sorted(by_replica.items()) for pair in one]


def run_of(arrivals: Sequence[Arrival]) -> tuple[Run, dict[int, str]]:
    """What the ranks ran together, and what is wrong with it."""
    replicas = _replicas(arrivals)
    given: dict[int, tuple[str, ...]] = {}
    for replica in sorted(set(replicas)):
        known = [one.microbatches if of == replica else None for one, of in zip(arrivals, replicas, strict=True)]
        if any(one is not None for one in known):
            if problems := disagreement(known):
                return Run(replicas, (), (None,) * len(replicas)), problems
            given[replica] = next(one for one in known if one is not None)
    if not given:
        return Run(replicas, (), (None,) * len(replicas)), disagreement([])
    if len(set(given.values())) == 1:
        (every,) = set(given.values())
        whole = tuple(range(len(every))) if len(set(replicas)) == 1 else None
        return Run(replicas, every, (whole,) * len(replicas)), {}
    every = tuple(digest for _, one in sorted(given.items()) for digest in one)
    ends = {replica: sum(len(one) for other, one in given.items() if other <= replica) for replica in given}
    own = {replica: tuple(range(ends[replica] - len(one), ends[replica])) for replica, one in given.items()}
    return Run(replicas, every, tuple(own.get(replica) for replica in replicas)), {}


def other_run(run: Run, expected: RecordedOperation) -> dict[int, str]:
    """That the microbatches of ``run`` are not those that a record has, and the first that is not."""
    found = other_microbatch(expected.microbatches, run.as_in(expected.microbatches).microbatches)
    return {0: f"microbatches that are not the record's: {found}; run the recorded ones in this step"} if found else {}


def _replicas(arrivals: Sequence[Arrival]) -> tuple[int, ...]:
    """Ranks that hold the same are replicas in their order, where there are equally many of each; else all are one."""
    seen: Counter[frozenset[tuple[str, int]]] = Counter()
    found = []
    for arrival in arrivals:
        held = frozenset(arrival.held.items())
        found.append(seen[held])
        seen[held] += bool(held)
    alike = len({count for held, count in seen.items() if held}) == 1
    return tuple(found) if alike else (0,) * len(found)


def told(problems: Mapping[int, str]) -> str:
    """What is wrong on each rank, in one line; empty where nothing is."""
    return "; ".join(f"rank {rank}: {problem}" for rank, problem in problems.items() if problem)


def disagreement(digests: Sequence[tuple[str, ...] | None]) -> dict[int, str]:
    """The rank that runs other microbatches than another, and which."""
    known = [(rank, found) for rank, found in enumerate(digests) if found is not None]
    if not known:
        return {0: "nobody says which microbatches the step is of: pass them on one rank at least"}
    first, expected = known[0]
    for rank, seen in known:
        if found := other_microbatch(expected, seen):
            return {rank: f"other microbatches than those of rank {first}: {found}"}
    return {}

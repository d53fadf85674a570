"""What the ranks bring to a check, and what follows from all of it together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from validation.records.compare import other_microbatch
from validation.records.record import Place


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

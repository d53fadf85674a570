"""What each rank's pytest collected, and how the ranks differ in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import indent

_SHOWN = 5  # tests named for each rank, before the rest is only counted


@dataclass(frozen=True)
class Collected:
    """One rank's tests in its order, what it could not collect and why, and the seed that pytest-randomly drew."""

    nodeids: Sequence[str]
    errors: Mapping[str, str]
    random_seed: int | None = None


def difference(collected: Sequence[Collected]) -> str:
    """How the ranks' tests differ, whatever their order; empty where they do not."""
    everything = dict.fromkeys(nodeid for its in collected for nodeid in its.nodeids)
    lines = []
    for rank, its in enumerate(collected):
        if lacks := [nodeid for nodeid in everything if nodeid not in its.nodeids]:
            more = f" and {len(lacks) - _SHOWN} more" if len(lacks) > _SHOWN else ""
            lines.append(f"rank {rank} lacks {', '.join(lacks[:_SHOWN])}{more}")
        for path, text in its.errors.items():
            if any(path not in other.errors for other in collected):
                lines.append(f"rank {rank} cannot collect {path}:\n{indent(text, '    ')}")
    return "\n".join(["the ranks collected different tests", *lines]) if lines else ""

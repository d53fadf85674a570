"""A tensor in brief, of which ranks hold parts or the same: added up, so that another layout has the same of it."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipeproof.core.observe.shards import Bounds, Shard
from pipeproof.core.observe.sketch import Sketch, added


class Part(NamedTuple):
    """What a rank has of a tensor, None where it has a gradient that is none, and where that lies."""

    rank: int
    at: Shard
    sketch: Sketch | None

    @property
    def place(self) -> tuple[Bounds, tuple[int, int]]:
        """Where it lies, and which addend it is."""
        return self.at.bounds, self.at.addend

    @property
    def content(self) -> bytes:
        """Its digest; empty where it is none."""
        return b"" if self.sketch is None else self.sketch.digest


@dataclass(frozen=True)
class WholeTensor:
    """``sketch``: that of all of it. parts: those that ranks have, each once, from the first rank that has it.

    apart: a rank whose part differs from that of another rank which has the same one, and that other rank.
    """

    sketch: Sketch | None
    parts: tuple[Part, ...]
    apart: tuple[int, int] | None = None

    def farthest(self, other: "WholeTensor") -> int | None:
        """The rank whose part is farthest from that of ``other``; None where parts of the other do not lie so."""
        theirs = {one.place: one.sketch for one in other.parts}
        if theirs.keys() != {one.place for one in self.parts}:
            return None
        gaps = {
            one.rank: one.sketch.gap(its)
            for one in self.parts
            if one.sketch is not None and (its := theirs[one.place]) is not None and its.digest != one.content
        }
        return max(gaps, key=gaps.__getitem__, default=None)


def whole_tensors(found: Sequence[Mapping[str, Part]]) -> dict[str, WholeTensor]:
    """All tensors by name, of what each rank has, in the order of ranks."""
    parts: dict[str, list[Part]] = {}
    for own in found:
        for name, part in own.items():
            parts.setdefault(name, []).append(part)
    return {name: whole_tensor(every) for name, every in parts.items()}


def whole_tensor(parts: Sequence[Part]) -> WholeTensor:
    """A tensor by what all ranks have of it. Parts of a replica count once."""
    first: dict[object, Part] = {}
    apart = None
    for one in parts:
        other = first.setdefault(one.place, one)
        if apart is None and other.content != one.content:
            apart = one.rank, other.rank
    distinct = tuple(first.values())
    return WholeTensor(_sum(distinct), distinct, apart)


def _sum(parts: Sequence[Part]) -> Sketch | None:
    there = [one.sketch for one in parts if one.sketch is not None]
    shape = parts[0].at.shape
    if not there or shape is None:
        return None
    whole = added(there, shape)
    if all(one.at.addend[1] == 1 for one in parts):
        return whole
    # The bits of a sum are known to who forms it alone; its norm is what projections tell.
    content = hashlib.sha256(b"".join(sorted(one.digest for one in there))).digest()[: len(whole.digest)]
    norm = math.sqrt(sum(one**2 for one in whole.projections) / len(whole.projections))
    return replace(whole, digest=content, norm=norm)

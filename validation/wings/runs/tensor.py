"""Sketch of a tensor from ranks' parts or copies: independent of the layout."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipeproof.core.observe.shards import Bounds, Shard
from pipeproof.core.observe.sketch import Sketch, add_sketches


class Part(NamedTuple):
    """A rank's part of a tensor, None for a missing gradient, and its place."""

    rank: int
    at: Shard
    sketch: Sketch | None

    @property
    def place(self) -> tuple[Bounds, tuple[int, int]]:
        """Place of the part, and its number as an addend."""
        return self.at.bounds, self.at.addend

    @property
    def content(self) -> bytes:
        """Digest; empty if missing."""
        return b"" if self.sketch is None else self.sketch.digest


@dataclass(frozen=True)
class WholeTensor:
    """``sketch``: of the whole tensor. parts: each once, from the first rank that has it.

    apart: a rank whose part differs from another rank's copy, and that other rank.
    """

    sketch: Sketch | None
    parts: tuple[Part, ...]
    apart: tuple[int, int] | None = None

    def farthest(self, other: "WholeTensor") -> int | None:
        """Return the rank with the farthest part from ``other``'s; None if parts differ in place."""
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
    """Combine all tensors by name, from each rank's parts in rank order."""
    parts: dict[str, list[Part]] = {}
    for own in found:
        for name, part in own.items():
            parts.setdefault(name, []).append(part)
    return {name: whole_tensor(every) for name, every in parts.items()}


def whole_tensor(parts: Sequence[Part]) -> WholeTensor:
    """Combine a tensor from all ranks' parts. Replicas count once."""
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
    whole = add_sketches(there, shape)
    if all(one.at.addend[1] == 1 for one in parts):
        return whole
    # Bits of a sum are unknown before summation; projections give its norm.
    content = hashlib.sha256(b"".join(sorted(one.digest for one in there))).digest()[: len(whole.digest)]
    norm = math.sqrt(sum(one**2 for one in whole.projections) / len(whole.projections))
    return replace(whole, digest=content, norm=norm)

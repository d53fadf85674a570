"""Weights of several stages that begin with the same numbers: they may be one, under several names."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipeproof.judging.verdict import names_of
from pipeproof.observers.digest import digest
from pipeproof.observers.elements import any_nonzero
from pipeproof.observers.shards import held_here
from pipeproof.observers.sketch import sketch
from pipeproof.records.own_shards import OwnShards
from pipeproof.reference.step import Site

Gradients = Mapping[str, Tensor | None]
Gather = Callable[[object, str], list[Any]]
Contents = Mapping[Site, tuple[str, bytes]]  # of a rank: which part of each weight it has, and the digest of that
_CURE = "if they are one weight, give it one name, or pass build=: then its gradients must be added up"


@dataclass(frozen=True)
class EqualWeights:
    """Pairs of names of weights that are equal in every replica.

    ``one``: by each name the first, of those of which the same sum was made, which is what neither has alone.
    ``doubtful``: pairs that are not so.
    """

    one: Mapping[str, str] = field(default_factory=dict)
    doubtful: Collection[tuple[str, str]] = ()

    @staticmethod
    def of(
        shards: OwnShards,
        contents: Contents,
        first: Mapping[str, str],
        made: tuple[Gradients, Gradients],
        gather: Gather,
        replicas: Sequence[int],
    ) -> "EqualWeights":
        """As ``among``, of this rank's weights. ``made``: the gradients that were seen, and what stages have alone.

        ``first``: by names of a weight that has several, as far as that is known, the first one.
        """
        (seen, alone), parameters = made, shards.parameters
        known = {(stage, first.get(name, name)): one for (stage, name), one in contents.items()}

        def sum_of(name: str) -> bytes | None:
            return _added_up(parameters[name], seen.get(name), shards.part(name, alone.get(name)))

        return EqualWeights.among(known, replicas, gather=gather, sum_of=sum_of)

    @staticmethod
    def among(
        contents: Contents,
        replicas: Sequence[int],
        *,
        gather: Gather,
        sum_of: Callable[[str], bytes | None],
    ) -> "EqualWeights":
        """Those of all ranks, of which this one has ``contents``; ``replicas`` is that of each rank.

        ``sum_of``: the digest of what was added up for this rank's weight of a name; empty where it is what its stage
        has alone; None where it is of no use. Every rank calls this, and ``gather`` brings all ranks'.
        """
        lines = [_together(line) for line in _lines(gather(contents, "which weights are equal"), replicas)]
        groups = [group for group in _equal(lines) if len({stage for stage, _ in group}) > 1]
        if not groups:
            return EqualWeights()
        own = {name for _, name in contents} & {name for group in groups for _, name in group}
        told = {name: made for name in sorted(own) if (made := sum_of(name)) is not None}
        sums = [_together(line) for line in _lines(gather(told, "the gradients of equal weights"), replicas)]
        first, doubtful = dict[str, str](), list[tuple[str, str]]()
        for group in groups:
            known = [(stage, name) for stage, name in group if all(name in made for made in sums)]
            at: dict[tuple[bytes, ...], Site] = {}
            for stage, name in known:
                key = tuple(made[name] for made in sums)
                one = at.setdefault(key, (stage, name))
                if all(key) and one[0] != stage:
                    first[name] = one[1]
                elif known[0][0] != stage:
                    doubtful.append((known[0][1], name))
        return EqualWeights(first, doubtful)

    def first(self, known: Mapping[str, str]) -> dict[str, str]:
        """By each name the first that its weight has, where so much was ``known``."""
        return {**{name: self.one.get(one, one) for name, one in known.items()}, **self.one}

    @property
    def told(self) -> str:
        """What is to be said of them, if anything."""
        found = []
        if self.one:
            names = names_of([f"{other} and {one}" for other, one in self.one.items()])
            found.append(f"taken for one weight, for they begin alike and have one sum: {names}")
        if self.doubtful:
            names = names_of([f"{one} and {other}" for one, other in self.doubtful])
            found.append(f"begin alike, and each has its own gradient: {names}; {_CURE}")
        return "; ".join(found)


def _added_up(parameter: Tensor, seen: Tensor | None, alone: Tensor | None) -> bytes | None:
    """The digest of what was ``seen`` to be added up for a weight; empty where it is what its stage has ``alone``.

    None where the weight is frozen, or has one number in every element: many begin so, and are not one.
    """
    held = held_here(parameter).detach().flatten()
    if not parameter.requires_grad or not any_nonzero(held - held[:1]):
        return None
    made = None if seen is None else held_here(seen)
    if made is None or not any_nonzero(made) or (alone is not None and sketch(made).is_like(sketch(alone))):
        return b""
    return digest(made)


def _lines(every: Sequence[Any], replicas: Sequence[int]) -> list[list[Any]]:
    return [[one for one, line in zip(every, replicas, strict=True) if line == own] for own in sorted({*replicas})]


def _together(line: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    return {key: one for rank in line for key, one in rank.items()}


def _equal(lines: Sequence[Contents]) -> Iterator[list[Site]]:
    """Weights of several names that are equal in each of the ``lines``, by stage."""
    groups: dict[tuple[object, ...], dict[str, Site]] = {}
    for site in sorted(site for site in lines[0] if all(site in line for line in lines)):
        groups.setdefault(tuple(line[site] for line in lines), {}).setdefault(site[1], site)
    return ([*group.values()] for group in groups.values())

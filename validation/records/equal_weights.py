"""Weights of several stages that begin with the same numbers: they may be one, under several names."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

from torch import Tensor

from pipeproof.judging.verdict import names_of
from pipeproof.observers.digest import digest
from pipeproof.observers.elements import any_nonzero, in_fp64
from pipeproof.observers.shards import held_here
from pipeproof.observers.sketch import sketch
from pipeproof.records.own_shards import OwnShards
from pipeproof.reference.step import Site

Gradients = Mapping[str, Tensor | None]
Gather = Callable[[object, str], list[Any]]
Contents = Mapping[Site, tuple[str, bytes]]  # of a rank: which part of each weight it has, and the digest of that
_CURE = "if they are one weight, give it one name, or pass build=: then its gradients must be added up"
_ENOUGH, _MANY = 1 << 12, 256  # elements that are looked at, and numbers among them: bf16 has few, and repeats them
_IN_DOUBT = "they may be one weight whose gradients were not added up: pass build=, which tells"


@dataclass(frozen=True)
class EqualWeights:
    """Pairs of names of weights that are equal in every replica.

    ``one``: by each name the first, of those of which the same sum was made, which is what neither has alone.
    ``twins``: pairs that are not so, and are equal as one seed or a copy of whole modules makes them. ``doubtful``:
    other pairs, that are equal in their own right.
    """

    one: Mapping[str, str] = field(default_factory=dict)
    twins: Collection[tuple[str, str]] = ()
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

        return EqualWeights.among(known, replicas, partial(_kinds, shards, first), gather=gather, sum_of=sum_of)

    @staticmethod
    def among(
        contents: Contents,
        replicas: Sequence[int],
        kinds: Callable[[], Mapping[Site, str]],
        *,
        gather: Gather,
        sum_of: Callable[[str], bytes | None],
    ) -> "EqualWeights":
        """Those of all ranks, of which this one has ``contents``; ``replicas`` is that of each rank.

        ``kinds``: the class of the module that has a weight, and the weight's shape, of those of this rank that are
        drawn. ``sum_of``: the digest of what was added up for this rank's weight of a name; empty where it is what its
        stage has alone; None where it is of no use. Every rank calls this, and ``gather`` brings all ranks'.
        """
        lines = [_together(line) for line in _lines(gather(contents, "which weights are equal"), replicas)]
        groups = [group for group in _equal(lines) if len({stage for stage, _ in group}) > 1]
        if not groups:
            return EqualWeights()
        own = {name for _, name in contents} & {name for group in groups for _, name in group}
        told = {name: made for name in sorted(own) if (made := sum_of(name)) is not None}
        sums = [_together(line) for line in _lines(gather(told, "the gradients of equal weights"), replicas)]
        first, apart = dict[str, str](), list[tuple[Site, Site]]()
        for group in groups:
            known = [(stage, name) for stage, name in group if all(name in made for made in sums)]
            at: dict[tuple[bytes, ...], Site] = {}
            for stage, name in known:
                key = tuple(made[name] for made in sums)
                one = at.setdefault(key, (stage, name))
                if all(key) and one[0] != stage:
                    first[name] = one[1]
                elif known[0][0] != stage:
                    apart.append((known[0], (stage, name)))
        if not apart:
            return EqualWeights(first)
        drawn = _Drawn(_together(gather(kinds(), "what weights were drawn beside equal ones")), lines[0])
        pairs = [(one[1], other[1], drawn.are_twins(one, other)) for one, other in apart]
        twins, doubtful = ([(one, other) for one, other, is_twin in pairs if is_twin is kind] for kind in (True, False))
        return EqualWeights(first, twins, doubtful)

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
        for pairs, cure in ((self.twins, _CURE), (self.doubtful, _IN_DOUBT)):
            if pairs:
                names = names_of([f"{one} and {other}" for one, other in pairs])
                found.append(f"begin alike, and each has its own gradient: {names}; {cure}")
        return "; ".join(found)


@dataclass(frozen=True)
class _Weight:
    kind: str
    content: tuple[str, bytes] | None


@dataclass(frozen=True)
class _Drawn:
    """The weights that are drawn, by stage and name: their kinds, and what all ranks have of them."""

    kinds: Mapping[Site, str]
    contents: Contents

    def are_twins(self, one: Site, other: Site) -> bool:
        """Whether one seed, or a copy of the modules around them, makes both equal, and not they alone are.

        One seed makes the first weights of two stages equal, until they draw others. A copy makes all of two modules
        so: the smallest around both that have several weights tell, or the stages.
        """
        if one not in self.kinds or other not in self.kinds:
            return True  # every one of its kind may begin so
        if self.kinds[one] != self.kinds[other]:
            return False
        return self._have_one_seed(one, other) or self._around(*one) == self._around(*other)

    def _have_one_seed(self, one: Site, other: Site) -> bool:
        """Whether all that their stages drew is equal, from the first on to them and until one drew something else."""
        mine, its = ([*self._of(stage, name, 0).values()] for stage, name in (one, other))
        pairs = [*zip(mine, its, strict=False)]
        equal = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
        until = [[*self._of(stage, name, 0)].index(name) for stage, name in (one, other)]
        return max(until) < equal and (equal == len(pairs) or pairs[equal][0].kind != pairs[equal][1].kind)

    def _around(self, stage: int, name: str) -> dict[str, "_Weight"]:
        """By name in it, what the smallest module around the weight has that has others, too; else its stage."""
        depth = name.count(".")
        found = (self._of(stage, name, levels) for levels in range(depth, -1, -1))
        return next((each for each in found if len(each) > 1), self._of(stage, name, 0))

    def _of(self, stage: int, name: str, levels: int) -> dict[str, "_Weight"]:
        """What the module has that has the first so many ``levels`` of ``name``."""
        prefix = "".join(f"{part}." for part in name.split(".")[:levels])
        own = [site for site in self.kinds if site[0] == stage and site[1].startswith(prefix)]
        return {site[1].removeprefix(prefix): _Weight(self.kinds[site], self.contents.get(site)) for site in own}


def _kinds(shards: OwnShards, first: Mapping[str, str]) -> dict[Site, str]:
    """The class of the module that has a weight, and the weight's shape, of those of this rank that are drawn."""
    every = [
        (stage, shards.own.rename(stage, f"{path}.{name}".removeprefix(".")), type(part).__name__, one)
        for stage, module in shards.own.modules.items()
        for path, part in module.named_modules()
        for name, one in part.named_parameters(recurse=False)
    ]
    drawn = [one for one in every if _differs(one[3]) and _looks_drawn(one[3])]
    return {(k, first.get(name, name)): f"{kind} {tuple(one.shape)}" for k, name, kind, one in drawn}


def _added_up(parameter: Tensor, seen: Tensor | None, alone: Tensor | None) -> bytes | None:
    """The digest of what was ``seen`` to be added up for a weight; empty where it is what its stage has ``alone``.

    None where the weight is frozen, or has one number in every element: many begin so, and are not one.
    """
    if not _differs(parameter):
        return None
    made = None if seen is None else held_here(seen)
    if made is None or not any_nonzero(made) or (alone is not None and sketch(made).is_like(sketch(alone))):
        return b""
    return digest(made)


def _differs(parameter: Tensor) -> bool:
    """Whether it trains, and its elements are not all the same."""
    held = held_here(parameter).detach().flatten()
    return parameter.requires_grad and any_nonzero(held - held[:1])


def _looks_drawn(parameter: Tensor) -> bool:
    """Whether a row of it, from its middle, has many numbers, in no order: not as of identities, or of ranges.

    Many layers begin with the same of these, as state space models do.
    """
    held = held_here(parameter).detach()
    row = in_fp64((held if held.dim() < 2 else held[len(held) // 2]).flatten()[:_ENOUGH]).tolist()
    return row not in (sorted(row), sorted(row, reverse=True)) and len({*row}) >= min(len(row) / 2, _MANY)


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

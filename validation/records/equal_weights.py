"""Weights of several stages that begin with the same numbers: they may be one, under several names."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from pipeproof.judging.verdict import names_of
from pipeproof.observers.elements import any_nonzero
from pipeproof.observers.shards import held_here
from pipeproof.observers.sketch import Sketch, sketch
from pipeproof.records.drawn_weights import Drawn, DrawnWeights, drawn
from pipeproof.records.own_shards import OwnShards
from pipeproof.reference.step import Site

Gradients = Mapping[str, Tensor | None]
Gather = Callable[[object, str], list[Any]]
Contents = Mapping[Site, tuple[str, bytes]]  # of a rank: which part of each weight it has, and the digest of that
Pairs = Collection[tuple[str, str]]
_CURE = "if they are one weight, give it one name, or pass build=: then its gradients must be added up"
_IN_DOUBT = "they may be one weight whose gradients were not added up: pass build=, which tells"
_SEEDED = "they may be one weight, or two whose gradients were added up by mistake: pass build=, which tells"
_HALF = "they may be one weight, and then both must train: pass build=, which tells"


@dataclass(frozen=True)
class AddedUp:
    """What was added up for a weight: None where that is what its stage has alone; ``trains``: it is not frozen."""

    trains: bool
    whole: Sketch | None

    def is_one_with(self, other: "AddedUp") -> bool:
        """Whether the same sum was made of both, but for the order of its addends."""
        return self.whole is not None and other.whole is not None and self.whole.is_like(other.whole)


class _SumOf(Protocol):
    def __call__(self, name: str, *, plain: bool) -> AddedUp | None: ...


@dataclass(frozen=True)
class EqualWeights:
    """Pairs of names of weights that are equal in every replica.

    ``one``: by each name the first, of those of which the same sum was made, which is what neither has alone. Those
    that have one number in every element may be one only where all that was drawn beside them is.
    ``twins``: pairs that are not so, and are equal as one seed makes them, or as weights of one stage are.
    ``doubtful``: other pairs, that are equal in their own right. ``half``: such of which one is frozen.
    ``seeded``: those of ``one`` that one seed makes equal, too.
    """

    one: Mapping[str, str] = field(default_factory=dict)
    twins: Pairs = ()
    doubtful: Pairs = ()
    half: Pairs = ()
    seeded: Pairs = ()

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
        (seen, alone), parameters, own = made, shards.parameters, shards.own
        once = {(k, own.rename(k, name)) for k, module in own.modules.items() for name, _ in module.named_parameters()}
        known = {(at[0], first.get(at[1], at[1])): one for at, one in contents.items() if at in once}

        def sum_of(name: str, *, plain: bool) -> AddedUp | None:
            if _differs(parameters[name]) is plain:
                return None
            return _added_up(parameters[name], seen.get(name), shards.part(name, alone.get(name)))

        return EqualWeights.among(known, replicas, partial(_drawn, shards, first), gather=gather, sum_of=sum_of)

    @staticmethod
    def among(
        contents: Contents,
        replicas: Sequence[int],
        drawn: Callable[[], Mapping[Site, Drawn]],
        *,
        gather: Gather,
        sum_of: _SumOf,
    ) -> "EqualWeights":
        """Those of all ranks, of which this one has ``contents``; ``replicas`` is that of each rank.

        ``drawn``: those of this rank's weights that look so. ``sum_of``: what was added up for this rank's weight of a
        name, where it is ``plain``, with one number in every element, or where it is not; else None. Many begin plain,
        and are not one. Every rank calls this, and ``gather`` brings all ranks'.
        """

        def sums(*, plain: bool) -> list[dict[str, AddedUp]]:
            told = {name: made for name in sorted(own) if (made := sum_of(name, plain=plain)) is not None}
            return [_together(line) for line in _lines(gather(told, "the gradients of equal weights"), replicas)]

        lines = [_together(line) for line in _lines(gather(contents, "which weights are equal"), replicas)]
        groups = [group for group in _equal(lines) if len({stage for stage, _ in group}) > 1]
        if not groups:
            return EqualWeights()
        own = {name for _, name in contents} & {name for group in groups for _, name in group}
        first, apart, plain = dict[str, str](), list[_Apart](), list[_Apart]()
        of_drawn = sums(plain=False)
        for group in groups:
            _divide(group, of_drawn, first, apart)
        if not apart and not first:
            return EqualWeights()
        every = _together(gather(drawn(), "what weights were drawn beside equal ones")[::-1])  # of shards the first
        known = DrawnWeights({at: replace(one, content=lines[0].get(at)) for at, one in every.items()})
        stage_of = {name: stage for group in groups for stage, name in group}
        pairs = [((stage_of[one], one), (stage_of[other], other)) for other, one in first.items()]
        pairs = [(one, other) for one, other in pairs if one in every and other in every]
        seeded = [(one[1], other[1]) for one, other in pairs if known.have_one_seed(one, other)]
        beside = [those for group in groups for those in known.copies(group, first)] if first else []
        of_plain = sums(plain=True) if beside else []
        for those in beside:
            _divide(those, of_plain, first, plain)
        is_twin = {pair: pair.often or known.are_twins(pair.one, pair.other) for pair in apart}
        twins = [pair.names for pair in apart if is_twin[pair] and not pair.half]
        doubtful, half = (
            [pair.names for pair in (*apart, *plain) if not is_twin.get(pair) and pair.half is kind]
            for kind in (False, True)
        )
        return EqualWeights(first, twins, doubtful, half, seeded)

    @property
    def in_doubt(self) -> bool:
        """Whether any may be one weight, and nothing explains why they are equal."""
        return bool(self.doubtful or self.half or self.seeded)

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
        each, frozen = "and each has its own gradient", "and one of them is frozen"
        summed = "as one seed makes them, and have one sum"
        for pairs, how, cure in (
            (self.twins, each, _CURE),
            (self.doubtful, each, _IN_DOUBT),
            (self.half, frozen, _HALF),
            (self.seeded, summed, _SEEDED),
        ):
            if pairs:
                names = names_of([f"{one} and {other}" for one, other in pairs])
                found.append(f"begin alike, {how}: {names}; {cure}")
        return "; ".join(found)


@dataclass(frozen=True)
class _Apart:
    """Two equal weights without one sum. ``half``: one is frozen. ``often``: one stage has several that are equal."""

    one: Site
    other: Site
    half: bool
    often: bool

    @property
    def names(self) -> tuple[str, str]:
        return self.one[1], self.other[1]


def _divide(
    group: Sequence[Site], sums: Sequence[Mapping[str, AddedUp]], first: dict[str, str], apart: list[_Apart]
) -> None:
    """Enter which of a ``group`` of equal weights have one sum, and which do not; ``sums`` are those of each replica.

    Where one stage has several of them, as one rule begins them, they are no one weight's copies.
    """
    known = [(site, [made[site[1]] for made in sums]) for site in group if all(site[1] in made for made in sums)]
    often = max(Counter(stage for stage, _ in group).values()) > 1
    for k, ((stage, name), made) in enumerate(known):
        those = (at for at, other in known[:k] if all(a.is_one_with(b) for a, b in zip(made, other, strict=True)))
        one = next(those, None)
        if one is not None and one[0] != stage:
            first[name] = one[1]
        elif known[0][0][0] != stage:
            trains = {made[0].trains, known[0][1][0].trains}
            if True in trains:
                apart.append(_Apart(known[0][0], (stage, name), len(trains) > 1, often))


def _drawn(shards: OwnShards, first: Mapping[str, str]) -> dict[Site, Drawn]:
    """Those of this rank's weights that look drawn."""
    every = [
        (stage, shards.own.rename(stage, f"{path}.{name}".removeprefix(".")), drawn(type(part).__name__, one))
        for stage, module in shards.own.modules.items()
        for path, part in module.named_modules()
        for name, one in part.named_parameters(recurse=False)
        if _differs(one)
    ]
    return {(k, first.get(name, name)): one for k, name, one in every if one is not None}


def _added_up(parameter: Tensor, seen: Tensor | None, alone: Tensor | None) -> AddedUp:
    """What was ``seen`` to be added up for a weight of which its stage has so much ``alone``."""
    made = None if seen is None else held_here(seen)
    if not parameter.requires_grad or made is None or not any_nonzero(made):
        return AddedUp(parameter.requires_grad, None)
    whole = sketch(made)
    return AddedUp(True, None if alone is not None and whole.is_like(sketch(alone, known=whole)) else whole)


def _differs(parameter: Tensor) -> bool:
    """Whether its elements are not all the same."""
    held = held_here(parameter).detach().flatten()
    return any_nonzero(held - held[:1])


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

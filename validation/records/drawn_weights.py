"""Weights that begin with random numbers, and whether a seed, or a copy of modules, makes two of them alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor

from pipeproof.observers.elements import in_fp64
from pipeproof.observers.shards import held_here
from pipeproof.reference.step import Site

_ROWS, _LONG, _MANY = 4, 1 << 10, 256  # what is looked at; numbers among it: bf16 has few, and repeats them
_SHORT = 4  # elements of a row that may well be in order by chance
_FIRST = 16  # elements that tell of what random numbers a weight was made
_NEAR = 1e-2  # how far they may be from a multiple of others: bf16 has few digits


@dataclass(frozen=True)
class Drawn:
    """A weight that was drawn: the class of the module that has it, with its shape, and its first elements.

    ``content``: what tells equal ones; None where that is not known.
    """

    kind: str
    first: tuple[float, ...] = ()
    content: object = None

    def is_as(self, other: "Drawn") -> bool:
        """Whether both are of one kind, and equal or made of the same random numbers, as where deep ones are less."""
        same = self.content is not None and self.content == other.content
        return self.kind == other.kind and (same or self.is_of_the_draws_of(other))

    def is_of_the_draws_of(self, other: "Drawn") -> bool:
        """Whether both begin with the same random numbers, in multiples of their own, and go on as their shapes do."""
        pairs = [*zip(self.first, other.first, strict=False)]
        size = sum(b * b for _, b in pairs)
        if len(pairs) < 2 or not size:
            return False
        factor = sum(a * b for a, b in pairs) / size
        return max(abs(a - factor * b) for a, b in pairs) < _NEAR * max(abs(a) for a, _ in pairs)


@dataclass(frozen=True)
class DrawnWeights:
    """Those of all stages, by stage and name, in the order of each stage's."""

    every: Mapping[Site, Drawn]

    def are_twins(self, one: Site, other: Site) -> bool:
        """Whether one seed, or a copy of the modules around them, makes both equal, and not they alone are.

        One seed makes the first weights of two stages equal, until they draw others; some may be drawn anew, and then
        others of the same kind are equal still. A copy makes all of two modules so: the smallest around both that have
        several weights tell.
        """
        if one not in self.every or other not in self.every:
            return True  # every one of its kind may begin so
        if self.every[one].kind != self.every[other].kind:
            return False
        return self._have_one_seed(one, other) or self._are_in_copies(one, other) or self._are_of_several(one, other)

    def _have_one_seed(self, one: Site, other: Site) -> bool:
        """Whether all that their stages drew is alike, from the first on to them and until one drew something else.

        What it drew then is of the same random numbers, too. A single weight is alike by a seed only where it is all
        that both drew: else it may be the one that both have.
        """
        mine, its = (self._of(stage, name, 0) for stage, name in (one, other))
        pairs = [*zip(mine.values(), its.values(), strict=False)]
        alike = len([*takewhile(lambda pair: pair[0].is_as(pair[1]), pairs)])
        if max([*mine].index(one[1]), [*its].index(other[1])) >= alike:
            return False
        if alike < len(pairs):
            return pairs[alike][0].is_of_the_draws_of(pairs[alike][1])
        return alike > 1 or len(mine) == len(its)

    def _are_of_several(self, one: Site, other: Site) -> bool:
        """Whether several different weights of their kind are equal in both stages, as those of layer after layer."""
        kind = self.every[one].kind
        both = ({own.content for own in self._of(*at, 0).values() if own.kind == kind} for at in (one, other))
        return len(set.intersection(*both) - {None}) > 1

    def _are_in_copies(self, one: Site, other: Site) -> bool:
        """Whether all that the modules around them both drew is alike, and that is more than they are."""
        mine, its = self._around(*one), self._around(*other)
        both = mine.keys() & its.keys()
        return len(both) > 1 and all(mine[name].is_as(its[name]) for name in both)

    def _around(self, stage: int, name: str) -> dict[str, Drawn]:
        """By name in it, what the smallest module around the weight has that has others, too; else its stage."""
        depth = name.count(".")
        found = (self._of(stage, name, levels) for levels in range(depth, -1, -1))
        return next((each for each in found if len(each) > 1), self._of(stage, name, 0))

    def _of(self, stage: int, name: str, levels: int) -> dict[str, Drawn]:
        """What the module has that has the first so many ``levels`` of ``name``."""
        prefix = "".join(f"{part}." for part in name.split(".")[:levels])
        own = [site for site in self.every if site[0] == stage and site[1].startswith(prefix)]
        return {site[1].removeprefix(prefix): self.every[site] for site in own}


def drawn(kind: str, weight: Tensor) -> Drawn | None:
    """``weight`` of a module of this ``kind``, if it looks drawn."""
    if not looks_drawn(weight):
        return None
    return Drawn(
        f"{kind} {tuple(weight.shape)}", tuple(in_fp64(held_here(weight).detach().flatten()[:_FIRST]).tolist())
    )


def looks_drawn(weight: Tensor) -> bool:
    """Whether rows of it have many numbers, in no order: not as of identities, or of ranges.

    Many layers begin with the same of these, as state space models do. A row of one number tells nothing, as one that
    no word of a vocabulary has.
    """
    rows = [row for row in _rows(held_here(weight).detach()) if len({*row}) > 1]
    every = [one for row in rows for one in row]
    in_order = all(row in (sorted(row), sorted(row, reverse=True)) for row in rows)
    return not in_order and len({*every}) >= min(len(every) / 2, _MANY)


def _rows(held: Tensor) -> list[Sequence[float]]:
    """Some rows of it, from all over it; all in one where they are short."""
    if held.dim() < 2 or held[0].numel() < _SHORT:
        return [in_fp64(held.flatten()[: _ROWS * _LONG]).tolist()]
    at = sorted({len(held) * k // (2 * _ROWS) for k in range(1, 2 * _ROWS, 2)})
    return [in_fp64(held[k].flatten()[:_LONG]).tolist() for k in at]

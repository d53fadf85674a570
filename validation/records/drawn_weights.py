"""Weights that begin with random numbers, and whether a seed makes two of them alike."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from pipeproof.observers.elements import in_fp64
from pipeproof.observers.shards import held_here
from pipeproof.reference.step import Site

_ROWS, _LONG, _MANY = 4, 1 << 10, 256  # what is looked at; numbers among it: bf16 has few, and repeats them
_SHORT = 4  # elements of a row that may well be in order by chance
_FIRST = 16  # elements that tell of what random numbers a weight was made
_SEVERAL = 8  # rows of which it is no chance that each follows from those before
_ROUNDED, _LITTLE = 8, 1e-3  # times what a type rounds, and what that makes of large angles
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
        """Whether one seed makes both equal, and not they alone are.

        It makes the first weights of two stages equal, until they draw others; some may be drawn anew, and then others
        between which these lie are equal still. Whole modules that are equal otherwise are copies of each other, or
        one: nobody knows.
        """
        if one not in self.every or other not in self.every:
            return True  # every one of its kind may begin so
        if self.every[one].kind != self.every[other].kind:
            return False
        return self.have_one_seed(one, other) or self._are_of_several(one, other)

    def copies(self, plain: Iterable[Site], first: Mapping[str, str]) -> list[list[Site]]:
        """Those of some weights that were not drawn that have one place in modules whose drawn weights are all one.

        ``first``: of each name the first that its weight has.
        """
        groups: dict[object, list[Site]] = {}
        for stage, name in plain:
            prefix, drawn = self._beside(stage, name)
            weights = tuple((one, first.get(f"{prefix}{one}", f"{prefix}{one}")) for one in sorted(drawn))
            if weights:
                groups.setdefault((weights, name.removeprefix(prefix)), []).append((stage, name))
        return [those for those in groups.values() if len(those) > 1]

    def have_one_seed(self, one: Site, other: Site) -> bool:
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
        """Whether several of their kind are equal in both stages, in the same places, and others lie between them.

        As those of layer after layer of which an initialisation draws the others anew.
        """
        mine, its = (self._of(stage, name, 0) for stage, name in (one, other))
        pairs = [*takewhile(lambda pair: pair[0].kind == pair[1].kind, zip(mine.values(), its.values(), strict=False))]
        equal = [k for k, (a, b) in enumerate(pairs) if a.content is not None and a.content == b.content]
        same = [*mine].index(one[1]) == [*its].index(other[1])
        kind = self.every[one].kind
        several = {pairs[k][0].content for k in equal if pairs[k][0].kind == kind}
        return same and len(several) > 1 and equal[-1] - equal[0] >= len(equal)

    def _beside(self, stage: int, name: str) -> tuple[str, Collection[str]]:
        """The smallest module around a weight that drew any, and the names of those in it."""
        prefixes = (_prefix(name, levels) for levels in range(name.count("."), -1, -1))
        found = ((one, self._of(stage, name, one.count("."))) for one in prefixes)
        return next((each for each in found if each[1]), (name, ()))

    def _of(self, stage: int, name: str, levels: int) -> dict[str, Drawn]:
        """What the module has that has the first so many ``levels`` of ``name``."""
        prefix = _prefix(name, levels)
        own = [site for site in self.every if site[0] == stage and site[1].startswith(prefix)]
        return {site[1].removeprefix(prefix): self.every[site] for site in own}


def _prefix(name: str, levels: int) -> str:
    return "".join(f"{part}." for part in name.split(".")[:levels])


def drawn(kind: str, weight: Tensor) -> Drawn | None:
    """``weight`` of a module of this ``kind``, if it looks drawn."""
    if not looks_drawn(weight):
        return None
    return Drawn(
        f"{kind} {tuple(weight.shape)}", tuple(in_fp64(held_here(weight).detach().flatten()[:_FIRST]).tolist())
    )


def looks_drawn(weight: Tensor) -> bool:
    """Whether rows of it have many numbers, in no order: not as of identities, of ranges or of waves.

    Many layers begin with the same of these, as state space models do. A row of one number tells nothing, as one that
    no word of a vocabulary has.
    """
    if _is_of_waves(held_here(weight).detach()):
        return False
    rows = [row for row in _rows(held_here(weight).detach()) if len({*row}) > 1]
    every = [one for row in rows for one in row]
    in_order = all(row in (sorted(row), sorted(row, reverse=True)) for row in rows)
    return not in_order and len({*every}) >= min(len(every) / 2, _MANY)


def _is_of_waves(held: Tensor) -> bool:
    """Whether each column goes on as a wave does, as positions begin that are sines and cosines.

    Of any three that follow each other, the outer two together are the same multiple of the middle one.
    """
    if held.dim() != 2 or len(held) < _SEVERAL or held.is_complex():
        return False
    few = held[:_LONG, :_MANY]
    part = in_fp64(few).reshape(few.shape)
    outer, middle = part[2:] + part[:-2], part[1:-1]
    times = (outer * middle).sum(0) / middle.square().sum(0).clamp(min=torch.finfo(torch.float64).tiny)
    allowed = max(_LITTLE, _ROUNDED * torch.finfo(held.dtype).eps if held.is_floating_point() else 0.0)
    return bool(((outer - times * middle).abs().amax(0) <= allowed * part.abs().amax(0)).all())


def _rows(held: Tensor) -> list[Sequence[float]]:
    """Some rows of it, from all over it; all in one where they are short."""
    if held.dim() < 2 or held[0].numel() < _SHORT:
        return [in_fp64(held.flatten()[: _ROWS * _LONG]).tolist()]
    at = sorted({len(held) * k // (2 * _ROWS) for k in range(1, 2 * _ROWS, 2)})
    return [in_fp64(held[k].flatten()[:_LONG]).tolist() for k in at]

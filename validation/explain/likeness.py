"""What is this tensor instead of what it should be? One ordered list of tests, for boundaries and gradients.

The surest come first: that something is not there, that it is another's, what shows in every element; then what takes
a combination of tensors. Each says nothing unless chance is ruled out. ``sketches`` has those for a few of its numbers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pipeproof.core.limits import precision_of
from pipeproof.core.observe.likeness import MEAN, SAME_NUMBER, Elements, Label, Likeness
from pipeproof.core.observe.recording import Point
from pipeproof.core.tolerance import agrees, error, stands_for_none
from pipeproof.explain.known import Known, form, nearest
from pipeproof.explain.limits import ALIKE, CHANCE, CLEARLY, DECIDED, FEW
from pipeproof.explain.reordering import by_chance, reordered
from pipeproof.explain.rounding import rounded_as
from pipeproof.explain.solver import (
    choices,
    conclusive,
    fit,
    simple,
    told_within,
)

Counts = tuple[tuple[int, float], ...]  # how often each microbatch is in a sum

_HERE = Label(Point(-1, -1, ""))


@dataclass(frozen=True)
class _Asked:
    """A tensor that is not what it should be. ``limit``: the relative error that rounding may leave of any tensor."""

    seen: Tensor
    due: Tensor
    at: Label
    known: Known
    limit: float

    @cached_property
    def one(self) -> Tensor:
        """What was seen, in fp64."""
        return self.seen.double()

    @cached_property
    def two(self) -> Tensor:
        """What is due, in fp64."""
        return self.due.double()

    @cached_property
    def wrong(self) -> Tensor:
        """The elements that rounding does not explain."""
        allowed = self.limit * self.two.abs().max()
        return ~((self.one == self.two) | ((self.one - self.two).abs() <= allowed))

    @cached_property
    def telling(self) -> Tensor:
        """The elements that show whether they are right: the others are as small as rounding."""
        return self.two.abs() > CLEARLY * self.limit * self.two.abs().max()

    def but_for(self, wrong: Tensor) -> bool:
        """Whether it is no chance that all that is not ``wrong`` is right."""
        right = int((self.telling & ~wrong).sum())
        gap = (self.one - self.two).nan_to_num(nan=1e30, posinf=1e30, neginf=1e30)
        if not right or bool(wrong.all()):
            return False
        chance = max(by_chance(gap, wrong, self.two, self.limit), 1e-30)
        return conclusive(right, used=0, atoms=1, limit=chance, ways=choices(right, of=int(self.telling.sum())))

    def inside(self, wrong: Tensor) -> "_Asked":
        """The same of some elements, where rounding leaves as much as in the largest of all."""
        size, rest = self.two.abs().max() * int(wrong.sum()) ** 0.5, self.two[wrong].norm()
        limit = min(1.0, self.limit * (size / rest).item()) if rest else 1.0
        return _Asked(self.seen[wrong], self.due[wrong], self.at, self.known.within(self.seen, wrong), limit)


Test = Callable[[_Asked], Likeness | None]


def likeness(
    seen: Tensor | None,
    due: Tensor | None,
    at: Label = _HERE,
    *,
    known: Known | None = None,
    limit: float = 0.0,
    rounding: float = 0.0,
) -> Likeness | None:
    """What ``seen`` is in place of ``due``; None where it is that bit for bit, or up to ``limit``.

    ``rounding``: what that may have done to ``seen``, relative to its size, where it is more than its type says.
    """
    known = known or Known()
    if seen is None or due is None:
        return _absent(seen, due, at, known)
    if agrees(seen, due, limit):
        return None
    asked = _Asked(seen, due, at, known, max(limit, rounding, precision_of(due.dtype).least))
    return _first((_anothers, *_PLAIN, *_OF_NUMBERS, *_VAGUE), asked) or _different(asked)


def plainly(seen: Tensor | None, due: Tensor | None, at: Label, every: Callable[[], Known] = Known) -> Likeness | None:
    """What is plainly wrong with a gradient, whatever it is made of; ``every``: those of all parameters.

    It is another's only where it is not its own, but for rounding of any kind.
    """
    if seen is None or due is None:
        return None if seen is None and stands_for_none(due) else _absent(seen, due, at, Known())
    known = every() if error(seen, due) > told_within(due.dtype) else Known()
    return _first((_anothers, *_PLAIN), _Asked(seen.cpu(), due.cpu(), at, known, precision_of(due.dtype).least))


def in_place_of(whole: Tensor, seen: Tensor, at: Label, limit: float) -> Likeness:
    """What a gradient is in place of the ``whole`` of what it is expected to be the sum of, up to ``limit``."""
    if whole.numel() < 2:
        return Likeness("different", at, words="one number is a multiple of any other")
    asked = _Asked(seen.double().cpu(), whole, at, Known(), limit)
    return _first(_OF_NUMBERS, asked) or Likeness("different", at)


def _first(tests: Sequence[Test], asked: _Asked) -> Likeness | None:
    return next((found for test in tests if (found := test(asked)) is not None), None)


def _absent(seen: Tensor | None, due: Tensor | None, at: Label, known: Known) -> Likeness | None:
    if due is not None:
        return Likeness("missing", at)
    if seen is None or stands_for_none(seen):
        return None
    return Likeness("unexpected", at, known.find(seen, at, limit=0.0))


def _anothers(asked: _Asked) -> Likeness | None:
    """Bit for bit, or within rounding, that of another place, microbatch, parameter or step."""
    label = asked.known.find(asked.seen, asked.at, limit=asked.limit if asked.limit <= ALIKE else 0.0)
    return None if label is None or label == asked.at else Likeness("other", asked.at, label)


def _shape(asked: _Asked) -> Likeness | None:
    same = asked.seen.shape == asked.due.shape
    return None if same else Likeness("shape", asked.at, forms=(form(asked.seen), form(asked.due)))


def _not_finite(asked: _Asked) -> Likeness | None:
    bad = ~asked.one.isfinite() & (asked.one != asked.two)
    if not bad.any():
        return None
    alone = torch.equal(asked.wrong, bad) and asked.but_for(bad)
    return Likeness("not-finite", asked.at, part=part_of(bad, ~bad & asked.telling) if alone else None)


def _zero(asked: _Asked) -> Likeness | None:
    return Likeness("zero", asked.at) if asked.due.any() and not asked.seen.any() else None


def _rounded(asked: _Asked) -> Likeness | None:
    narrow = rounded_as(asked.seen, asked.due)
    return Likeness("rounded", asked.at, narrow=narrow) if narrow else None


def _multiple(asked: _Asked) -> Likeness | None:
    factor = factor_of(asked.one, asked.two, asked.limit)
    return None if factor is None or factor == 1.0 else Likeness("multiple", asked.at, factor=factor)


def factor_of(seen: Tensor, due: Tensor, limit: float) -> float | None:
    """The factor c for which ``seen`` is c times ``due``, within ``limit``; None if there is none.

    A whole number, or one over one, where it may well be that.
    """
    one, two = seen.flatten().double(), due.flatten().double()
    size = two.norm().item()
    if not size or seen.numel() < 2 or not bool(one.isfinite().all()):
        return None
    factor = (one @ two).item() / size**2
    if not factor or (one - factor * two).norm().item() > limit * abs(factor) * size:
        return None
    return simple(factor, limit * abs(factor), limit)


def _reordered(asked: _Asked) -> Likeness | None:
    seen, due = asked.seen, asked.due
    exact = seen.numel() >= FEW and torch.equal(seen.flatten().sort().values, due.flatten().sort().values)
    if exact or reordered(seen, due, asked.limit):
        return Likeness("reordered", asked.at, line="row" if exact and _same_rows(seen, due) else "element")
    return None


def _same_rows(seen: Tensor, due: Tensor) -> bool:
    """Whether a batch of the same rows has them in another order."""
    if seen.dim() < 2 or not len(seen):
        return False
    one, other = (sorted(map(tuple, tensor.flatten(1).tolist())) for tensor in (seen, due))
    return one == other


def _partly(asked: _Asked) -> Likeness | None:
    """Some elements are wrong, and enough others are right that this is no chance: what are they?"""
    wrong = asked.wrong
    if not wrong.any() or not asked.but_for(wrong):
        return None
    inside, part = asked.inside(wrong), part_of(wrong, ~wrong & asked.telling)
    found = _first((_anothers, _zero, _multiple_there), inside)
    found = found or _lines_moved(asked) or _summed(inside) or Likeness("different", asked.at)
    return replace(found, part=part)


def _multiple_there(asked: _Asked) -> Likeness | None:
    enough = conclusive(asked.one.numel(), used=1, atoms=1, limit=asked.limit)
    return _multiple(asked) if enough else None


def part_of(wrong: Tensor, right: Tensor) -> Elements:
    """The ``wrong`` elements: rows or columns, where nothing in these is ``right``."""
    at = wrong.flatten().nonzero().flatten()
    part = Elements(len(at), wrong.numel(), int(at[0]), int(at[-1]))
    if wrong.dim() == 1:
        return replace(part, line="element", numbers=tuple(at.tolist()), lines=len(wrong))
    by_row, by_column = (wrong.flatten(1), right.flatten(1)), (wrong.flatten(0, -2).T, right.flatten(0, -2).T)
    for word, (bad, good) in (("row", by_row), ("column", by_column)):
        lines = bad.any(dim=1)
        if not good[lines].any() and not bool(lines.all()):
            return replace(part, line=word, numbers=tuple(lines.nonzero().flatten().tolist()), lines=len(lines))
    return part


def _lines_moved(asked: _Asked) -> Likeness | None:
    """Wrong rows all of which belong elsewhere in the same tensor."""
    seen, due = asked.one, asked.two
    if due.dim() < 2 or due[0].numel() < 4:
        return None
    allowed = asked.limit * due.abs().max().item()
    at = asked.wrong.flatten(1).any(dim=1).nonzero().flatten()
    near = [(due - seen[k]).abs().flatten(1).amax(dim=1).min(dim=0) for k in at.tolist()]
    found = [int(one.indices) for one in near if one.values.item() <= allowed and bool(due[one.indices].any())]
    if len(found) < len(at):
        return None
    source = Elements(len(found), len(due), found[0], found[-1], "row", tuple(found), len(due))
    return Likeness("other", asked.at, asked.at, source=source)


def _summed(asked: _Asked) -> Likeness | None:
    if not asked.seen.is_floating_point():
        return None
    return summed(asked.seen, asked.two, asked.at, asked.known, asked.limit)


def summed(seen: Tensor, own: Tensor, at: Label, known: Known, limit: float) -> Likeness | None:
    """So much of ``own`` and so much of what is ``known``, or of one number in every element; None if not."""
    others = known.like(seen)
    beside = others.beside(own, seen) if own.any() else ()
    terms = [(nearest((one for one in labels if one != at), at), tensor) for labels, tensor in beside]
    for label, term in (*terms, (Label(at.point._replace(where=SAME_NUMBER)), torch.ones_like(own))):
        found = None if label is None else sum_of(seen, own, term, limit=limit, of=len(others.owned) + 1)
        if found is not None and label is not None:
            factor, more = found
            if label.point.where == SAME_NUMBER and abs(more + own.mean().item()) <= 1e-3 * abs(more):
                label = Label(at.point._replace(where=MEAN))
            return Likeness("sum", at, label, factor=factor, more=more)
    return None


def sum_of(seen: Tensor, own: Tensor, term: Tensor, *, limit: float, of: int = 1) -> tuple[float, float] | None:
    """The coefficients of ``own`` and ``term`` that make ``seen``, where the term is needed and rounding alone is left.

    ``of``: how many terms are tried.
    """
    target, rows = seen.flatten().double(), torch.stack([own.flatten().double(), term.flatten().double()])
    made = fit(target, rows, limit)
    if made.residual > limit or max(made.uncertain) > DECIDED or abs(made.coefficients[1]) <= made.uncertain[1]:
        return None
    left = (target - torch.tensor(made.coefficients, dtype=torch.float64) @ rows).norm().item()
    alone = fit(target, rows[:1], limit).residual * target.norm().item()
    # That some direction takes so much away would happen by chance once in (alone / left) to the number of elements.
    gain = math.log(alone / left) if left and alone else math.inf
    if alone <= CLEARLY * left or (len(target) - 2) * gain <= math.log(of / CHANCE):
        return None
    own_part, more = (simple(c, u, limit) for c, u in zip(made.coefficients, made.uncertain, strict=True))
    return own_part, more


def _different(asked: _Asked) -> Likeness:
    cosine = _cosine(asked.one.flatten(), asked.two.flatten())
    return Likeness("different", asked.at, error=error(asked.seen, asked.due), cosine=cosine)


def _cosine(one: Tensor, other: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(one, other, dim=0).item()


_PLAIN: tuple[Test, ...] = (_shape, _not_finite, _zero, _rounded)
_OF_NUMBERS: tuple[Test, ...] = (_multiple, _reordered, _partly)
_VAGUE: tuple[Test, ...] = (_summed,)

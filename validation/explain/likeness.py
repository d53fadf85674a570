"""Identify a wrong tensor. One ordered list of tests, for boundaries and gradients.

The surest come first: absence, another's tensor, changes of every element; then combinations of tensors. Each test
answers only if chance is ruled out. ``sketches`` has tests for a few of a tensor's numbers.
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
from pipeproof.explain.reordering import by_chance, is_reordered
from pipeproof.explain.rounding import find_rounding
from pipeproof.explain.solver import (
    choices,
    conclusive,
    fit,
    simple,
    tell_within,
)

Counts = tuple[tuple[int, float], ...]  # how often each microbatch is in a sum

_HERE = Label(Point(-1, -1, ""))


@dataclass(frozen=True)
class _Asked:
    """A wrong tensor. ``limit``: the relative error that rounding may leave of any tensor."""

    observed: Tensor
    expected: Tensor
    at: Label
    known: Known
    limit: float

    @cached_property
    def one(self) -> Tensor:
        """The observed tensor, in fp64."""
        return self.observed.double()

    @cached_property
    def two(self) -> Tensor:
        """The expected tensor, in fp64."""
        return self.expected.double()

    @cached_property
    def wrong(self) -> Tensor:
        """Mask the elements beyond rounding."""
        allowed = self.limit * self.two.abs().max()
        return ~((self.one == self.two) | ((self.one - self.two).abs() <= allowed))

    @cached_property
    def telling(self) -> Tensor:
        """Mask the elements large enough to judge: rounding hides smaller ones."""
        return self.two.abs() > CLEARLY * self.limit * self.two.abs().max()

    def but_for(self, wrong: Tensor) -> bool:
        """True if everything outside ``wrong`` matches beyond chance."""
        right = int((self.telling & ~wrong).sum())
        gap = (self.one - self.two).nan_to_num(nan=1e30, posinf=1e30, neginf=1e30)
        if not right or bool(wrong.all()):
            return False
        chance = max(by_chance(gap, wrong, self.two, self.limit), 1e-30)
        return conclusive(right, used=0, atoms=1, limit=chance, ways=choices(right, of=int(self.telling.sum())))

    def inside(self, wrong: Tensor) -> "_Asked":
        """Restrict the comparison to some elements; rounding stays relative to the largest element overall."""
        size, rest = self.two.abs().max() * int(wrong.sum()) ** 0.5, self.two[wrong].norm()
        limit = min(1.0, self.limit * (size / rest).item()) if rest else 1.0
        return _Asked(
            self.observed[wrong], self.expected[wrong], self.at, self.known.narrow(self.observed, wrong), limit
        )


Test = Callable[[_Asked], Likeness | None]


def likeness(
    observed: Tensor | None,
    expected: Tensor | None,
    at: Label = _HERE,
    *,
    known: Known | None = None,
    limit: float = 0.0,
    rounding: float = 0.0,
) -> Likeness | None:
    """The likeness of ``observed`` to ``expected``; None if equal bit for bit, or up to ``limit``.

    ``rounding``: its relative effect on ``observed``, if larger than its type implies.
    """
    known = known or Known()
    if observed is None or expected is None:
        return _absent(observed, expected, at, known)
    if agrees(observed, expected, limit):
        return None
    asked = _Asked(observed, expected, at, known, max(limit, rounding, precision_of(expected.dtype).least))
    return _first((_anothers, *_PLAIN, *_OF_NUMBERS, *_VAGUE), asked) or _different(asked)


def plainly(
    observed: Tensor | None, expected: Tensor | None, at: Label, every: Callable[[], Known] = Known
) -> Likeness | None:
    """Find a gradient's plain faults; ``every``: gradients of all parameters.

    It is another's only if it differs from its own beyond rounding of any kind.
    """
    if observed is None or expected is None:
        return None if observed is None and stands_for_none(expected) else _absent(observed, expected, at, Known())
    known = every() if error(observed, expected) > tell_within(expected.dtype) else Known()
    return _first(
        (_anothers, *_PLAIN), _Asked(observed.cpu(), expected.cpu(), at, known, precision_of(expected.dtype).least)
    )


def in_place_of(whole: Tensor, observed: Tensor, at: Label, limit: float) -> Likeness:
    """The likeness of a gradient to ``whole``, the expected sum, up to ``limit``."""
    if whole.numel() < 2:
        return Likeness("different", at, words="one number is a multiple of any other")
    asked = _Asked(observed.double().cpu(), whole, at, Known(), limit)
    return _first(_OF_NUMBERS, asked) or Likeness("different", at)


def _first(tests: Sequence[Test], asked: _Asked) -> Likeness | None:
    return next((found for test in tests if (found := test(asked)) is not None), None)


def _absent(observed: Tensor | None, expected: Tensor | None, at: Label, known: Known) -> Likeness | None:
    if expected is not None:
        return Likeness("missing", at)
    if observed is None or stands_for_none(observed):
        return None
    return Likeness("unexpected", at, known.find(observed, at, limit=0.0))


def _anothers(asked: _Asked) -> Likeness | None:
    """Bit for bit, or within rounding, the tensor of another place, microbatch, parameter or step."""
    label = asked.known.find(asked.observed, asked.at, limit=asked.limit if asked.limit <= ALIKE else 0.0)
    return None if label is None or label == asked.at else Likeness("other", asked.at, label)


def _shape(asked: _Asked) -> Likeness | None:
    same = asked.observed.shape == asked.expected.shape
    return None if same else Likeness("shape", asked.at, forms=(form(asked.observed), form(asked.expected)))


def _not_finite(asked: _Asked) -> Likeness | None:
    bad = ~asked.one.isfinite() & (asked.one != asked.two)
    if not bad.any():
        return None
    alone = torch.equal(asked.wrong, bad) and asked.but_for(bad)
    return Likeness("not-finite", asked.at, part=part_of(bad, ~bad & asked.telling) if alone else None)


def _zero(asked: _Asked) -> Likeness | None:
    return Likeness("zero", asked.at) if asked.expected.any() and not asked.observed.any() else None


def _find_rounded(asked: _Asked) -> Likeness | None:
    narrow = find_rounding(asked.observed, asked.expected)
    return Likeness("rounded", asked.at, narrow=narrow) if narrow else None


def _multiple(asked: _Asked) -> Likeness | None:
    factor = factor_of(asked.one, asked.two, asked.limit)
    return None if factor is None or factor == 1.0 else Likeness("multiple", asked.at, factor=factor)


def factor_of(observed: Tensor, expected: Tensor, limit: float) -> float | None:
    """Find c with ``observed`` = c * ``expected``, within ``limit``; None without one.

    A whole number or a reciprocal, if close to one.
    """
    one, two = observed.flatten().double(), expected.flatten().double()
    size = two.norm().item()
    if not size or observed.numel() < 2 or not bool(one.isfinite().all()):
        return None
    factor = (one @ two).item() / size**2
    if not factor or (one - factor * two).norm().item() > limit * abs(factor) * size:
        return None
    return simple(factor, limit * abs(factor), limit)


def _find_reordered(asked: _Asked) -> Likeness | None:
    observed, expected = asked.observed, asked.expected
    exact = observed.numel() >= FEW and torch.equal(observed.flatten().sort().values, expected.flatten().sort().values)
    if exact or is_reordered(observed, expected, asked.limit):
        return Likeness("reordered", asked.at, line="row" if exact and _same_rows(observed, expected) else "element")
    return None


def _same_rows(observed: Tensor, expected: Tensor) -> bool:
    """True if a batch has the same rows in another order."""
    if observed.dim() < 2 or not len(observed):
        return False
    one, other = (sorted(map(tuple, tensor.flatten(1).tolist())) for tensor in (observed, expected))
    return one == other


def _partly(asked: _Asked) -> Likeness | None:
    """Identify wrong elements, if right ones exclude chance."""
    wrong = asked.wrong
    if not wrong.any() or not asked.but_for(wrong):
        return None
    inside, part = asked.inside(wrong), part_of(wrong, ~wrong & asked.telling)
    found = _first((_anothers, _zero, _multiple_there), inside)
    found = found or _lines_moved(asked) or _find_sum(inside) or Likeness("different", asked.at)
    return replace(found, part=part)


def _multiple_there(asked: _Asked) -> Likeness | None:
    enough = conclusive(asked.one.numel(), used=1, atoms=1, limit=asked.limit)
    return _multiple(asked) if enough else None


def part_of(wrong: Tensor, right: Tensor) -> Elements:
    """Describe the ``wrong`` elements: as rows or columns, if none of their elements is ``right``."""
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
    """Wrong rows that all belong elsewhere in the same tensor."""
    observed, expected = asked.one, asked.two
    if expected.dim() < 2 or expected[0].numel() < 4:
        return None
    allowed = asked.limit * expected.abs().max().item()
    at = asked.wrong.flatten(1).any(dim=1).nonzero().flatten()
    near = [(expected - observed[k]).abs().flatten(1).amax(dim=1).min(dim=0) for k in at.tolist()]
    found = [int(one.indices) for one in near if one.values.item() <= allowed and bool(expected[one.indices].any())]
    if len(found) < len(at):
        return None
    source = Elements(len(found), len(expected), found[0], found[-1], "row", tuple(found), len(expected))
    return Likeness("other", asked.at, asked.at, source=source)


def _find_sum(asked: _Asked) -> Likeness | None:
    if not asked.observed.is_floating_point():
        return None
    return find_sum(asked.observed, asked.two, asked.at, asked.known, asked.limit)


def find_sum(observed: Tensor, own: Tensor, at: Label, known: Known, limit: float) -> Likeness | None:
    """Explain a tensor by ``own`` and a ``known`` tensor, or a constant; None without a fit."""
    others = known.like(observed)
    beside = others.find_beside(own, observed) if own.any() else ()
    terms = [(nearest((one for one in labels if one != at), at), tensor) for labels, tensor in beside]
    for label, term in (*terms, (Label(at.point._replace(where=SAME_NUMBER)), torch.ones_like(own))):
        found = None if label is None else sum_of(observed, own, term, limit=limit, of=len(others.owned) + 1)
        if found is not None and label is not None:
            factor, more = found
            if label.point.where == SAME_NUMBER and abs(more + own.mean().item()) <= 1e-3 * abs(more):
                label = Label(at.point._replace(where=MEAN))
            return Likeness("sum", at, label, factor=factor, more=more)
    return None


def sum_of(observed: Tensor, own: Tensor, term: Tensor, *, limit: float, of: int = 1) -> tuple[float, float] | None:
    """Fit ``observed`` by ``own`` and ``term``; None if ``term`` adds nothing, or more than rounding remains.

    ``of``: how many terms are tried.
    """
    target, rows = observed.flatten().double(), torch.stack([own.flatten().double(), term.flatten().double()])
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
    return Likeness("different", asked.at, error=error(asked.observed, asked.expected), cosine=cosine)


def _cosine(one: Tensor, other: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(one, other, dim=0).item()


_PLAIN: tuple[Test, ...] = (_shape, _not_finite, _zero, _find_rounded)
_OF_NUMBERS: tuple[Test, ...] = (_multiple, _find_reordered, _partly)
_VAGUE: tuple[Test, ...] = (_find_sum,)

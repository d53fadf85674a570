"""Identify a wrong tensor. One ordered list of tests, for boundaries and gradients.

The surest come first: absence, another's tensor, changes of every element; then combinations of tensors. Each test
answers only if chance is ruled out. ``sketches`` has tests for a few of a tensor's numbers.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pipeproof.core.limits import precision_of
from pipeproof.core.observe.likeness import MEAN, NARROWER, ROUNDED_TO, SAME_NUMBER, Elements, Label, Likeness
from pipeproof.core.tolerance import agrees, error, stands_for_none
from pipeproof.explain.known import Known, form, nearest
from pipeproof.explain.limits import ALIKE, CHANCE, CLEARLY, DECIDED, FEW, LEFT, ROUNDED
from pipeproof.explain.solver import (
    choices,
    conclusive,
    fit,
    orders,
    simple,
    tell_within,
)


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
    at: Label,
    *,
    known: Known | None = None,
    limit: float = 0.0,
) -> Likeness | None:
    """The likeness of ``observed`` to ``expected``; None if equal bit for bit, or up to ``limit``."""
    known = known or Known()
    if observed is None or expected is None:
        return _absent(observed, expected, at, known)
    if agrees(observed, expected, limit):
        return None
    asked = _Asked(observed, expected, at, known, max(limit, precision_of(expected.dtype).least))
    found = _first((_anothers, _plain, *_OF_NUMBERS, _sum_with), asked)
    cosine = torch.nn.functional.cosine_similarity
    return found or Likeness(
        "different",
        at,
        error=error(observed, expected),
        cosine=cosine(asked.one.flatten(), asked.two.flatten(), dim=0).item(),
    )


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
        (_anothers, _plain), _Asked(observed.cpu(), expected.cpu(), at, known, precision_of(expected.dtype).least)
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


def _plain(asked: _Asked) -> Likeness | None:
    """A tensor of another form, not finite, zero, or through a narrower type."""
    if asked.observed.shape != asked.expected.shape:
        return Likeness("shape", asked.at, forms=(form(asked.observed), form(asked.expected)))
    bad = ~asked.one.isfinite() & (asked.one != asked.two)
    if bad.any():
        alone = torch.equal(asked.wrong, bad) and asked.but_for(bad)
        return Likeness("not-finite", asked.at, part=part_of(bad, ~bad & asked.telling) if alone else None)
    narrow = find_rounding(asked.observed, asked.expected)
    return _zero(asked) or (Likeness("rounded", asked.at, narrow=narrow) if narrow else None)


def _zero(asked: _Asked) -> Likeness | None:
    return Likeness("zero", asked.at) if asked.expected.any() and not asked.observed.any() else None


def _multiple(asked: _Asked) -> Likeness | None:
    """A multiple: by a whole number or a reciprocal, if close to one."""
    one, two = asked.one.flatten(), asked.two.flatten()
    size = two.norm().item()
    if not size or one.numel() < 2 or not bool(one.isfinite().all()):
        return None
    factor = (one @ two).item() / size**2
    if not factor or (one - factor * two).norm().item() > asked.limit * abs(factor) * size:
        return None
    factor = simple(factor, asked.limit * abs(factor), asked.limit)
    return None if factor == 1.0 else Likeness("multiple", asked.at, factor=factor)


def _find_reordered(asked: _Asked) -> Likeness | None:
    observed, expected = asked.observed, asked.expected
    exact = observed.numel() >= FEW and torch.equal(observed.flatten().sort().values, expected.flatten().sort().values)
    if not exact and not is_reordered(observed, expected, asked.limit):
        return None
    line = "element"
    if exact and observed.dim() > 1 and len(observed):
        one, other = (sorted(map(tuple, tensor.flatten(1).tolist())) for tensor in (observed, expected))
        line = "row" if one == other else line
    return Likeness("reordered", asked.at, line=line)


def _partly(asked: _Asked) -> Likeness | None:
    """Identify wrong elements, if right ones exclude chance."""
    wrong = asked.wrong
    if not wrong.any() or not asked.but_for(wrong):
        return None
    inside, part = asked.inside(wrong), part_of(wrong, ~wrong & asked.telling)
    enough = conclusive(inside.one.numel(), used=1, atoms=1, limit=inside.limit)
    found = _first((_anothers, _zero, *([_multiple] if enough else [])), inside)
    found = found or _lines_moved(asked) or _sum_with(inside) or Likeness("different", asked.at)
    return replace(found, part=part)


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


def _sum_with(asked: _Asked) -> Likeness | None:
    floating = asked.observed.is_floating_point()
    return find_sum(asked.observed, asked.two, asked.at, asked.known, asked.limit) if floating else None


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


_OF_NUMBERS: tuple[Test, ...] = (_multiple, _find_reordered, _partly)


def is_reordered(observed: Tensor, says: Tensor, limit: float) -> bool:
    """True if ``observed`` reorders the elements or lines in ``says``, beyond chance.

    By a single step that moves all elements, such as a shift, a reversal or a transposition; or by any order. Numbers
    of one kind look alike when sorted, the more so the more there are: so elements in their place count for nothing,
    and the others must exceed rounding by so much that no choice among all orders of the kind would fit by chance.
    """
    one, two = (tensor.double().cpu() for tensor in (observed, says))
    if one.shape != two.shape or not two.any():
        return False
    size = two.abs().max()
    wrong = (one - two).abs() > limit * size
    telling = wrong & (torch.maximum(one.abs(), two.abs()) > CLEARLY * limit * size)
    count = int(telling.sum())

    def no_chance(ways: float) -> bool:
        """True if chance cannot make all wrong elements right in exp(``ways``) orders."""
        chance = by_chance(one - two, wrong, two, limit) if count else 1.0
        return bool(count) and conclusive(count, used=0, atoms=1, limit=chance, ways=ways)

    if no_chance(math.log(two.numel() + two.dim() + 1)):
        if any(error(one, made) <= limit for made in _shift(one, two) if made.shape == one.shape):
            return True
    return no_chance(orders(int(wrong.sum()))) and error(one.flatten().sort()[0], two.flatten().sort()[0]) <= limit


def _shift(observed: Tensor, says: Tensor) -> Iterator[Tensor]:
    """Yield ``says`` with the best shift, reversed along each dimension, and transposed."""
    one, two = (torch.fft.rfft(tensor.flatten()) for tensor in (observed, says))
    yield says.roll(int(torch.fft.irfft(one * two.conj(), n=says.numel()).argmax()))
    yield from (says.flip(dim) for dim in range(says.dim()))
    if says.dim() > 1:
        yield says.transpose(0, 1)


def by_chance(gap: Tensor, wrong: Tensor, says: Tensor, limit: float) -> float:
    """Chance for an element as far off as the ``wrong`` elements to be right."""
    off = gap[wrong].square().mean().sqrt() / says.abs().max()
    return min(1.0, limit / off.item())


_CHANCE = 1e-4  # how likely numbers may be to lie on a grid, or beside it, by chance


def find_rounding(observed: Tensor, whole: Tensor) -> str:
    """Return the narrower type if ``observed`` equals ``whole`` rounded; else empty.

    So many elements of ``whole`` need more digits that chance cannot make all fit: sums of coarse numbers mostly do.
    """
    floating = observed.is_floating_point() and whole.is_floating_point()
    if not floating or observed.shape != whole.shape or torch.equal(observed, whole):
        return ""
    for name, dtype in ROUNDED_TO.items():
        if dtype.itemsize >= observed.dtype.itemsize or not _fits(observed, dtype):
            continue
        count = int((whole.to(dtype).to(whole.dtype) != whole).sum())
        of = max(int(whole.count_nonzero()), count)  # where zeros lie beside the grid, too
        no_chance = 0 < count and of * math.log((of - count + LEFT) / of) <= math.log(_CHANCE)
        fits = no_chance and not any(_fits(whole, narrow) for narrow in NARROWER.values())
        if fits and 0.0 < error(observed, whole) <= max(ROUNDED, 2 * torch.finfo(dtype).eps):
            return name
    return ""


def _fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    """True if ``dtype`` represents ``tensor`` exactly."""
    return torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)

"""A parameter that is not what the rest of its stage says: what it is by itself, in all its elements or in some."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.step import Gradient
from validation.diagnosis.atoms import Term
from validation.diagnosis.combination import choices, conclusive, decided, fit, level, residual_of, simple
from validation.diagnosis.module_pairing import Paired
from validation.diagnosis.reordering import TELLING, by_chance, reordered
from validation.judging.tolerance import error

_NARROW = 2.0**-7  # more than rounding to bfloat16 changes
_SEVERAL = 4

Counts = tuple[tuple[int, float], ...]  # how often each microbatch is in a sum


@dataclass(frozen=True)
class Oddity:
    """A parameter whose gradient is not what the rest of its stage says.

    what: "right" (although the stage is not), "missing", "unexpected", "zero", "not-finite", "shape", "factor" (times
    ``factor``), "rounded", "altered" (in another order), "counted" (microbatches, by ``counts``), "misplaced", "paired"
    (of other ``pairs`` within its module) or "unknown". ``part``: the elements concerned, where all others are right;
    ``note``: more in words.
    """

    parameter: str
    what: str
    factor: float | None = None
    pairs: Paired | None = None
    counts: Counts = ()
    part: str = ""
    note: str = ""


@dataclass(frozen=True)
class Parts:
    """What the rest of a stage says that a gradient is the sum of, by term, in fp64 and of one shape.

    ``lacking``: what the microbatches give that the rest lacks; ``limit``: what rounding may leave of the sum.
    """

    terms: Mapping[Term, Tensor]
    lacking: Mapping[Term, Tensor]
    limit: float

    @property
    def whole(self) -> Tensor:
        """The sum."""
        return torch.stack(list(self.terms.values())).sum(dim=0)

    def at(self, chosen: Tensor) -> "Parts":
        """The part of the elements that are ``chosen``, where rounding leaves as much as in the largest of all."""
        size = self.whole.abs().max() * int(chosen.sum()) ** 0.5
        terms, lacking = ({t: g[chosen] for t, g in some.items()} for some in (self.terms, self.lacking))
        rest = torch.stack(list(terms.values())).sum(dim=0).norm()
        return Parts(terms, lacking, min(1.0, self.limit * (size / rest).item()) if rest else 1.0)


def absence(name: str, seen: Gradient, due: Gradient) -> Oddity | None:
    """What is plainly wrong with a gradient whatever the numbers are."""
    if seen is None:
        return None if due is None else Oddity(name, "missing")
    if due is None:
        return Oddity(name, "unexpected")
    if seen.shape != due.shape:
        return Oddity(name, "shape")
    if not bool(seen.isfinite().all()):
        return Oddity(name, "not-finite")
    if _narrow(seen) and not _narrow(due) and 0 < error(seen.cpu(), due.cpu()) < _NARROW:
        return Oddity(name, "rounded")
    return Oddity(name, "zero") if due.any() and not seen.any() else None


def by_itself(name: str, seen: Tensor, parts: Parts) -> Oddity:
    """What ``seen`` is in place of the sum of ``parts``; "unknown" where it is nothing known."""
    target, whole = seen.double().cpu(), parts.whole
    if whole.numel() < 2:
        return Oddity(name, "unknown", note="one number is a multiple of any other")
    factor = _factor(target, whole, parts.limit)
    if factor is not None:
        return Oddity(name, "factor", factor)
    if reordered(target, whole, parts.limit):
        return Oddity(name, "altered")
    counts = counted(target, parts)
    if counts is not None:
        return Oddity(name, "counted", counts=counts)
    enough = _enough(torch.stack([gradient.flatten() for gradient in parts.terms.values()]), parts.limit)
    few = "" if enough else f"its {whole.numel()} numbers are too few to tell how often each microbatch is in it"
    return _partly(name, target, parts) or Oddity(name, "unknown", note=few)


def _factor(seen: Tensor, whole: Tensor, limit: float) -> float | None:
    """What ``seen`` is times ``whole``; None where it is no multiple, or rounding may have made it one of another."""
    made = fit(seen.flatten(), whole.flatten()[None], limit)
    found = simple(made.coefficients[0], made.uncertain[0], limit)
    return None if made.residual > limit or found == 1.0 else found


def _enough(rows: Tensor, limit: float, used: int | None = None) -> bool:
    """Whether there are elements enough to tell how often each of ``rows`` (N, D) is in a sum, or ``used`` of them."""
    telling = int(rows.any(dim=0).sum())
    return conclusive(telling, used=len(rows) if used is None else used, atoms=len(rows), limit=limit)


def counted(seen: Tensor, parts: Parts) -> Counts | None:
    """How often each microbatch is in ``seen``; None where that is not decided, or not all there is to it."""
    every = {**parts.terms, **parts.lacking}
    terms = {term: gradient.flatten() for term, gradient in every.items() if gradient.any()}
    if not terms:
        return None
    target, rows = seen.flatten(), torch.stack(list(terms.values()))
    if not _enough(rows, parts.limit):
        return None if parts.lacking else _one_otherwise(target, rows, list(terms), parts.limit)
    made = fit(target, rows, parts.limit)
    if made.residual > parts.limit or max(made.uncertain) > decided(parts.limit):
        return None
    known = zip(made.coefficients, made.uncertain, strict=True)
    found = level([simple(c, bound, parts.limit) for c, bound in known], made.uncertain)
    if set(found) == {1.0}:
        return None  # it is not right, and rounding hides what else it is
    if residual_of(target, rows, found) > parts.limit:
        found = list(made.coefficients)
    by_term = dict(zip(terms, found, strict=True))
    own = {term.activation: c for term, c in by_term.items() if term.what == "pair" and term.nominal}
    others = [c for term, c in by_term.items() if term.what != "pair" or not term.nominal]
    return None if any(c != 1.0 for c in others) else tuple(sorted(own.items()))


def _one_otherwise(seen: Tensor, rows: Tensor, terms: Sequence[Term], limit: float) -> Counts | None:
    """``seen`` as the sum of ``rows`` (N, D) but for how often one of them is in it, or as some times that one alone.

    Where elements are too few for every row to have a coefficient of its own. None unless that is one row only.
    """
    if not _enough(rows, limit, 1) or any(not term.nominal or term.what != "pair" for term in terms):
        return None
    found: list[Counts] = []
    for base in (1.0, 0.0):
        for k, row in enumerate(rows):
            made = fit(seen - base * rows.sum(dim=0), row[None], limit, size=seen.norm().item())
            if made.residual <= limit and max(made.uncertain) <= decided(limit):
                c = simple(base + made.coefficients[0], made.uncertain[0], limit)
                found.append(tuple(sorted((t.activation, c if j == k else base) for j, t in enumerate(terms))))
    return found[0] if len(found) == 1 else None


def _partly(name: str, seen: Tensor, parts: Parts) -> Oddity | None:
    """What is wrong with the elements that are, where enough others are right."""
    whole = parts.whole
    allowed = parts.limit * whole.abs().max()
    wrong, telling = (seen - whole).abs() > allowed, whole.abs() > TELLING * allowed
    if not wrong.any():
        return None
    right, chance = int((telling & ~wrong).sum()), by_chance(seen - whole, wrong, whole, parts.limit)
    if not conclusive(right, used=0, atoms=1, limit=chance, ways=choices(right, of=int(telling.sum()))):
        return None
    part, inside = _place(wrong, telling), parts.at(wrong)
    if not seen[wrong].any():
        return Oddity(name, "zero", part=part)
    if conclusive(int(wrong.sum()), used=1, atoms=1, limit=inside.limit):
        factor = _factor(seen[wrong], inside.whole, inside.limit)
        if factor is not None:
            return Oddity(name, "factor", factor, part=part)
    counts = counted(seen[wrong], inside)
    if counts is not None:
        return Oddity(name, "counted", counts=counts, part=part)
    rows = _rows_of(seen, whole, wrong, allowed.item())
    if rows:
        return Oddity(name, "misplaced", part=part, note=f"what is there belongs in {rows}")
    return Oddity(name, "unknown", part=part) if 2 * int(wrong.sum()) <= wrong.numel() else None


def _rows_of(seen: Tensor, whole: Tensor, wrong: Tensor, allowed: float) -> str:
    """Which rows of ``whole`` the wrong rows of ``seen`` are; empty if they are not all of them one."""
    if whole.dim() < 2 or whole[0].numel() < _SEVERAL:
        return ""
    at = wrong.flatten(1).any(dim=1).nonzero().flatten()
    near = [(whole - seen[k]).abs().flatten(1).amax(dim=1).min(dim=0) for k in at.tolist()]
    found = [int(one.indices) for one in near if one.values.item() <= allowed and bool(whole[one.indices].any())]
    return _numbered("row", found, len(whole)) if len(found) == len(at) else ""


def _place(wrong: Tensor, telling: Tensor) -> str:
    """The wrong elements in words: rows or columns where all that tells in them is wrong."""
    right = telling & ~wrong
    if wrong.dim() == 1:
        return _numbered("element", wrong.nonzero().flatten().tolist(), len(wrong))
    by_row, by_column = (wrong.flatten(1), right.flatten(1)), (wrong.flatten(0, -2).T, right.flatten(0, -2).T)
    for word, (bad, good) in (("row", by_row), ("column", by_column)):
        lines = bad.any(dim=1)
        if not good[lines].any() and not bool(lines.all()):
            return _numbered(word, lines.nonzero().flatten().tolist(), len(lines))
    return f"{int(wrong.sum())} of {wrong.numel()} elements"


def _numbered(word: str, numbers: Sequence[int], count: int) -> str:
    """``row 3``, ``rows 2 to 5``, ``rows 1, 4``, or how many."""
    if len(numbers) == 1:
        return f"{word} {numbers[0]}"
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{word}s {numbers[0]} to {numbers[-1]}"
    if len(numbers) <= _SEVERAL:
        return f"{word}s {', '.join(map(str, numbers))}"
    return f"{len(numbers)} of {count} {word}s"


def _narrow(gradient: Gradient) -> bool:
    """Whether every element is a number of a narrow type, as in a tensor of that type."""
    if gradient is None:
        return False
    return any(torch.equal(gradient.to(kind).to(gradient.dtype), gradient) for kind in (torch.bfloat16, torch.float16))

"""A tensor as a combination of others: which coefficients explain it down to rounding, and which stay undecided.

Legend: D elements, N atoms. Everything in fp64. Orthogonal least squares is Chen, Billings and Luo's forward selection
(International Journal of Control 50, 1989): of all atoms, the next is the one that leaves the smallest residual.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from pipeproof.core.limits import APART, FP32, coarsest, precision_of
from pipeproof.core.tolerance import Floor, rounding_of, stands_for_none
from pipeproof.explain.atoms import Atom, Term
from pipeproof.explain.limits import ALIKE, CHANCE, CLOSE, DECIDED, FEW, TELLING
from pipeproof.reference.step import Gradient

_SKETCH = 2048


@dataclass(frozen=True)
class Fit:
    """``coefficients`` of the atoms, and what they leave: ``residual``, relative to the size of what was added.

    ``uncertain[k]`` bounds how far rounding may have moved coefficient k.
    """

    coefficients: tuple[float, ...]
    residual: float
    uncertain: tuple[float, ...]

    def hopeless(self, limit: float) -> bool:
        """Whether no coefficients at all leave as little as ``limit``.

        These leave the least, but for what an atom that is hardly new could still take away.
        """
        return self.residual > limit + APART * math.sqrt(len(self.coefficients))


def residual_of(observed: Tensor, atoms: Tensor, coefficients: Sequence[float]) -> float:
    """What coefficients (N) of atoms (N, D) leave of observed (D), relative to the size of what was added."""
    used = [k for k, c in enumerate(coefficients) if c]
    weights = torch.tensor([coefficients[k] for k in used], dtype=torch.float64)
    atoms = atoms[used]
    gap = (observed - weights @ atoms).norm().item()
    size = max(observed.norm().item(), (weights * atoms.norm(dim=1)).norm().item())
    return gap / size if size else 0.0


def fit(observed: Tensor, atoms: Tensor, limit: float, *, size: float = 0.0) -> Fit:
    """Least squares: observed (D) by atoms (N, D). ``limit``: the residual that is still rounding, relative to the size
    of what was added, which is at least ``size``."""
    count, length = atoms.shape
    if count == 0 or length == 0:
        whole = observed.norm().item()
        size = max(size, whole)
        return Fit((0.0,) * count, whole / size if size else 1.0, (float("inf"),) * count)
    norms = atoms.norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
    unit = atoms / norms[:, None]
    # The singular values of all atoms together say which of their combinations the observed tensor can tell apart. The
    # products of atoms have them squared, and are few: what that costs in digits, a second round gives back.
    squares, vectors = torch.linalg.eigh(unit @ unit.T)  # (N) (N, N)
    kept = squares > (APART**2) * squares[-1]
    inverse = torch.where(kept, 1 / squares.clamp_min(1e-300), 0.0)
    scaled = torch.zeros(count, dtype=torch.float64)
    for _ in range(2):
        scaled += vectors @ (inverse * (vectors.T @ (unit @ (observed - scaled @ unit))))
    weights = scaled / norms
    gap = (observed - scaled @ unit).norm().item()
    size = max(size, observed.norm().item(), (weights * norms).norm().item())
    residual, noise = (gap / size if size else 0.0), limit * size
    bounds = noise * (vectors * inverse.sqrt()).norm(dim=1) / norms
    bounds = torch.where((vectors[:, ~kept] ** 2).sum(dim=1) > 1e-9, torch.inf, bounds)
    return Fit(tuple(weights.tolist()), residual, tuple(bounds.tolist()))


def counts_of(whole: Tensor, parts: Sequence[Tensor], limit: float) -> tuple[float, ...] | None:
    """How often each of ``parts`` is in ``whole``, if they explain it within ``limit``; all are taken as vectors.

    None where they do not, where another answer would do as well, or where elements are too few to tell.
    """
    target, atoms = (tensor.double().cpu() for tensor in (whole.flatten(), torch.stack([p.flatten() for p in parts])))
    if not bool(target.isfinite().all()) or not bool(atoms.isfinite().all()) or not target.any():
        return None
    telling = int(atoms.any(dim=0).sum())
    if not conclusive(telling, used=len(atoms), atoms=len(atoms), limit=limit):
        return None
    made = fit(target, atoms, limit)
    if max(made.uncertain) > decided(limit) or made.residual > limit:
        return None
    numbers = [simple(c, bound, limit) for c, bound in zip(made.coefficients, made.uncertain, strict=True)]
    plain = level(numbers, made.uncertain)
    return tuple(plain) if residual_of(target, atoms, plain) <= limit else made.coefficients


def told_within(dtype: torch.dtype) -> float:
    """The relative error within which a tensor of ``dtype`` is still said to be a combination of others."""
    precision = precision_of(dtype)
    return min(precision.most, max(FP32.most, precision.least))


def whole_within(dtype: torch.dtype) -> float:
    """How near to a whole number a coefficient of tensors of ``dtype`` must be to count as one."""
    return max(ALIKE, 4 * precision_of(dtype).unit)


def level(values: Sequence[float], bounds: Sequence[float]) -> list[float]:
    """Coefficients, with one number for those that rounding alone, within ``bounds``, may have put apart."""
    found = list(values)
    left = sorted((k for k, bound in enumerate(bounds) if bound), key=lambda k: values[k])
    while left:
        first = left[0]
        group = [k for k in left if values[k] - values[first] <= bounds[k] + bounds[first]]
        mean = sum(values[k] for k in group) / len(group)
        for k in group:
            found[k] = mean if len({values[k] for k in group}) > 1 else values[first]
        left = [k for k in left if k not in group]
    return found


def decided(limit: float) -> float:
    """How well a coefficient must be known, where rounding leaves ``limit``: coarse types decide whole numbers only."""
    return min(max(DECIDED, FEW * limit), TELLING)


def orders(count: int) -> float:
    """The logarithm of the number of orders that so many things have."""
    return math.lgamma(count + 1)


def choices(count: int, of: int) -> float:
    """The logarithm of the number of ways to choose so many ``of`` things."""
    return orders(of) - orders(count) - orders(of - count)


def simple(value: float, bound: float, limit: float) -> float:
    """The whole number, or one over one, that ``value`` may well be; or itself."""
    small = abs(value) <= max(bound, limit)
    near = 0.0 if small else float(round(value)) if abs(value) > 2 / 3 else 1 / round(1 / value)
    return near if abs(near - value) <= min(max(bound, CLOSE * abs(near)), decided(limit)) else value


def conclusive(size: int, *, used: int, atoms: int, limit: float, ways: float = 0.0) -> bool:
    """Whether ``used`` of ``atoms`` atoms that leave no more than ``limit`` of ``size`` elements do so for a reason.

    Each element beyond the coefficients would agree by chance once in 1 / limit times, and there were as many tries as
    there are choices of so many atoms, times what ``ways`` is the logarithm of.
    """
    return (size - used) * math.log(limit) + choices(used, of=atoms) + ways <= math.log(CHANCE)


def select(observed: Tensor, atoms: Tensor, *, goal: float, most: int) -> list[int]:
    """Atoms (N, D), one at a time, until they leave of observed (D) a norm of ``goal``, or there are ``most``.

    What each atom still has in common with the rest of ``observed``, and how much of it is new, is carried from step to
    step: each step then reads the atoms once, and writes none.
    """
    target, rows = _sketch(observed, atoms)
    norms = rows.norm(dim=1)
    rows = rows / norms.clamp_min(torch.finfo(torch.float64).tiny)[:, None]
    usable, common, new = norms > 0, rows @ target, torch.ones_like(norms)  # new: squares
    picked: list[int] = []
    basis = rows[:0]  # orthonormal
    while len(picked) < min(most, len(atoms)) and target.norm().item() > goal:
        usable &= new > APART**2
        if not usable.any():
            break
        best = int(torch.where(usable, common.abs() / new.clamp_min(1e-300).sqrt(), -1.0).argmax())
        direction = rows[best]
        for _ in range(2):  # once more for what rounding left of the basis
            direction = direction - (basis @ direction) @ basis
            direction = direction / direction.norm()
        along, step = rows @ direction, direction @ target
        target, common, new = target - step * direction, common - step * along, new - along.square()
        basis = torch.cat([basis, direction[None]])
        usable[best] = False
        picked.append(best)
    return picked


def alike(atoms: Tensor, picked: Sequence[int], limit: float) -> set[int]:
    """Those of the ``picked`` atoms (N, D) that another atom equals but for its size: nothing tells the two apart."""
    unit = atoms / atoms.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    close = (unit[list(picked)] @ unit.T).abs() >= 1 - max(limit**2 / 2, 1e-12)
    return {k for k, row in zip(picked, close, strict=True) if int(row.sum()) > 1}


def _sketch(observed: Tensor, atoms: Tensor) -> tuple[Tensor, Tensor]:
    """Both with fewer elements and almost the same inner products: signed sums of elements drawn at random."""
    size = len(observed)
    if size <= 2 * _SKETCH:
        return observed, atoms
    generator = torch.Generator().manual_seed(0)
    bucket = torch.randint(_SKETCH, (size,), generator=generator)
    sign = torch.randint(2, (size,), generator=generator).double() * 2 - 1
    short = [
        torch.zeros(len(rows), _SKETCH, dtype=torch.float64).index_add_(1, bucket, rows * sign)
        for rows in (observed[None], atoms)
    ]
    return short[0][0], short[1]


@dataclass(frozen=True)
class ParameterLayout:
    """Parameters laid end to end, each divided by the size of its expected gradient, so that all count alike."""

    names: tuple[str, ...]
    sizes: list[int]
    scale: Tensor

    @classmethod
    def of(cls, due: Mapping[str, Gradient]) -> Self:
        """That of all parameters of ``due``."""
        sizes = [0 if gradient is None else gradient.numel() for gradient in due.values()]
        scales = torch.tensor([size_of(gradient) for gradient in due.values()], dtype=torch.float64)
        return cls(tuple(due), sizes, scales.repeat_interleave(torch.tensor(sizes, dtype=torch.int64)))

    def rows(self, every: Sequence[Mapping[str, Gradient]]) -> Tensor:
        """Each of ``every`` (N) end to end in fp64 (N, D); None is zero."""
        made = torch.empty(len(every), len(self.scale), dtype=torch.float64)
        for row, gradients in zip(made, every, strict=True):
            found = zip(self.sizes, map(gradients.get, self.names), strict=True)
            flat = [torch.zeros(size) if one is None else one.detach().cpu().flatten() for size, one in found]
            torch.cat([torch.zeros(0), *flat], out=row)
        return made.div_(self.scale)

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """The part of each parameter in tensors (..., D)."""
        return dict(zip(self.names, torch.split(rows, self.sizes, dim=-1), strict=True))


@dataclass(frozen=True)
class System:
    """The gradients of some of a stage's parameters, and atoms beside them as rows."""

    layout: ParameterLayout
    atoms: Sequence[Atom]
    target: Tensor
    rows: Tensor

    @classmethod
    def of(cls, atoms: Sequence[Atom], layout: ParameterLayout, seen: Mapping[str, Gradient]) -> Self:
        """The system of the parameters of ``layout``, all of which have gradients."""
        return cls(layout, atoms, layout.rows([seen])[0], layout.rows([atom.gradients for atom in atoms]))

    @property
    def names(self) -> tuple[str, ...]:
        return self.layout.names

    @cached_property
    def size(self) -> int:
        """How many elements say something: those that are always 0 do not."""
        return int(((self.rows != 0).any(dim=0) | (self.target != 0)).sum())

    def only(self, names: Sequence[str]) -> Self:
        """The part of ``names``."""
        kept = [k for k, name in enumerate(self.names) if name in names]

        def part(rows: Tensor) -> Tensor:
            pieces = torch.split(rows, self.layout.sizes, dim=-1)
            return torch.cat([rows[..., :0], *(pieces[k] for k in kept)], dim=-1)

        sizes = [self.layout.sizes[k] for k in kept]
        layout = ParameterLayout(tuple(self.names[k] for k in kept), sizes, part(self.layout.scale))
        return type(self)(layout, self.atoms, part(self.target), part(self.rows))

    def conclusive(self, used: int, limit: float) -> bool:
        """Whether an explanation by ``used`` of the atoms cannot be chance."""
        return conclusive(self.size, used=used, atoms=len(self.atoms), limit=limit)

    def residual(self, weights: Sequence[float]) -> float:
        """What ``weights`` of the atoms leave of all parameters together, relative to the size of what they add."""
        return residual_of(self.target, self.rows, weights)

    def residuals(self, weights: Sequence[float]) -> dict[str, float]:
        """The same for each parameter."""
        targets, rows = self.layout.split(self.target), self.layout.split(self.rows)
        return {name: residual_of(targets[name], rows[name], weights) for name in self.names}


def weights(terms: Mapping[Term, float], atoms: Sequence[Atom]) -> list[float]:
    """The coefficients of ``atoms``, 0 for those that have none."""
    return [terms.get(atom.term, 0.0) for atom in atoms]


def kept_of(terms: Mapping[Term, float]) -> dict[Term, float]:
    """``terms`` without those that should not be there and hardly are."""
    return {term: c for term, c in terms.items() if term.nominal or abs(c) > ALIKE}


def of_noise(terms: Mapping[Term, float], bounds: Mapping[Term, float]) -> bool:
    """Whether rounding, within ``bounds``, may have put there what should not be, or made all more or less than due."""
    off = {term: abs(c - term.nominal) for term, c in terms.items() if c != term.nominal}
    within = {term: gap <= bounds.get(term, 0.0) < float("inf") for term, gap in off.items()}
    return bool(within) and (all(within.values()) or any(one for term, one in within.items() if not term.nominal))


def of_rounding(seen: Gradient, due: Gradient, wide: Gradient, largest: float) -> bool:
    """Whether a gradient is nothing, as is due, or rounding alone, as where a softmax takes no notice of a bias.

    It tells nothing. ``wide``: what it is in fp64. ``largest`` is the largest element of all gradients that are due.
    """
    if stands_for_none(seen) and stands_for_none(due):
        return True
    if seen is None or due is None or wide is None or not due.numel():
        return False
    floor = rounding_of(due.cpu(), wide)
    small = due.abs().max().item() <= floor.precision.most * largest
    return small and floor.noise and floor.compared(seen.cpu(), due.cpu())[1] == "pass"


def size_of(gradient: Gradient) -> float:
    """The norm of a gradient; 1 where it is zero or None."""
    return (0.0 if gradient is None else gradient.double().norm().item()) or 1.0


def limit_of(due: Gradient, wide: Gradient, *, coarse: torch.dtype | None = None) -> float:
    """What rounding may leave of one parameter: from what it left of the expected gradient on this very run.

    In the precision of the expected gradient, which is that of what made it, whatever type the step adds up in. Or in
    that of ``coarse``, if that is narrower.
    """
    if due is None or wide is None:
        return Floor(0.0, 0.0, 0.0).limit
    precision = coarsest([precision_of(one) for one in (due.dtype, coarse) if one is not None])
    return replace(rounding_of(due.cpu(), wide, precision=precision), size=0.0).limit

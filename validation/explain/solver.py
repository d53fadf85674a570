"""Linear combinations: coefficients that explain a tensor up to rounding, and undecided coefficients.

Legend: D elements, N atoms. Everything in fp64. Orthogonal least squares is Chen, Billings and Luo's forward selection
(International Journal of Control 50, 1989): of all atoms, the next is the one that leaves the smallest residual.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeproof.core.limits import APART, FP32, coarsest, precision_of
from pipeproof.core.tolerance import Floor, rounding_of, stands_for_none
from pipeproof.explain.atoms import Term
from pipeproof.explain.limits import ALIKE, CHANCE, CLOSE, DECIDED, FEW, TELLING
from pipeproof.reference.step import Gradient

_SKETCH = 2048


@dataclass(frozen=True)
class Fit:
    """``coefficients`` for the atoms, and the ``residual``, relative to the addends' size.

    ``uncertain[k]`` bounds how far rounding may have moved coefficient k.
    """

    coefficients: tuple[float, ...]
    residual: float
    uncertain: tuple[float, ...]

    def hopeless(self, limit: float) -> bool:
        """True if every fit leaves more than ``limit``.

        These leave the least, up to the part that a nearly dependent atom could still take away.
        """
        return self.residual > limit + APART * math.sqrt(len(self.coefficients))


def residual_of(observed: Tensor, atoms: Tensor, coefficients: Sequence[float]) -> float:
    """Residual in observed (D) after coefficients (N) on atoms (N, D), relative to the addends' size."""
    used = [k for k, c in enumerate(coefficients) if c]
    weights = torch.tensor([coefficients[k] for k in used], dtype=torch.float64)
    atoms = atoms[used]
    gap = (observed - weights @ atoms).norm().item()
    size = max(observed.norm().item(), (weights * atoms.norm(dim=1)).norm().item())
    return gap / size if size else 0.0


def fit(observed: Tensor, atoms: Tensor, limit: float, *, size: float = 0.0) -> Fit:
    """Least squares: observed (D) by atoms (N, D).

    ``limit``: the residual of rounding, relative to the size of the addends, at least ``size``.
    """
    count, length = atoms.shape
    if count == 0 or length == 0:
        whole = observed.norm().item()
        size = max(size, whole)
        return Fit((0.0,) * count, whole / size if size else 1.0, (float("inf"),) * count)
    norms = atoms.norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
    unit = atoms / norms[:, None]
    # The singular values of all atoms together say which of their combinations the observed tensor can tell apart. The
    # products of atoms have them squared, and are few: a second round recovers the lost digits.
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
    """Count each part in ``whole``, if they explain it within ``limit``; all as vectors.

    None if they do not, if another answer fits as well, or with too few elements.
    """
    target, atoms = (tensor.double().cpu() for tensor in (whole.flatten(), torch.stack([p.flatten() for p in parts])))
    if not bool(target.isfinite().all()) or not bool(atoms.isfinite().all()) or not target.any():
        return None
    telling = int(atoms.any(dim=0).sum())
    if not conclusive(telling, used=len(atoms), atoms=len(atoms), limit=limit):
        return None
    made = fit(target, atoms, limit)
    if max(made.uncertain) > decide_within(limit) or made.residual > limit:
        return None
    numbers = [simple(c, bound, limit) for c, bound in zip(made.coefficients, made.uncertain, strict=True)]
    plain = level(numbers, made.uncertain)
    return tuple(plain) if residual_of(target, atoms, plain) <= limit else made.coefficients


def tell_within(dtype: torch.dtype) -> float:
    """The relative error within which ``dtype`` tensors may count as combinations."""
    precision = precision_of(dtype)
    return min(precision.most, max(FP32.most, precision.least))


def whole_within(dtype: torch.dtype) -> float:
    """The distance to a whole number within which coefficients in ``dtype`` count as whole."""
    return max(ALIKE, 4 * precision_of(dtype).unit)


def level(values: Sequence[float], bounds: Sequence[float]) -> list[float]:
    """Replace coefficients that differ only by rounding, within ``bounds``, by their mean."""
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


def decide_within(limit: float) -> float:
    """The precision needed of a coefficient, if rounding leaves ``limit``: coarse types decide whole numbers only."""
    return min(max(DECIDED, FEW * limit), TELLING)


def orders(count: int) -> float:
    """The logarithm of the number of orders for ``count`` things."""
    return math.lgamma(count + 1)


def choices(count: int, of: int) -> float:
    """The logarithm of the number of ways to choose ``count`` things from ``of``."""
    return orders(of) - orders(count) - orders(of - count)


def simple(value: float, bound: float, limit: float) -> float:
    """The whole number or reciprocal close to ``value``, or ``value`` itself."""
    small = abs(value) <= max(bound, limit)
    near = 0.0 if small else float(round(value)) if abs(value) > 2 / 3 else 1 / round(1 / value)
    return near if abs(near - value) <= min(max(bound, CLOSE * abs(near)), decide_within(limit)) else value


def conclusive(size: int, *, used: int, atoms: int, limit: float, ways: float = 0.0) -> bool:
    """True if fitting ``used`` from ``atoms`` atoms, leaving ``limit`` in ``size`` elements, cannot be chance.

    Each element beyond the coefficients would agree by chance once in 1 / limit times, and there were as many tries as
    there are choices of so many atoms, times exp(``ways``).
    """
    return (size - used) * math.log(limit) + choices(used, of=atoms) + ways <= math.log(CHANCE)


def select(observed: Tensor, atoms: Tensor, *, goal: float, most: int) -> list[int]:
    """Select atoms (N, D) one at a time, until observed (D) leaves the norm ``goal``, or at ``most`` atoms.

    The common part of each atom with the rest of ``observed``, and the size of its new part, carry over from step to
    step: each step then reads the atoms once, and writes none. Long ones become shorter with almost the same inner
    products, as signed sums of random elements.
    """
    target, rows, size = observed, atoms, len(observed)
    if size > 2 * _SKETCH:
        generator = torch.Generator().manual_seed(0)
        bucket = torch.randint(_SKETCH, (size,), generator=generator)
        sign = torch.randint(2, (size,), generator=generator).double() * 2 - 1
        short = [torch.zeros(len(each), _SKETCH, dtype=torch.float64) for each in (observed[None], atoms)]
        target, rows = (
            made.index_add_(1, bucket, each * sign) for made, each in zip(short, (observed[None], atoms), strict=True)
        )
        target = target[0]
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
        for _ in range(2):  # once more against rounding in the basis
            direction = direction - (basis @ direction) @ basis
            direction = direction / direction.norm()
        along, step = rows @ direction, direction @ target
        target, common, new = target - step * direction, common - step * along, new - along.square()
        basis = torch.cat([basis, direction[None]])
        usable[best] = False
        picked.append(best)
    return picked


def find_alike(atoms: Tensor, picked: Sequence[int], limit: float) -> set[int]:
    """The ``picked`` atoms (N, D) proportional to another atom: indistinguishable."""
    unit = atoms / atoms.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    close = (unit[list(picked)] @ unit.T).abs() >= 1 - max(limit**2 / 2, 1e-12)
    return {k for k, row in zip(picked, close, strict=True) if int(row.sum()) > 1}


def of_noise(terms: Mapping[Term, float], bounds: Mapping[Term, float]) -> bool:
    """True if rounding, within ``bounds``, may explain wrong terms or wrong sizes."""
    off = {term: abs(c - term.nominal) for term, c in terms.items() if c != term.nominal}
    within = {term: gap <= bounds.get(term, 0.0) < float("inf") for term, gap in off.items()}
    return bool(within) and (all(within.values()) or any(one for term, one in within.items() if not term.nominal))


def of_rounding(observed: Gradient, expected: Gradient, wide: Gradient, largest: float) -> bool:
    """True for an expected zero gradient, or pure rounding, such as a bias before a softmax.

    It carries no information. ``wide``: the gradient in fp64. ``largest``: the largest element of all expected
    gradients.
    """
    if stands_for_none(observed) and stands_for_none(expected):
        return True
    if observed is None or expected is None or wide is None or not expected.numel():
        return False
    floor = rounding_of(expected.cpu(), wide)
    small = expected.abs().max().item() <= floor.precision.most * largest
    return small and floor.noise and floor.compare(observed.cpu(), expected.cpu())[1] == "pass"


def limit_of(expected: Gradient, wide: Gradient, *, coarse: torch.dtype | None = None) -> float:
    """The rounding limit for a parameter, from the rounding of the expected gradient on this very run.

    In the precision of the expected gradient, from the type that computed it, whatever type the step adds up in; or in
    that of ``coarse``, if narrower.
    """
    if expected is None or wide is None:
        return Floor(0.0, 0.0, 0.0).limit
    precision = coarsest([precision_of(one) for one in (expected.dtype, coarse) if one is not None])
    return replace(rounding_of(expected.cpu(), wide, precision=precision), size=0.0).limit

"""What a stage's gradients are made of: the simplest combination of atoms that leaves nothing but rounding."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from reference.step import Gradient, Stage
from validation.atoms import Atom, Atoms, Evidence, Space, Term, Wrong
from validation.combination import DECIDED, EVIDENCE, alike, fit, residual_of, select
from validation.tolerance import Floor, error

_ZERO = 1e-3  # a coefficient this small may be none at all: it is left out if nothing but rounding remains without it
_NARROW = 2.0**-7  # more than rounding to bfloat16 changes
_HALF = 0.5  # an explanation holds for a stage if it holds for at least this share of its parameters


@dataclass(frozen=True)
class Oddity:
    """A parameter whose gradient is not what the rest of its stage says.

    what: "missing", "unexpected", "zero", "not-finite", "shape", "factor" (times ``factor``), "rounded" or "unknown".
    """

    parameter: str
    what: str
    factor: float | None = None


@dataclass(frozen=True)
class Explanation:
    """One stage's gradients as coefficients of terms; nominal terms are listed even where they are 0.

    ``residual`` is relative, ``limit`` what rounding may leave. ``explained``: it is rounding. ``undecided`` are terms
    whose coefficients could be others as well. ``wrong`` are the atoms that "flow" terms are numbered by, and
    ``odd`` the parameters that the coefficients do not hold for.
    """

    stage: Stage
    coefficients: Mapping[Term, float]
    residual: float
    limit: float
    explained: bool
    undecided: tuple[Term, ...] = ()
    odd: tuple[Oddity, ...] = ()
    compared: int = 0
    wrong: tuple[Wrong, ...] = field(default=(), repr=False)
    atoms: tuple[Atom, ...] = field(default=(), repr=False)

    def predicted(self, name: str) -> Gradient:
        """What the coefficients make of parameter ``name``; None where no atom says anything."""
        terms = [(self.coefficients[atom.term], atom.gradients.get(name)) for atom in self.atoms]
        parts = [c * gradient for c, gradient in terms if gradient is not None and c]
        return torch.stack(parts).sum(dim=0) if parts else None


class Explainer:
    """Explains one stage, given what errors in the next one handed on."""

    def __init__(self, evidence: Evidence, stage: Stage, wrong: Sequence[Wrong]) -> None:
        self._evidence, self._stage, self._wrong = evidence, stage, tuple(wrong)
        self._atoms = Atoms(evidence, stage, wrong)
        self._parameters = evidence.now.parameters(stage)
        own = [name for name in self._parameters if (stage, name) not in evidence.shared]
        self._seen = {name: evidence.observed.get((stage, name)) for name in own}
        self._due = {name: evidence.expected.get((stage, name)) for name in own}
        self._absent = tuple(filter(None, map(self._absence, own)))
        absent = {oddity.parameter for oddity in self._absent}
        self._names = [name for name in own if name not in absent and self._due[name] is not None]
        self._limits = {name: limit_of(self._due[name], self._nominal_sum(name)) for name in self._names}

    def explain(self) -> Explanation:
        """The simplest explanation, or the unexplained rest."""
        if not self._names:
            zero = any(oddity.what == "zero" for oddity in self._absent)
            terms = {atom.term: float(not zero) for atom in self._atoms.nominal}
            found = self._simple(terms, self._atoms.nominal, [])
            return replace(found, odd=self._absences(found))
        best: Explanation | None = None
        for atoms, sparse in self._attempts():
            found = self._attempt(atoms, self._names, sparse=sparse)
            if found is not None and found.explained:
                return found
            if best is None and found is not None:
                best = found
        assert best is not None, "the first attempt always gives something"
        return best

    def _attempts(self) -> Iterator[tuple[list[Atom], bool]]:
        """From simple to complicated: the atoms of each attempt, and whether only few of them may be used."""
        atoms = self._atoms
        yield atoms.nominal, False
        if self._wrong:
            yield [*atoms.nominal, *atoms.consequences], False
        yield [*atoms.nominal, *atoms.extras], False
        if atoms.contributions:
            yield [*atoms.nominal, *atoms.contributions], False
        some = [*atoms.nominal, *atoms.consequences, *atoms.extras, *atoms.pairs]
        yield some, True
        if atoms.stale:
            yield [*some, *atoms.stale], True

    def _attempt(self, atoms: list[Atom], names: list[str], *, sparse: bool) -> Explanation | None:
        """An explanation by ``atoms``, of all parameters or of most."""
        whole = self._solve(atoms, names, sparse=sparse)
        if whole.explained:
            return self._but_for(whole, atoms)
        if sparse:
            return whole
        nominal = self._simple({atom.term: 1.0 for atom in self._atoms.nominal}, atoms, names)
        for candidate in (nominal, *(self._solve(atoms, [name], sparse=False) for name in names)):
            holds = [name for name in names if self._holds(candidate, name)]
            if len(holds) >= _HALF * len(names) and self._enough(candidate, holds):
                return self._but_for(self._simple(candidate.coefficients, atoms, holds), atoms)
        return whole

    def _enough(self, candidate: Explanation, names: list[str]) -> bool:
        return bool(names) and not candidate.undecided

    def _but_for(self, found: Explanation, atoms: list[Atom]) -> Explanation:
        """``found`` with the parameters that it does not hold for named."""
        odd = [name for name in self._names if not self._holds(found, name)]
        if odd and len(odd) < len(self._names):
            rest = [name for name in self._names if name not in odd]
            better = self._solve([a for a in atoms if found.coefficients.get(a.term)], rest, sparse=False)
            if better.explained:
                terms = {**dict.fromkeys(found.coefficients, 0.0), **better.coefficients}
                found = self._simple(terms, atoms, rest)
                odd = [name for name in self._names if not self._holds(found, name)]
        if len(odd) > (1 - _HALF) * len(self._names):
            return replace(found, explained=False)
        oddities = tuple(self._oddity(found, name) for name in odd)
        return replace(found, odd=(*self._absences(found), *oddities))

    def _solve(self, atoms: list[Atom], names: list[str], *, sparse: bool) -> Explanation:
        """Least squares with all ``atoms``; with a few where ``sparse``, or where there are too few equations for all.

        In the latter case a correct gradient is changed by a few atoms.
        """
        space = self._space(names)
        target, rows = space.vector(self._seen), space.matrix(atoms)
        limit = max((self._limits[name] for name in names), default=0.0)
        few = len(target) < len(atoms) + EVIDENCE and not sparse
        base = rows[: len(self._atoms.nominal)].sum(dim=0) if few else torch.zeros_like(target)
        terms = dict.fromkeys((atom.term for atom in self._atoms.nominal), float(few))
        chosen = list(range(len(atoms)))
        if few or sparse:
            most = min(2 * len(terms) + EVIDENCE, len(target) // 4)
            chosen = select(target - base, rows, goal=limit / 2 * target.norm().item(), most=most)
        found = fit(target - base, rows[chosen], limit, size=target.norm().item())
        bounds: dict[Term, float] = {}
        unclear = alike(rows, chosen, limit)
        for k, coefficient, bound in zip(chosen, found.coefficients, found.uncertain, strict=True):
            term = atoms[k].term
            terms[term] = terms.get(term, 0.0) + coefficient
            bounds[term] = float("inf") if k in unclear else bound
        enough = len(target) >= len(chosen) + EVIDENCE
        return self._tidy(atoms, names, terms, bounds, enough=enough)

    def _tidy(
        self,
        atoms: list[Atom],
        names: list[str],
        terms: Mapping[Term, float],
        bounds: Mapping[Term, float],
        *,
        enough: bool,
    ) -> Explanation:
        """``terms`` without what rounding put there, each coefficient simple where that leaves no more than before."""
        kept = {term: c for term, c in terms.items() if term.nominal or abs(c) > _ZERO}
        simple = {term: self._round(c, bounds.get(term, 0.0)) for term, c in kept.items()}
        attempts = (self._simple(each, atoms, names) for each in (simple, kept, terms))
        tidy = next((each for each in attempts if each.explained), self._simple(kept, atoms, names))
        undecided = tuple(term for term in tidy.coefficients if bounds.get(term, 0.0) > DECIDED)
        return replace(tidy, explained=enough and tidy.explained, undecided=undecided)

    def _simple(self, terms: Mapping[Term, float], atoms: list[Atom], names: list[str]) -> Explanation:
        """``terms`` as an explanation of ``names``."""
        used = tuple(atom for atom in atoms if atom.term in terms)
        space = self._space(names)
        gap = residual_of(space.vector(self._seen), space.matrix(used), [terms[atom.term] for atom in used])
        limit = max((self._limits[name] for name in names), default=0.0)
        coefficients = {atom.term: terms[atom.term] for atom in used}
        return Explanation(
            self._stage,
            coefficients,
            gap,
            limit,
            gap <= limit,
            compared=len(names),
            odd=self._absent,
            wrong=self._wrong,
            atoms=used,
        )

    def _round(self, value: float, bound: float) -> float:
        """The simple number that ``value`` may well be, or itself."""
        near = min(self._numbers(), key=lambda number: abs(number - value))
        return near if abs(near - value) <= min(max(bound, 1e-5 * abs(near)), DECIDED) else value

    def _numbers(self) -> list[float]:
        count = self._evidence.now.microbatches
        return [0.0, *(sign * n for sign in (1, -1) for n in (1.0, 2.0, 3.0, 4.0, 0.5, count, 1 / count))]

    def _holds(self, found: Explanation, name: str) -> bool:
        """Whether ``found`` leaves only rounding of parameter ``name``."""
        space = self._space([name])
        rows = space.matrix(found.atoms)
        weights = [found.coefficients[atom.term] for atom in found.atoms]
        return residual_of(space.vector(self._seen), rows, weights) <= self._limits[name]

    def _space(self, names: Sequence[str]) -> Space:
        scales = {name: size_of(self._due[name]) for name in names}
        return Space(scales, self._parameters)

    def _nominal_sum(self, name: str) -> Gradient:
        parts = [g for atom in self._atoms.nominal if (g := atom.gradients.get(name)) is not None]
        return torch.stack(parts).sum(dim=0) if parts else None

    def _absence(self, name: str) -> Oddity | None:
        """What is plainly wrong with a gradient whatever the numbers are."""
        seen, due = self._seen[name], self._due[name]
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

    def _absences(self, found: Explanation) -> tuple[Oddity, ...]:
        """What is plainly wrong, but for zeros that ``found`` explains."""
        return tuple(odd for odd in self._absent if odd.what != "zero" or self._nonzero(found.predicted(odd.parameter)))

    def _nonzero(self, gradient: Gradient) -> bool:
        return gradient is not None and bool(gradient.any())

    def _oddity(self, found: Explanation, name: str) -> Oddity:
        """A parameter by itself: a multiple of what the rest says, rounded, or nothing known."""
        seen, says = self._seen[name], found.predicted(name)
        assert seen is not None, "only gradients that are there are compared"
        if says is None or says.numel() < 2:
            return Oddity(name, "unknown")
        one = fit(seen.double().flatten().cpu(), says.flatten()[None], self._limits[name])
        factor = self._round(one.coefficients[0], one.uncertain[0])
        return Oddity(name, "factor", factor) if one.residual <= self._limits[name] else Oddity(name, "unknown")


def limit_of(due: Gradient, wide: Gradient) -> float:
    """What rounding may leave of one parameter: from what it left of the expected gradient on this very run."""
    if due is None or wide is None:
        return Floor(0.0, 0.0, 0.0).limit
    return Floor(0.0, error(due.cpu(), wide), 0.0).limit


def size_of(gradient: Gradient) -> float:
    """The norm of a gradient; 1 where it is zero or None."""
    return (0.0 if gradient is None else gradient.double().norm().item()) or 1.0


def _narrow(gradient: Gradient) -> bool:
    """Whether every element is a number of a narrower type."""
    if gradient is None or gradient.dtype in (torch.bfloat16, torch.float16):
        return False
    return any(torch.equal(gradient.to(kind).to(gradient.dtype), gradient) for kind in (torch.bfloat16, torch.float16))

"""Find the simplest combination: atoms that explain a stage's gradients up to rounding."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from pipeproof.core.limits import LEAD, LED, precision_of
from pipeproof.core.observe.likeness import Label, Likeness
from pipeproof.core.tolerance import error, rounding_of, stands_for_none
from pipeproof.explain.atoms import Atom, Atoms, Explanation, Term, Update, Wrong, total
from pipeproof.explain.known import Known
from pipeproof.explain.likeness import in_place_of, plainly
from pipeproof.explain.limits import ALIKE, CLOSE, DECIDED, FEW, HALF, LITTLE
from pipeproof.explain.solver import (
    System,
    counts_of,
    decide_within,
    drop_small,
    find_alike,
    fit,
    level,
    limit_of,
    of_noise,
    of_rounding,
    select,
    simple,
)
from pipeproof.reference.step import Gradient, Stage

_WHOLE = {"missing", "unexpected", "rounded", "not-finite"}  # states that a whole stage can share


class GradientFit:
    """Explain a stage, given wrong gradients from the next; ``every`` has all expected gradients.

    ``thorough``: also try the many tensors of the step before; not worth it below an unexplained stage.
    """

    def __init__(
        self, update: Update, stage: Stage, wrong: Sequence[Wrong], every: Callable[[], Known], *, thorough: bool = True
    ) -> None:
        self._thorough = thorough
        self._update, self._stage, self._wrong = update, stage, tuple(wrong)
        self._atoms = Atoms(update, stage, wrong)
        own = [name for name in update.now.parameters(stage) if (stage, name) not in update.shared]
        self._observed = {name: update.observed.get((stage, name)) for name in own}
        self._expected = {name: update.expected.get((stage, name)) for name in own}
        pairs = ((self._observed[name], self._expected[name], Label.of_gradient((stage, name))) for name in own)
        self._absent = tuple(one for pair in pairs if (one := plainly(*pair, every)) is not None)
        absent = {one.parameter for one in self._absent}
        there = {name: one for name, one in self._expected.items() if one is not None and name not in absent}
        largest = max(
            (g.abs().max().item() for g in self._expected.values() if g is not None and g.numel()), default=0.0
        )
        wide = {name: self._nominal_sum(name) for name in there}
        self._fitted = {
            name: one for name, one in there.items() if not of_rounding(self._observed[name], one, wide[name], largest)
        }
        self._limits = {name: limit_of(one, wide[name], coarse=update.coarse) for name, one in self._fitted.items()}

    def explain(self) -> Explanation:
        """Return the simplest explanation, or the unexplained rest."""
        found = self._explain()
        hidden = not found.explained and found.residual <= found.limit  # by rounding, which may have made it so
        found = (self._multiple(found) or found) if found.undecided or hidden else found
        kinds = {odd.kind for odd in found.odd}
        none = [name for name, one in self._observed.items() if one is None and stands_for_none(self._expected[name])]
        every = len(self._observed) - len(none)
        whole = kinds.pop() if kinds <= _WHOLE and len(kinds) == 1 and len(found.odd) == every else ""
        return replace(found, names=tuple(self._fitted), whole=whole)

    def _multiple(self, found: Explanation) -> Explanation | None:
        """Explain every parameter by a single factor, up to rounding.

        It shows even if rounding hides each microbatch's own coefficient, unless two microbatches resemble each other,
        or the ``found`` coefficients contradict such a factor.
        """
        system = self._system(self._atoms.nominal)
        pairs = [(self._observed[name].double().cpu(), one.double().cpu()) for name, one in self._fitted.items()]  # type: ignore[union-attr]
        if any(one.shape != expected.shape or not one.isfinite().all() for one, expected in pairs):
            return None
        squares = sum(expected.square().sum().item() for _, expected in pairs)
        factor = sum((one * expected).sum().item() for one, expected in pairs) / squares if squares else 0.0
        rows = torch.nn.functional.normalize(system.rows, dim=1)
        like = (rows @ rows.T).abs().triu(diagonal=1).max().item() > 1 - ALIKE
        if not factor or like:
            return None
        plain = simple(factor, self._unit * abs(factor), self._unit)
        made = self._simple({atom.term: plain for atom in system.atoms}, system)
        if not all(error(one, factor * expected) <= self._unit for one, expected in pairs):
            # It was multiplied before all was added up: then the coefficients come close to a factor other than 1.
            even = all(abs(c - factor * term.nominal) <= LITTLE * abs(factor) for term, c in found.coefficients.items())
            apart = abs(factor - 1.0) > min(LITTLE, max(ALIKE, LED * LEAD * self._unit))
            if not (even and apart and made.explained and len(self._holding(made, system)) == len(pairs)):
                return None
        return replace(made, explained=True, odd=self._absences(made))

    def _explain(self) -> Explanation:
        nominal = self._atoms.nominal
        system = self._system(nominal)
        if not self._fitted:
            kinds = {one.kind for one in self._absent}
            zero = "zero" in kinds and "other" not in kinds
            found = self._simple({atom.term: float(not zero) for atom in nominal}, system)
            return replace(found, odd=self._absences(found))
        right = {atom.term: 1.0 for atom in nominal}
        for name, expected in self._fitted.items():
            whole = self._nominal_sum(name)
            apart = whole is None or (
                error(expected.cpu(), whole) > HALF and not rounding_of(expected.cpu(), whole).noise
            )
            if apart and expected.any():  # the reference's microbatches do not add up to it, in any type
                return replace(self._simple(right, system), explained=False, unfounded=True)
        if self._atoms.left:  # on top of a correct gradient: if similar, no coefficients separate them
            more = self._system([*nominal, *self._atoms.left])
            left = self._simple(right | {atom.term: 1.0 for atom in self._atoms.left}, more)
            if left.explained and bool(more.rows[-1].any()):
                return self._but_for(left, more)
        tried: list[Explanation] = []
        for atoms, sparse in self._attempts():
            tried.append(self._attempt(self._system(atoms), sparse=sparse))
            if tried[-1].complete:
                return tried[-1]
        return next((one for one in tried if one.explained), tried[0])

    def _attempts(self) -> Iterator[tuple[list[Atom], bool]]:
        """From simple to complicated: each attempt's atoms, and whether to use only few of them."""
        atoms = self._atoms
        yield atoms.nominal, False
        if self._wrong:
            yield [*atoms.nominal, *atoms.consequences], False
        yield [*atoms.nominal, *atoms.extras], False
        some = [*atoms.nominal, *atoms.consequences, *atoms.extras, *atoms.pairs]
        yield some, True
        if self._thorough and atoms.stale:
            yield [*some, *atoms.stale], True

    def _system(self, atoms: Sequence[Atom]) -> System:
        return System.of(atoms, self._fitted, self._observed)

    def _attempt(self, system: System, *, sparse: bool) -> Explanation:
        """Explain all parameters, or most, by the system's atoms."""
        whole = self._solve(system, sparse=sparse)
        if whole.explained:
            return self._but_for(whole, system)
        for candidate in () if sparse else self._candidates(system):
            holds = self._holding(candidate, system)
            if len(holds) >= HALF * len(self._fitted):
                return self._but_for(self._simple(candidate.coefficients, system.only(holds)), system)
        return whole

    def _candidates(self, system: System) -> Iterator[Explanation]:
        """Candidates for most parameters: the right sum, and each parameter's own solution.

        A solution for so many is the solution of any parameter in a majority, so a part of them suffices.
        """
        yield self._simple({atom.term: 1.0 for atom in self._atoms.nominal}, system)
        in_vain = 0
        for name in sorted(system.sizes, key=lambda name: -system.sizes[name]):
            alone = self._solve(system.only([name]), sparse=False)
            if alone.explained and not alone.undecided:
                yield alone
            in_vain += not (alone.explained and alone.undecided)
            if in_vain > (1 - HALF) * len(self._fitted):
                return

    def _but_for(self, found: Explanation, system: System) -> Explanation:
        """Add the names that deviate to ``found``."""
        holds = self._holding(found, system)
        if len(holds) < HALF * len(self._fitted):
            return replace(found, explained=False)
        odd = [self._fit_alone(found, name) for name in self._fitted if name not in holds]
        return replace(found, odd=(*self._absences(found), *odd))

    def _solve(self, system: System, *, sparse: bool) -> Explanation:
        """Least squares with all atoms, unless only few may be used, or too few equations decide on all.

        Else with a few that are selected: for ``sparse`` alone, and otherwise as changes of a correct gradient.
        """
        limit, atoms = self._limit(system), system.atoms
        if not sparse and system.conclusive(len(atoms), limit):
            found = self._fit(system, [*range(len(atoms))], torch.zeros_like(system.target))
            if not found.undecided:
                return found
        base = system.rows[[k for k, atom in enumerate(atoms) if atom.term.nominal and not sparse]].sum(dim=0)
        most = min(2 * len(self._atoms.nominal) + FEW, len(atoms))
        while most and not system.conclusive(most, limit):
            most -= 1
        goal = limit / 2 * system.target.norm().item()
        return self._fit(system, select(system.target - base, system.rows, goal=goal, most=most), base)

    def _fit(self, system: System, chosen: list[int], base: Tensor) -> Explanation:
        """Least squares with the ``chosen`` atoms on top of ``base``: 0, or the sum of the nominal ones."""
        limit, names = self._limit(system), [system.atoms[k].term for k in chosen]
        found = fit(system.target - base, system.rows[chosen], limit, size=system.target.norm().item())
        terms = {atom.term: float(bool(base.any())) for atom in self._atoms.nominal}
        for term, coefficient in zip(names, found.coefficients, strict=True):
            terms[term] = terms.get(term, 0.0) + coefficient
        if found.hopeless(limit):
            return replace(self._simple(drop_small(terms), system), explained=False)
        unclear = find_alike(system.rows, chosen, limit)
        bounds = dict(zip(names, found.uncertain, strict=True))
        bounds |= {system.atoms[k].term: float("inf") for k in unclear}
        tidy = self._tidy(system, terms, bounds)
        undecided = tuple(term for term in tidy.coefficients if bounds.get(term, 0.0) > decide_within(limit))
        explained = tidy.explained and system.conclusive(len(chosen), limit) and not of_noise(tidy.coefficients, bounds)
        return replace(tidy, explained=explained, undecided=undecided)

    def _tidy(self, system: System, terms: Mapping[Term, float], bounds: Mapping[Term, float]) -> Explanation:
        """Simplify ``terms``: drop rounding, and use as few different numbers as leave only rounding."""
        kept = drop_small(terms)
        within = [bounds.get(term, 0.0) for term in kept]
        simple = {term: self._round(c, bound) for (term, c), bound in zip(kept.items(), within, strict=True)}
        even, as_found = (dict(zip(kept, level(list(some.values()), within), strict=True)) for some in (simple, kept))
        tried = [self._simple(each, system) for each in (simple, even, kept, terms)]
        explained = [each for each in tried if each.explained]
        found = min(explained, default=tried[2], key=lambda each: len(set(each.coefficients.values())))
        other = self._simple(as_found, system)
        return other if other.explained and found.is_by_chance(other, LEAD * self._unit) else found

    def _simple(self, terms: Mapping[Term, float], system: System) -> Explanation:
        """Turn ``terms`` into an explanation for the parameters in ``system``."""
        gap, limit = system.residual(terms), self._limit(system)
        used = tuple(atom for atom in system.atoms if atom.term in terms)
        found = {atom.term: terms[atom.term] for atom in used}
        return Explanation(
            self._stage, found, gap, limit, gap <= limit, odd=self._absent, wrong=self._wrong, atoms=used
        )

    def _holding(self, found: Explanation, system: System) -> list[str]:
        """Return the parameters that ``found`` explains up to rounding."""
        left = system.residuals(found.coefficients)
        return [name for name, gap in left.items() if gap <= self._limits[name]]

    def _limit(self, system: System) -> float:
        return max((self._limits[name] for name in system.sizes), default=0.0)

    def _round(self, value: float, bound: float) -> float:
        """The simple number close to ``value``, or ``value`` itself."""
        count = self._update.now.microbatches
        numbers = [0.0, *(sign * n for sign in (1, -1) for n in (1.0, 2.0, 3.0, 4.0, 0.5, count, 1 / count))]
        near = min(numbers, key=lambda number: abs(number - value))
        return near if abs(near - value) <= min(max(bound, CLOSE * abs(near)), DECIDED) else value

    @cached_property
    def _unit(self) -> float:
        """Unit roundoff in the coarsest gradient."""
        types = (self._update.coarse, *(one.dtype for one in self._expected.values() if one is not None))
        return max((precision_of(one).unit for one in types if one is not None), default=0.0)

    def _nominal_sum(self, name: str) -> Gradient:
        return total(atom.gradients.get(name) for atom in self._atoms.nominal)

    def _absences(self, found: Explanation) -> tuple[Likeness, ...]:
        """Plain faults, minus zeros that ``found`` explains."""
        expected = {odd: found.predict(odd.parameter) for odd in self._absent if odd.kind == "zero"}
        return tuple(
            odd for odd in self._absent if odd not in expected or ((g := expected[odd]) is not None and bool(g.any()))
        )

    def _fit_alone(self, found: Explanation, name: str) -> Likeness:
        """Compare a parameter with the prediction from the rest; else count each microbatch's own addend in it."""
        observed, at = self._observed[name], Label.of_gradient((self._stage, name))
        assert observed is not None, "only gradients that are there are compared"
        right = self._nominal_sum(name)
        passing = (self._stage, name) in self._update.passing  # more specific than the general rounding limit
        if right is not None and (passing or error(observed.double().cpu(), right) <= self._limits[name]):
            return Likeness("right", at)
        whole = found.predict(name)
        alone = Likeness("different", at) if whole is None else in_place_of(whole, observed, at, self._limits[name])
        if alone.is_known or self._update.earlier:
            return alone
        parts = ((atom.term.activation, atom.gradients.get(name)) for atom in self._atoms.nominal)
        own = {m: one for m, one in parts if one is not None}
        counts = counts_of(observed, [*own.values()], self._limits[name]) if len(own) > 1 else None
        return alone if counts is None else Likeness("counted", at, counts=tuple(zip(own, counts, strict=True)))

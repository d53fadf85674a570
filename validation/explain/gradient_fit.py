"""Find the simplest combination: atoms that explain a stage's gradients up to rounding."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from pipeproof.core.limits import LEAD, LED, precision_of
from pipeproof.core.observe.likeness import Label, Likeness
from pipeproof.core.tolerance import error, rounding_of, stands_for_none
from pipeproof.explain.atoms import Atom, Atoms, Term, Update, Wrong
from pipeproof.explain.explanation import Explanation
from pipeproof.explain.known import Known
from pipeproof.explain.likeness import in_place_of, plainly
from pipeproof.explain.limits import ALIKE, CLOSE, DECIDED, FEW, HALF, LITTLE
from pipeproof.explain.solver import (
    ParameterLayout,
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
    weights,
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
        self._parameters = update.now.parameters(stage)
        own = [name for name in self._parameters if (stage, name) not in update.shared]
        self._observed = {name: update.observed.get((stage, name)) for name in own}
        self._expected = {name: update.expected.get((stage, name)) for name in own}
        pairs = ((self._observed[name], self._expected[name], Label.of_gradient((stage, name))) for name in own)
        self._absent = tuple(one for pair in pairs if (one := plainly(*pair, every)) is not None)
        absent = {one.parameter for one in self._absent}
        there = [name for name in own if name not in absent and self._expected[name] is not None]
        sized = {name: (self._observed[name], self._expected[name], self._nominal_sum(name)) for name in there}
        self._names = [name for name, three in sized.items() if not of_rounding(*three, self._largest)]
        self._limits = {
            name: limit_of(self._expected[name], self._nominal_sum(name), coarse=update.coarse) for name in self._names
        }
        self._layout = ParameterLayout.of({name: self._expected[name] for name in self._names})

    def explain(self) -> Explanation:
        """Return the simplest explanation, or the unexplained rest."""
        found = self._explain()
        hidden = not found.explained and found.residual <= found.limit  # by rounding, which may have made it so
        found = (self._multiple(found) or found) if found.undecided or hidden else found
        return replace(found, names=tuple(self._names), whole=self._whole(found))

    def _whole(self, found: Explanation) -> str:
        """The common state of every parameter with an observed or expected gradient; empty if they differ."""
        kinds = {odd.kind for odd in found.odd}
        none = [
            name
            for name, observed in self._observed.items()
            if observed is None and stands_for_none(self._expected[name])
        ]
        every = len(self._observed) - len(none)
        return kinds.pop() if kinds <= _WHOLE and len(kinds) == 1 and len(found.odd) == every else ""

    def _multiple(self, found: Explanation) -> Explanation | None:
        """Explain every parameter by a single factor, up to rounding.

        It shows even if rounding hides each microbatch's own coefficient, unless two microbatches resemble each other,
        or the ``found`` coefficients contradict such a factor.
        """
        atoms = self._atoms.nominal
        system = self._system(atoms)
        observed = {name: self._observed[name] for name in self._names}
        pairs = [(one.double().cpu(), self._expected[name].double().cpu()) for name, one in observed.items()]  # type: ignore[union-attr]
        if any(one.shape != expected.shape or not one.isfinite().all() for one, expected in pairs):
            return None
        squares = sum(expected.square().sum().item() for _, expected in pairs)
        factor = sum((one * expected).sum().item() for one, expected in pairs) / squares if squares else 0.0
        rows = torch.nn.functional.normalize(system.rows, dim=1)
        like = (rows @ rows.T).abs().triu(diagonal=1).max().item() > 1 - ALIKE
        if not factor or like:
            return None
        plain = simple(factor, self._unit * abs(factor), self._unit)
        made = self._simple({atom.term: plain for atom in atoms}, system, atoms)
        late = all(
            error(one, factor * expected) <= self._unit for one, expected in pairs
        )  # multiplied once all was added up
        if not late and not self._agree(found, made, factor, system):
            return None
        return replace(made, explained=True, odd=self._absences(made), compared=len(self._names))

    def _agree(self, found: Explanation, made: Explanation, factor: float, system: System) -> bool:
        """True if ``made``, with a factor other than 1, leaves only rounding, and ``found`` comes close."""
        even = all(abs(c - factor * term.nominal) <= LITTLE * abs(factor) for term, c in found.coefficients.items())
        apart = abs(factor - 1.0) > min(LITTLE, max(ALIKE, LED * LEAD * self._unit))
        return even and apart and made.explained and len(self._holding(made, system)) == len(self._names)

    def _explain(self) -> Explanation:
        if not self._names:
            kinds = {one.kind for one in self._absent}
            zero = "zero" in kinds and "other" not in kinds
            terms = {atom.term: float(not zero) for atom in self._atoms.nominal}
            atoms = self._atoms.nominal
            found = self._simple(terms, self._system(atoms), atoms)
            return replace(found, odd=self._absences(found))
        if any(map(self._is_unfounded, self._names)):
            atoms = self._atoms.nominal
            right = self._simple({atom.term: 1.0 for atom in atoms}, self._system(atoms), atoms)
            return replace(right, explained=False, unfounded=True)
        tried: list[Explanation] = []
        if (left := self._fit_leftover()) is not None:
            return left
        for atoms, sparse in self._attempts():
            tried.append(self._attempt(atoms, sparse=sparse))
            if tried[-1].complete:
                return tried[-1]
        return next((one for one in tried if one.explained), tried[0])

    def _fit_leftover(self) -> Explanation | None:
        """A correct stage on top of the initial gradients: if similar, no coefficients separate them."""
        atoms = [*self._atoms.nominal, *self._atoms.left]
        system = self._system(atoms)
        made = self._simple({atom.term: 1.0 for atom in atoms}, system, atoms)
        there = len(atoms) > len(self._atoms.nominal) and bool(system.rows[-1].any())
        return self._but_for(made, system, atoms) if there and made.explained else None

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

    def _system(self, atoms: list[Atom]) -> System:
        return System.of(atoms, self._layout, self._observed)

    def _attempt(self, atoms: list[Atom], *, sparse: bool) -> Explanation:
        """Explain all parameters, or most, by ``atoms``."""
        system = self._system(atoms)
        whole = self._solve(system, atoms, sparse=sparse)
        if whole.explained:
            return self._but_for(whole, system, atoms)
        if not sparse:
            for candidate in self._candidates(system, atoms):
                holds = self._holding(candidate, system)
                if len(holds) >= HALF * len(self._names):
                    return self._but_for(self._simple(candidate.coefficients, system.only(holds), atoms), system, atoms)
        return whole

    def _candidates(self, system: System, atoms: list[Atom]) -> Iterator[Explanation]:
        """Candidates for most parameters: the right sum, and each parameter's own solution.

        A solution for so many is the solution of any parameter in a majority, so a part of them suffices.
        """
        yield self._simple({atom.term: 1.0 for atom in self._atoms.nominal}, system, atoms)
        in_vain = 0
        sizes = dict(zip(system.names, system.layout.sizes, strict=True))
        for name in sorted(self._names, key=lambda name: -sizes[name]):
            alone = self._solve(system.only([name]), atoms, sparse=False)
            if alone.explained and not alone.undecided:
                yield alone
            in_vain += not (alone.explained and alone.undecided)
            if in_vain > (1 - HALF) * len(self._names):
                return

    def _but_for(self, found: Explanation, system: System, atoms: list[Atom]) -> Explanation:
        """Add the names that deviate to ``found``."""
        holds = self._holding(found, system)
        if len(holds) < HALF * len(self._names):
            return replace(found, explained=False)
        odd = [self._fit_alone(found, name) for name in self._names if name not in holds]
        return replace(found, odd=(*self._absences(found), *odd), compared=len(self._names))

    def _solve(self, system: System, atoms: list[Atom], *, sparse: bool) -> Explanation:
        """Least squares with all ``atoms``, unless only few may be used, or too few equations decide on all."""
        if not sparse and system.conclusive(len(atoms), self._limit(system)):
            base = torch.zeros_like(system.target)
            found = self._fit(system, atoms, list(range(len(atoms))), base)
            if not found.undecided:
                return found
        return self._pick(system, atoms, from_nominal=not sparse)

    def _pick(self, system: System, atoms: list[Atom], *, from_nominal: bool) -> Explanation:
        """Select a few of ``atoms``, or a correct gradient with a few changes."""
        limit = self._limit(system)
        nominal = [k for k, atom in enumerate(atoms) if atom.term.nominal and from_nominal]
        base = system.rows[nominal].sum(dim=0)
        most = min(2 * len(self._atoms.nominal) + FEW, len(atoms))
        while most and not system.conclusive(most, limit):
            most -= 1
        goal = limit / 2 * system.target.norm().item()
        chosen = select(system.target - base, system.rows, goal=goal, most=most)
        return self._fit(system, atoms, chosen, base)

    def _fit(self, system: System, atoms: list[Atom], chosen: list[int], base: Tensor) -> Explanation:
        """Least squares with the ``chosen`` atoms on top of ``base``: 0, or the sum of the nominal ones."""
        limit = self._limit(system)
        found = fit(system.target - base, system.rows[chosen], limit, size=system.target.norm().item())
        terms = {atom.term: float(bool(base.any())) for atom in self._atoms.nominal}
        for k, coefficient in zip(chosen, found.coefficients, strict=True):
            terms[atoms[k].term] = terms.get(atoms[k].term, 0.0) + coefficient
        if found.hopeless(limit):
            return replace(self._simple(drop_small(terms), system, atoms), explained=False)
        unclear = find_alike(system.rows, chosen, limit)
        bounds = {
            atoms[k].term: float("inf") if k in unclear else bound
            for k, bound in zip(chosen, found.uncertain, strict=True)
        }
        tidy = self._tidy(system, atoms, terms, bounds)
        undecided = tuple(term for term in tidy.coefficients if bounds.get(term, 0.0) > decide_within(limit))
        explained = tidy.explained and system.conclusive(len(chosen), limit) and not of_noise(tidy.coefficients, bounds)
        return replace(tidy, explained=explained, undecided=undecided)

    def _tidy(
        self, system: System, atoms: list[Atom], terms: Mapping[Term, float], bounds: Mapping[Term, float]
    ) -> Explanation:
        """Simplify ``terms``: drop rounding, and use as few different numbers as leave only rounding."""
        kept = drop_small(terms)
        within = [bounds.get(term, 0.0) for term in kept]
        simple = {term: self._round(c, bound) for (term, c), bound in zip(kept.items(), within, strict=True)}
        even, as_found = (dict(zip(kept, level(list(some.values()), within), strict=True)) for some in (simple, kept))
        tried = [self._simple(each, system, atoms) for each in (simple, even, kept, terms)]
        explained = [each for each in tried if each.explained]
        found = min(explained, default=tried[2], key=lambda each: len(set(each.coefficients.values())))
        other = self._simple(as_found, system, atoms)
        return other if other.explained and found.is_by_chance(other, LEAD * self._unit) else found

    def _simple(self, terms: Mapping[Term, float], system: System, atoms: list[Atom]) -> Explanation:
        """Turn ``terms`` into an explanation for the parameters in ``system``."""
        gap, limit = system.residual(weights(terms, atoms)), self._limit(system)
        used = tuple(atom for atom in atoms if atom.term in terms)
        return Explanation(
            self._stage,
            {atom.term: terms[atom.term] for atom in used},
            gap,
            limit,
            gap <= limit,
            compared=len(system.names),
            odd=self._absent,
            wrong=self._wrong,
            atoms=used,
        )

    def _holding(self, found: Explanation, system: System) -> list[str]:
        """Return the parameters that ``found`` explains up to rounding."""
        left = system.residuals(weights(found.coefficients, system.atoms))
        return [name for name, gap in left.items() if gap <= self._limits[name]]

    def _limit(self, system: System) -> float:
        return max((self._limits[name] for name in system.names), default=0.0)

    def _round(self, value: float, bound: float) -> float:
        """The simple number close to ``value``, or ``value`` itself."""
        near = min(self._numbers(), key=lambda number: abs(number - value))
        return near if abs(near - value) <= min(max(bound, CLOSE * abs(near)), DECIDED) else value

    def _numbers(self) -> list[float]:
        count = self._update.now.microbatches
        return [0.0, *(sign * n for sign in (1, -1) for n in (1.0, 2.0, 3.0, 4.0, 0.5, count, 1 / count))]

    @cached_property
    def _unit(self) -> float:
        """Unit roundoff in the coarsest gradient."""
        types = [
            self._update.coarse,
            *(None if expected is None else expected.dtype for expected in self._expected.values()),
        ]
        return max((precision_of(one).unit for one in types if one is not None), default=0.0)

    @cached_property
    def _largest(self) -> float:
        """The largest element among expected gradients."""
        return max((g.abs().max().item() for g in self._expected.values() if g is not None and g.numel()), default=0.0)

    def _nominal_sum(self, name: str) -> Gradient:
        parts = [g for atom in self._atoms.nominal if (g := atom.gradients.get(name)) is not None]
        return torch.stack(parts).sum(dim=0) if parts else None

    def _is_unfounded(self, name: str) -> bool:
        """True if the reference's microbatches do not add up to its gradient, beyond rounding in any type."""
        expected, whole = self._expected[name], self._nominal_sum(name)
        if expected is None or not expected.any():
            return False
        return whole is None or (error(expected.cpu(), whole) > HALF and not rounding_of(expected.cpu(), whole).noise)

    def _absences(self, found: Explanation) -> tuple[Likeness, ...]:
        """Plain faults, minus zeros that ``found`` explains."""
        expected = {odd: found.predict(odd.parameter) for odd in self._absent if odd.kind == "zero"}
        return tuple(
            odd for odd in self._absent if odd not in expected or ((g := expected[odd]) is not None and bool(g.any()))
        )

    def _fit_alone(self, found: Explanation, name: str) -> Likeness:
        """Compare a parameter with the prediction from the rest."""
        observed, at = self._observed[name], Label.of_gradient((self._stage, name))
        assert observed is not None, "only gradients that are there are compared"
        right = self._nominal_sum(name)
        passing = (self._stage, name) in self._update.passing  # more specific than the general rounding limit
        if right is not None and (passing or error(observed.double().cpu(), right) <= self._limits[name]):
            return Likeness("right", at)
        whole = found.predict(name)
        alone = Likeness("different", at) if whole is None else in_place_of(whole, observed, at, self._limits[name])
        return alone if alone.is_known or self._update.earlier else self._fit_counts(alone, observed)

    def _fit_counts(self, odd: Likeness, observed: Tensor) -> Likeness:
        """Count each microbatch's own addend in a parameter; ``odd`` if undecided."""
        own = {
            atom.term.activation: one
            for atom in self._atoms.nominal
            if (one := atom.gradients.get(odd.parameter)) is not None
        }
        counts = counts_of(observed, [*own.values()], self._limits[odd.parameter]) if len(own) > 1 else None
        return odd if counts is None else Likeness("counted", odd.at, counts=tuple(zip(own, counts, strict=True)))

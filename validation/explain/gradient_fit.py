"""Finds what a stage's gradients are made of: the simplest combination of atoms that leaves nothing but rounding."""

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
    alike,
    counts_of,
    decided,
    fit,
    kept_of,
    level,
    limit_of,
    of_noise,
    of_rounding,
    select,
    simple,
    weights,
)
from pipeproof.reference.step import Gradient, Stage

_WHOLE = {"missing", "unexpected", "rounded", "not-finite"}  # what a whole stage can be at once


class GradientFit:
    """Explains one stage, given what errors in the next one handed on; ``every`` has the due gradients of all.

    ``thorough``: also try tensors of the step before, which are many; a stage after which nothing could be explained is
    not worth that.
    """

    def __init__(
        self, update: Update, stage: Stage, wrong: Sequence[Wrong], every: Callable[[], Known], *, thorough: bool = True
    ) -> None:
        self._thorough = thorough
        self._update, self._stage, self._wrong = update, stage, tuple(wrong)
        self._atoms = Atoms(update, stage, wrong)
        self._parameters = update.now.parameters(stage)
        own = [name for name in self._parameters if (stage, name) not in update.shared]
        self._seen = {name: update.observed.get((stage, name)) for name in own}
        self._due = {name: update.expected.get((stage, name)) for name in own}
        pairs = ((self._seen[name], self._due[name], Label.of_gradient((stage, name))) for name in own)
        self._absent = tuple(one for pair in pairs if (one := plainly(*pair, every)) is not None)
        absent = {one.parameter for one in self._absent}
        there = [name for name in own if name not in absent and self._due[name] is not None]
        sized = {name: (self._seen[name], self._due[name], self._nominal_sum(name)) for name in there}
        self._names = [name for name, three in sized.items() if not of_rounding(*three, self._largest)]
        self._limits = {
            name: limit_of(self._due[name], self._nominal_sum(name), coarse=update.coarse) for name in self._names
        }
        self._layout = ParameterLayout.of({name: self._due[name] for name in self._names})

    def explain(self) -> Explanation:
        """The simplest explanation, or the unexplained rest."""
        found = self._explained()
        hidden = not found.explained and found.residual <= found.limit  # by rounding, which may have made it so
        found = (self._multiple(found) or found) if found.undecided or hidden else found
        return replace(found, names=tuple(self._names), whole=self._whole(found))

    def _whole(self, found: Explanation) -> str:
        """What every parameter is that has a gradient, or should have one; nothing where that is not one thing."""
        kinds = {odd.kind for odd in found.odd}
        none = [name for name, seen in self._seen.items() if seen is None and stands_for_none(self._due[name])]
        every = len(self._seen) - len(none)
        return kinds.pop() if kinds <= _WHOLE and len(kinds) == 1 and len(found.odd) == every else ""

    def _multiple(self, found: Explanation) -> Explanation | None:
        """One factor for all, where each parameter's gradient is so many times the right one, but for rounding.

        That tells it also where rounding hides each microbatch's own coefficient, unless two are like each other, or
        those ``found`` speak for no such factor.
        """
        atoms = self._atoms.nominal
        system = self._system(atoms)
        seen = {name: self._seen[name] for name in self._names}
        pairs = [(one.double().cpu(), self._due[name].double().cpu()) for name, one in seen.items()]  # type: ignore[union-attr]
        if any(one.shape != due.shape or not one.isfinite().all() for one, due in pairs):
            return None
        squares = sum(due.square().sum().item() for _, due in pairs)
        factor = sum((one * due).sum().item() for one, due in pairs) / squares if squares else 0.0
        rows = torch.nn.functional.normalize(system.rows, dim=1)
        like = (rows @ rows.T).abs().triu(diagonal=1).max().item() > 1 - ALIKE
        if not factor or like:
            return None
        told = simple(factor, self._unit * abs(factor), self._unit)
        made = self._simple({atom.term: told for atom in atoms}, system, atoms)
        late = all(error(one, factor * due) <= self._unit for one, due in pairs)  # multiplied once all was added up
        if not late and not self._agree(found, made, factor, system):
            return None
        return replace(made, explained=True, odd=self._absences(made), compared=len(self._names))

    def _agree(self, found: Explanation, made: Explanation, factor: float, system: System) -> bool:
        """Whether ``made``, by one factor that is not 1, leaves but rounding, and what was ``found`` is near to it."""
        even = all(abs(c - factor * term.nominal) <= LITTLE * abs(factor) for term, c in found.coefficients.items())
        apart = abs(factor - 1.0) > min(LITTLE, max(ALIKE, LED * LEAD * self._unit))
        return even and apart and made.explained and len(self._holding(made, system)) == len(self._names)

    def _explained(self) -> Explanation:
        if not self._names:
            kinds = {one.kind for one in self._absent}
            zero = "zero" in kinds and "other" not in kinds
            terms = {atom.term: float(not zero) for atom in self._atoms.nominal}
            atoms = self._atoms.nominal
            found = self._simple(terms, self._system(atoms), atoms)
            return replace(found, odd=self._absences(found))
        if any(map(self._unfounded, self._names)):
            atoms = self._atoms.nominal
            right = self._simple({atom.term: 1.0 for atom in atoms}, self._system(atoms), atoms)
            return replace(right, explained=False, unfounded=True)
        tried: list[Explanation] = []
        if (left := self._left()) is not None:
            return left
        for atoms, sparse in self._attempts():
            tried.append(self._attempt(atoms, sparse=sparse))
            if tried[-1].complete:
                return tried[-1]
        return next((one for one in tried if one.explained), tried[0])

    def _left(self) -> Explanation | None:
        """A correct stage on top of what was there before: where these are alike, no coefficients tell them apart."""
        atoms = [*self._atoms.nominal, *self._atoms.left]
        system = self._system(atoms)
        made = self._simple({atom.term: 1.0 for atom in atoms}, system, atoms)
        there = len(atoms) > len(self._atoms.nominal) and bool(system.rows[-1].any())
        return self._but_for(made, system, atoms) if there and made.explained else None

    def _attempts(self) -> Iterator[tuple[list[Atom], bool]]:
        """From simple to complicated: the atoms of each attempt, and whether only few of them may be used."""
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
        return System.of(atoms, self._layout, self._seen)

    def _attempt(self, atoms: list[Atom], *, sparse: bool) -> Explanation:
        """An explanation by ``atoms``, of all parameters or of most."""
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
        """What may hold for most parameters: that nothing is wrong, and what each parameter says alone.

        What holds for so many is what one of any that are more than the rest says, so not all need be asked.
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
        """``found`` with the parameters that it does not hold for named."""
        holds = self._holding(found, system)
        if len(holds) < HALF * len(self._names):
            return replace(found, explained=False)
        odd = [self._alone(found, name) for name in self._names if name not in holds]
        return replace(found, odd=(*self._absences(found), *odd), compared=len(self._names))

    def _solve(self, system: System, atoms: list[Atom], *, sparse: bool) -> Explanation:
        """Least squares with all ``atoms``, unless only few may be used, or too few equations decide on all."""
        if not sparse and system.conclusive(len(atoms), self._limit(system)):
            base = torch.zeros_like(system.target)
            found = self._fitted(system, atoms, list(range(len(atoms))), base)
            if not found.undecided:
                return found
        return self._picked(system, atoms, from_nominal=not sparse)

    def _picked(self, system: System, atoms: list[Atom], *, from_nominal: bool) -> Explanation:
        """A few of ``atoms``, or a correct gradient but for a few."""
        limit = self._limit(system)
        nominal = [k for k, atom in enumerate(atoms) if atom.term.nominal and from_nominal]
        base = system.rows[nominal].sum(dim=0)
        most = min(2 * len(self._atoms.nominal) + FEW, len(atoms))
        while most and not system.conclusive(most, limit):
            most -= 1
        goal = limit / 2 * system.target.norm().item()
        chosen = select(system.target - base, system.rows, goal=goal, most=most)
        return self._fitted(system, atoms, chosen, base)

    def _fitted(self, system: System, atoms: list[Atom], chosen: list[int], base: Tensor) -> Explanation:
        """Least squares with the ``chosen`` atoms on top of ``base``, which is 0 or the sum of the nominal ones."""
        limit = self._limit(system)
        found = fit(system.target - base, system.rows[chosen], limit, size=system.target.norm().item())
        terms = {atom.term: float(bool(base.any())) for atom in self._atoms.nominal}
        for k, coefficient in zip(chosen, found.coefficients, strict=True):
            terms[atoms[k].term] = terms.get(atoms[k].term, 0.0) + coefficient
        if found.hopeless(limit):
            return replace(self._simple(kept_of(terms), system, atoms), explained=False)
        unclear = alike(system.rows, chosen, limit)
        bounds = {
            atoms[k].term: float("inf") if k in unclear else bound
            for k, bound in zip(chosen, found.uncertain, strict=True)
        }
        tidy = self._tidy(system, atoms, terms, bounds)
        undecided = tuple(term for term in tidy.coefficients if bounds.get(term, 0.0) > decided(limit))
        explained = tidy.explained and system.conclusive(len(chosen), limit) and not of_noise(tidy.coefficients, bounds)
        return replace(tidy, explained=explained, undecided=undecided)

    def _tidy(
        self, system: System, atoms: list[Atom], terms: Mapping[Term, float], bounds: Mapping[Term, float]
    ) -> Explanation:
        """``terms`` without what rounding put there, with as few different numbers as leave nothing but rounding."""
        kept = kept_of(terms)
        within = [bounds.get(term, 0.0) for term in kept]
        simple = {term: self._round(c, bound) for (term, c), bound in zip(kept.items(), within, strict=True)}
        even, as_found = (dict(zip(kept, level(list(some.values()), within), strict=True)) for some in (simple, kept))
        tried = [self._simple(each, system, atoms) for each in (simple, even, kept, terms)]
        explained = [each for each in tried if each.explained]
        found = min(explained, default=tried[2], key=lambda each: len(set(each.coefficients.values())))
        other = self._simple(as_found, system, atoms)
        return other if other.explained and found.is_by_chance(other, LEAD * self._unit) else found

    def _simple(self, terms: Mapping[Term, float], system: System, atoms: list[Atom]) -> Explanation:
        """``terms`` as an explanation of the parameters of ``system``."""
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
        """The parameters of which ``found`` leaves only rounding."""
        left = system.residuals(weights(found.coefficients, system.atoms))
        return [name for name, gap in left.items() if gap <= self._limits[name]]

    def _limit(self, system: System) -> float:
        return max((self._limits[name] for name in system.names), default=0.0)

    def _round(self, value: float, bound: float) -> float:
        """The simple number that ``value`` may well be, or itself."""
        near = min(self._numbers(), key=lambda number: abs(number - value))
        return near if abs(near - value) <= min(max(bound, CLOSE * abs(near)), DECIDED) else value

    def _numbers(self) -> list[float]:
        count = self._update.now.microbatches
        return [0.0, *(sign * n for sign in (1, -1) for n in (1.0, 2.0, 3.0, 4.0, 0.5, count, 1 / count))]

    @cached_property
    def _unit(self) -> float:
        """How its coarsest gradients are rounded."""
        types = [self._update.coarse, *(None if due is None else due.dtype for due in self._due.values())]
        return max((precision_of(one).unit for one in types if one is not None), default=0.0)

    @cached_property
    def _largest(self) -> float:
        """The largest element of all gradients that are due."""
        return max((g.abs().max().item() for g in self._due.values() if g is not None and g.numel()), default=0.0)

    def _nominal_sum(self, name: str) -> Gradient:
        parts = [g for atom in self._atoms.nominal if (g := atom.gradients.get(name)) is not None]
        return torch.stack(parts).sum(dim=0) if parts else None

    def _unfounded(self, name: str) -> bool:
        """Whether the reference's microbatches do not add up to its own gradient, but for rounding of any type."""
        due, whole = self._due[name], self._nominal_sum(name)
        if due is None or not due.any():
            return False
        return whole is None or (error(due.cpu(), whole) > HALF and not rounding_of(due.cpu(), whole).noise)

    def _absences(self, found: Explanation) -> tuple[Likeness, ...]:
        """What is plainly wrong, but for zeros that ``found`` explains."""
        due = {odd: found.predicted(odd.parameter) for odd in self._absent if odd.kind == "zero"}
        return tuple(odd for odd in self._absent if odd not in due or ((g := due[odd]) is not None and bool(g.any())))

    def _alone(self, found: Explanation, name: str) -> Likeness:
        """A parameter by itself: what it is in place of what the rest says."""
        seen, at = self._seen[name], Label.of_gradient((self._stage, name))
        assert seen is not None, "only gradients that are there are compared"
        right = self._nominal_sum(name)
        passing = (self._stage, name) in self._update.passing  # which says more than what rounding leaves in general
        if right is not None and (passing or error(seen.double().cpu(), right) <= self._limits[name]):
            return Likeness("right", at)
        whole = found.predicted(name)
        alone = Likeness("different", at) if whole is None else in_place_of(whole, seen, at, self._limits[name])
        return alone if alone.is_known or self._update.earlier else self._counted(alone, seen)

    def _counted(self, odd: Likeness, seen: Tensor) -> Likeness:
        """A parameter of which each microbatch's own is there so often; ``odd`` where that is not decided."""
        own = {
            atom.term.activation: one
            for atom in self._atoms.nominal
            if (one := atom.gradients.get(odd.parameter)) is not None
        }
        counts = counts_of(seen, [*own.values()], self._limits[odd.parameter]) if len(own) > 1 else None
        return odd if counts is None else Likeness("counted", odd.at, counts=tuple(zip(own, counts, strict=True)))

"""Find the simplest combination: atoms that explain a stage's gradients up to rounding."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

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
    conclusive,
    counts_of,
    decide_within,
    find_alike,
    fit,
    level,
    limit_of,
    of_noise,
    of_rounding,
    residual_of,
    select,
    simple,
)
from pipeproof.reference.step import Stage

_WHOLE = {"missing", "unexpected", "rounded", "not-finite"}  # states that a whole stage can share


@dataclass(frozen=True)
class System:
    """A stage's gradients, all parameters end to end (D), with atoms as rows (N, D); each scaled by its expected size.

    By parameter: ``sizes``, its elements, and ``limits``, what rounding leaves. ``unit``: roundoff of the coarsest.
    """

    stage: Stage
    atoms: Sequence[Atom]
    sizes: Mapping[str, int]
    limits: Mapping[str, float]
    unit: float
    target: Tensor
    rows: Tensor

    def only(self, names: Sequence[str]) -> Self:
        """Restrict to ``names``."""
        chosen = torch.tensor([name in names for name in self.sizes], dtype=torch.bool)
        kept = chosen.repeat_interleave(torch.tensor([*self.sizes.values()], dtype=torch.int64))
        sizes = {name: size for name, size in self.sizes.items() if name in names}
        return replace(self, sizes=sizes, target=self.target[kept], rows=self.rows[:, kept])

    @cached_property
    def limit(self) -> float:
        return max((self.limits[name] for name in self.sizes), default=0.0)

    @cached_property
    def nominal(self) -> Sequence[Term]:
        return [atom.term for atom in self.atoms if atom.term.nominal]

    @cached_property
    def telling(self) -> int:
        """Count elements, without constant zeros."""
        return int(((self.rows != 0).any(dim=0) | (self.target != 0)).sum())

    def conclusive(self, used: int) -> bool:
        """True if an explanation by ``used`` atoms cannot be chance."""
        return conclusive(self.telling, used=used, atoms=len(self.atoms), limit=self.limit)

    def holding(self, terms: Mapping[Term, float]) -> list[str]:
        """Parameters that ``terms`` explain up to rounding."""
        weights, sizes = [terms.get(atom.term, 0.0) for atom in self.atoms], [*self.sizes.values()]
        parts = zip(self.sizes, torch.split(self.target, sizes), torch.split(self.rows, sizes, dim=1), strict=True)
        return [name for name, target, rows in parts if residual_of(target, rows, weights) <= self.limits[name]]

    def explain(self, terms: Mapping[Term, float]) -> Explanation:
        """Turn ``terms`` into an explanation; its residual is that over all parameters."""
        gap = residual_of(self.target, self.rows, [terms.get(atom.term, 0.0) for atom in self.atoms])
        used = tuple(atom for atom in self.atoms if atom.term in terms)
        found = {atom.term: terms[atom.term] for atom in used}
        return Explanation(self.stage, found, gap, self.limit, gap <= self.limit, atoms=used)

    def solve(self, *, sparse: bool) -> Explanation:
        """Least squares with all atoms, unless only few may be used, or too few equations decide on all.

        Else with a few that are selected: for ``sparse`` alone, and otherwise as changes of a correct gradient.
        """
        if not sparse and self.conclusive(len(self.atoms)):
            found = self._fit([*range(len(self.atoms))], torch.zeros_like(self.target))
            if not found.undecided:
                return found
        # Atoms that are nearly dependent leave each other's coefficients open: few of them may be decided.
        base = self.rows[[k for k, atom in enumerate(self.atoms) if atom.term.nominal and not sparse]].sum(dim=0)
        most = min(2 * len(self.nominal) + FEW, len(self.atoms))
        while most and not self.conclusive(most):
            most -= 1
        goal = self.limit / 2 * self.target.norm().item()
        return self._fit(select(self.target - base, self.rows, goal=goal, most=most), base)

    def _fit(self, chosen: list[int], base: Tensor) -> Explanation:
        """Least squares with the ``chosen`` atoms on top of ``base``: 0, or the sum of the nominal ones.

        Rounding is dropped, and as few different numbers are used as leave only rounding.
        """
        names = [self.atoms[k].term for k in chosen]
        found = fit(self.target - base, self.rows[chosen], self.limit, size=self.target.norm().item())
        terms = dict.fromkeys(self.nominal, float(bool(base.any())))
        for term, coefficient in zip(names, found.coefficients, strict=True):
            terms[term] = terms.get(term, 0.0) + coefficient
        kept = {term: c for term, c in terms.items() if term.nominal or abs(c) > ALIKE}
        if found.hopeless(self.limit):  # no numbers nearby explain it either
            return replace(self.explain(kept), explained=False)
        # One fault gives one number, so the fewest different numbers are the likeliest.
        bounds = dict(zip(names, found.uncertain, strict=True))
        bounds |= {self.atoms[k].term: float("inf") for k in find_alike(self.rows, chosen, self.limit)}
        within = [bounds.get(term, 0.0) for term in kept]
        plain = {term: self._round(c, bound) for (term, c), bound in zip(kept.items(), within, strict=True)}
        even, as_found = (dict(zip(kept, level(list(some.values()), within), strict=True)) for some in (plain, kept))
        tried = [self.explain(each) for each in (plain, even, kept, terms)]
        fitting = [each for each in tried if each.explained]
        tidy = min(fitting, default=tried[2], key=lambda each: len(set(each.coefficients.values())))
        other = self.explain(as_found)  # a plain factor may only be near the true one
        tidy = other if other.explained and tidy.is_by_chance(other, LEAD * self.unit) else tidy
        undecided = tuple(t for t in tidy.coefficients if bounds.get(t, 0.0) > decide_within(self.limit))
        explained = tidy.explained and self.conclusive(len(chosen)) and not of_noise(tidy.coefficients, bounds)
        return replace(tidy, explained=explained, undecided=undecided)

    def _round(self, value: float, bound: float) -> float:
        """The simple number close to ``value``, or ``value`` itself."""
        count = sum(term.what == "pair" for term in self.nominal)
        numbers = [0.0, *(sign * n for sign in (1, -1) for n in (1.0, 2.0, 3.0, 4.0, 0.5, count, 1 / count))]
        near = min(numbers, key=lambda number: abs(number - value))
        return near if abs(near - value) <= min(max(bound, CLOSE * abs(near)), DECIDED) else value


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
        # What is rounding alone, as a bias before a softmax, would make every combination wrong.
        sizes = (one.abs().max().item() for one in self._expected.values() if one is not None and one.numel())
        largest = max(sizes, default=0.0)
        self._sums = {name: total(atom.gradients.get(name) for atom in self._atoms.nominal) for name in there}
        self._fitted = {
            name: one
            for name, one in there.items()
            if not of_rounding(self._observed[name], one, self._sums[name], largest)
        }
        self._limits = {name: limit_of(g, self._sums[name], coarse=update.coarse) for name, g in self._fitted.items()}
        types = (update.coarse, *(one.dtype for one in self._expected.values() if one is not None))
        self._unit = max((precision_of(one).unit for one in types if one is not None), default=0.0)

    def explain(self) -> Explanation:
        """Return the simplest explanation, or the unexplained rest."""
        found = self._explain()
        hidden = not found.explained and found.residual <= found.limit  # by rounding, which may have made it so
        found = (self._multiple(found) or found) if found.undecided or hidden else found
        odd = self._absent
        if found.explained:  # which explains zeros as well
            made = {one: found.predict(one.parameter) for one in odd if one.kind == "zero"}
            odd = tuple(one for one in odd if one not in made or ((g := made[one]) is not None and bool(g.any())))
        odd = (*odd, *found.odd)
        kinds = {one.kind for one in odd}
        none = [name for name, one in self._observed.items() if one is None and stands_for_none(self._expected[name])]
        every = len(self._observed) - len(none)
        whole = kinds.pop() if kinds <= _WHOLE and len(kinds) == 1 and len(odd) == every else ""
        return replace(found, odd=odd, wrong=self._wrong, names=tuple(self._fitted), whole=whole)

    def _explain(self) -> Explanation:
        nominal = self._atoms.nominal
        right = {atom.term: 1.0 for atom in nominal}
        system = self._system(nominal)
        if not self._fitted:
            kinds = {one.kind for one in self._absent}
            return system.explain(dict.fromkeys(right, float("zero" not in kinds or "other" in kinds)))
        for name, expected in self._fitted.items():
            whole = self._sums[name]
            apart = whole is None or (
                error(expected.cpu(), whole) > HALF and not rounding_of(expected.cpu(), whole).noise
            )
            if apart and expected.any():  # the reference's microbatches do not add up to it, in any type
                return replace(system.explain(right), explained=False, unfounded=True)
        if self._atoms.left:  # on top of a correct gradient: if similar, no coefficients separate them
            more = self._system([*nominal, *self._atoms.left])
            left = more.explain(right | {atom.term: 1.0 for atom in self._atoms.left})
            if left.explained and bool(more.rows[-1].any()):
                return self._but_for(left, more)
        # What explains with fewer atoms is likelier: of many, some combination fits soon, at least in part.
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
        """Equations for the fitted parameters, in fp64; zeros for None."""
        sizes = {name: one.numel() for name, one in self._fitted.items()}
        scales = torch.tensor([g.double().norm().item() or 1.0 for g in self._fitted.values()], dtype=torch.float64)
        every = [self._observed, *(atom.gradients for atom in atoms)]
        made = torch.empty(len(every), sum(sizes.values()), dtype=torch.float64)
        for row, gradients in zip(made, every, strict=True):
            found = [(size, gradients.get(name)) for name, size in sizes.items()]
            flat = [torch.zeros(size) if one is None else one.detach().cpu().flatten() for size, one in found]
            torch.cat([torch.zeros(0), *flat], out=row)
        # So that a parameter with small gradients counts as much as one with large ones.
        made.div_(scales.repeat_interleave(torch.tensor([*sizes.values()], dtype=torch.int64)))
        return System(self._stage, atoms, sizes, self._limits, self._unit, made[0], made[1:])

    def _attempt(self, system: System, *, sparse: bool) -> Explanation:
        """Explain all parameters, or most, by the system's atoms."""
        whole = system.solve(sparse=sparse)
        if whole.explained:
            return self._but_for(whole, system)
        for terms in () if sparse else self._candidates(system):
            holds = system.holding(terms)
            if len(holds) >= HALF * len(self._fitted):
                return self._but_for(system.only(holds).explain(terms), system)
        return whole

    def _candidates(self, system: System) -> Iterator[Mapping[Term, float]]:
        """Candidates for most parameters: the right sum, and each parameter's own solution.

        A solution for so many is the solution of any parameter in a majority, so a part of them suffices.
        """
        yield dict.fromkeys(system.nominal, 1.0)
        in_vain = 0
        for name in sorted(system.sizes, key=lambda name: -system.sizes[name]):
            alone = system.only([name]).solve(sparse=False)
            if alone.explained and not alone.undecided:
                yield alone.coefficients
            in_vain += not (alone.explained and alone.undecided)
            if in_vain > (1 - HALF) * len(self._fitted):
                return

    def _but_for(self, found: Explanation, system: System) -> Explanation:
        """Add the parameters that deviate to ``found``."""
        holds = system.holding(found.coefficients)
        if len(holds) < HALF * len(self._fitted):
            return replace(found, explained=False)
        return replace(found, odd=tuple(self._fit_alone(found, name) for name in self._fitted if name not in holds))

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
        made = system.explain(dict.fromkeys(system.nominal, simple(factor, self._unit * abs(factor), self._unit)))
        if not all(error(one, factor * expected) <= self._unit for one, expected in pairs):
            # It was multiplied before all was added up: then the coefficients come close to a factor other than 1.
            even = all(abs(c - factor * term.nominal) <= LITTLE * abs(factor) for term, c in found.coefficients.items())
            apart = abs(factor - 1.0) > min(LITTLE, max(ALIKE, LED * LEAD * self._unit))
            if not (even and apart and made.explained and len(system.holding(made.coefficients)) == len(pairs)):
                return None
        return replace(made, explained=True)

    def _fit_alone(self, found: Explanation, name: str) -> Likeness:
        """Compare a parameter with the prediction from the rest; else count each microbatch's own addend in it."""
        observed, at, limit = self._observed[name], Label.of_gradient((self._stage, name)), self._limits[name]
        assert observed is not None, "only gradients that are there are compared"
        right = self._sums[name]
        passing = (self._stage, name) in self._update.passing  # more specific than the general rounding limit
        if right is not None and (passing or error(observed.double().cpu(), right) <= limit):
            return Likeness("right", at)
        whole = found.predict(name)
        alone = Likeness("different", at) if whole is None else in_place_of(whole, observed, at, limit)
        if alone.is_known or self._update.earlier:  # microbatches of several calls have the same numbers
            return alone
        parts = ((atom.term.activation, atom.gradients.get(name)) for atom in self._atoms.nominal)
        own = {m: one for m, one in parts if one is not None}
        counts = counts_of(observed, [*own.values()], limit) if len(own) > 1 else None
        return alone if counts is None else Likeness("counted", at, counts=tuple(zip(own, counts, strict=True)))

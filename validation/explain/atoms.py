"""An update's gradients, atoms, the tensors that may add up to them, each with a term that names it, and what is found.

A correct gradient is the sum of the nominal atoms, each once: microbatch i's activation with microbatch i's output
gradient. Faults add the others. An explanation has a coefficient for each term, and leaves only rounding.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from pipeproof.core.observe.likeness import Likeness
from pipeproof.explain.limits import CLEARLY
from pipeproof.reference.pairing import Contributed, Flow, Pairing, Pairings
from pipeproof.reference.step import Gradient, Site, Stage


@dataclass(frozen=True)
class Update:
    """Input to attribution.

    ``observed`` and ``expected``: an update's gradients by site, after the sum over tied copies. ``now``: the operation
    that made the update. ``earlier``: the accumulating calls before it, latest first. ``before``: the last operation of
    the previous update; ``old``: the gradients of that update. ``tied``: parameters with copies in several stages, the
    name by stage. ``evaluated``: evaluations before the update, as if they had been steps. ``placement``: each stage's
    rank, or the first of several. ``ranks`` and ``stages``: their number in a replica, if declared. ``replicas``: the
    number of replicas. ``computed_in``: the narrowest type that the reference computes in, computed on demand.
    ``coarse``: the rounding type to assume, if narrower than the gradients'. ``passing``: sites with a gradient close
    enough to the expected one, not equal.
    """

    observed: Mapping[Site, Gradient]
    expected: Mapping[Site, Gradient]
    now: Pairings
    earlier: tuple[Pairings, ...] = ()
    before: Pairing | None = None
    old: Mapping[Site, Gradient] = field(default_factory=dict)
    tied: Sequence[Mapping[Stage, str]] = ()
    evaluated: Sequence[Pairing] = ()
    placement: Sequence[int] = ()
    ranks: int | None = None
    stages: int | None = None
    replicas: int = 1
    computed_in: Callable[[], torch.dtype | None] = lambda: None
    coarse: torch.dtype | None = None
    passing: Collection[Site] = frozenset()

    @cached_property
    def shared(self) -> frozenset[Site]:
        """Sites of parameters with copies in several stages."""
        return frozenset(site for copies in self.tied for site in copies.items())

    @property
    def own(self) -> Pairing:
        """Return ``now``, given a step before."""
        assert isinstance(self.now, Pairing), "only plans of our own have a step before"
        return self.now

    @cached_property
    def old_data(self) -> Pairing | None:
        """The previous step's microbatches in today's model."""
        return None if self.before is None else self.own.with_batches(self.before.batches)

    @cached_property
    def old_weights(self) -> Pairing | None:
        """Today's microbatches in the previous step's model."""
        return None if self.before is None else self.before.with_batches(self.now.batches)


class Term(NamedTuple):
    """An atom's name. ``activation`` and ``gradient`` are microbatches, -1 for none.

    ``what`` is one of: "pair", microbatch ``activation``'s activation with microbatch ``gradient``'s output gradient,
    on the last stage its target. "logits": the same on the last stage with the gradient in the logits. "flow": with the
    output gradient number ``gradient`` that an error in the next stage made. "earlier": microbatch ``activation`` of
    the accumulating call ``gradient`` calls ago. "gradient": the whole gradient of the step before. "parameter": the
    parameter itself. "evaluated": the gradient of evaluation number ``activation``. "old-activation", "old-gradient": a
    pair with that half from the step before. "old-data": the step before's microbatch in today's model. "old-weights":
    today's microbatch in the step before's model.
    """

    what: str
    activation: int = -1
    gradient: int = -1

    @property
    def nominal(self) -> bool:
        """True if a correct gradient contains this term once."""
        return self.what == "earlier" or (self.what == "pair" and self.activation == self.gradient)


@dataclass(frozen=True)
class Atom:
    """A term, with gradients by parameter, and the input gradients that its backward hands on."""

    term: Term
    gradients: Mapping[str, Gradient]
    inputs: tuple[Gradient, ...] = ()


@dataclass(frozen=True)
class Wrong:
    """A wrong atom with input gradients, and the microbatches that it may come from."""

    atom: Atom
    near: frozenset[int]


class Atoms:
    """Atoms of a stage, computed on demand. ``wrong``: wrong gradients that the next stage handed on."""

    def __init__(self, update: Update, stage: Stage, wrong: Sequence[Wrong]) -> None:
        self._update = update
        self._now = update.now
        self._stage = stage
        self._wrong = wrong
        self._own = range(update.now.microbatches)

    @cached_property
    def nominal(self) -> list[Atom]:
        """The addends in a correct gradient."""
        calls = enumerate((self._now, *self._update.earlier))
        each = [(call, i, pairing) for call, pairing in calls for i in range(pairing.microbatches)]
        return [
            _atom(Term("earlier", i, call) if call else Term("pair", i, i), pairing.contribution(self._stage, i))
            for call, i, pairing in each
        ]

    @cached_property
    def consequences(self) -> list[Atom]:
        """Output gradients from errors in the next stage, with each microbatch concerned."""
        flows = {number: _as_is(wrong.atom.inputs) for number, wrong in enumerate(self._wrong)}
        near = {i: {n: flows[n] for n, wrong in enumerate(self._wrong) if i in wrong.near} for i in self._own}
        return [atom for i in self._own for atom in self._with(i, "flow", near[i])]

    @cached_property
    def extras(self) -> list[Atom]:
        """The previous step's gradient, the parameters, and gradients of evaluations."""
        update, stage = self._update, self._stage
        values = {name: value.detach() for name, value in self._now.parameters(stage).items()}
        found = [Atom(Term("parameter"), values)]
        for number, pairing in enumerate(update.evaluated):
            parts = [pairing.contribution(stage, i).gradients for i in range(pairing.microbatches)]
            found.append(Atom(Term("evaluated", number), {name: total(p[name] for p in parts) for name in values}))
        return [*found, *self.left]

    @cached_property
    def left(self) -> list[Atom]:
        """The previous step's gradient, or the initial gradient, if known and not a weight."""
        old = dict[str, Gradient]()
        for name, weight in self._now.parameters(self._stage).items():
            there = self._update.old.get((self._stage, name))
            there = None if there is None else there.double()
            old[name] = None if there is None or torch.equal(there, weight.detach().to(there)) else there
        return [Atom(Term("gradient"), old)] if self._update.old else []

    @cached_property
    def pairs(self) -> list[Atom]:
        """Every activation with every other microbatch's output gradient, target, or gradient in the logits."""
        stage = self._stage
        found: list[Atom] = []
        for i in self._own:
            others = [j for j in self._own if j != i]
            found += self._with(i, "pair", {j: self._now.seed(stage, j) for j in others})
            if stage == self._now.stages - 1:
                found += self._with(i, "logits", {j: self._now.flow(stage, j) for j in others})
        return found

    @cached_property
    def stale(self) -> list[Atom]:
        """Pairs with one half, the data, or the weights from the step before."""
        update, stage, before = self._update, self._stage, self._update.before
        if before is None:
            return []
        found: list[Atom] = []
        then = range(before.microbatches)
        old = {j: before.seed(stage, j) for j in then}
        new = {j: self._now.seed(stage, j) for j in self._own}
        for i in self._own:
            found += self._with(i, "old-gradient", old)
        for i in then:
            made = update.own.contribute(stage, before.inputs[stage][i], list(new.values()))
            found += _fitting(i, "old-activation", new, made)
        for what, pairing in (("old-data", update.old_data), ("old-weights", update.old_weights)):
            assert pairing is not None, "there is a step before"
            found += [Atom(Term(what, i, i), pairing.contribution(stage, i).gradients) for i in then]
        return found

    def _with(self, i: int, what: str, flows: Mapping[int, Flow]) -> Iterator[Atom]:
        """Pair microbatch i's activation with each fitting flow."""
        return _fitting(i, what, flows, self._now.pair(self._stage, i, list(flows.values())) if flows else [])


def total(parts: Iterable[Gradient]) -> Gradient:
    """The sum of gradients; None without any."""
    found = [part for part in parts if part is not None]
    return torch.stack(found).sum(dim=0) if found else None


def _fitting(i: int, what: str, flows: Mapping[int, Flow], made: Sequence[Contributed | None]) -> Iterator[Atom]:
    pairs = zip(flows, made, strict=True)
    return (_atom(Term(what, i, number), contributed) for number, contributed in pairs if contributed is not None)


def _atom(term: Term, made: Contributed) -> Atom:
    return Atom(term, made.gradients, made.inputs)


def _as_is(gradients: tuple[Gradient, ...]) -> Flow:
    return lambda _: gradients


@dataclass(frozen=True)
class Explanation:
    """A stage's gradients as coefficients on terms, with zeros for missing nominal terms.

    ``residual`` is relative; ``limit``: its bound by rounding; ``explained``: it is rounding. ``undecided``: terms with
    ambiguous coefficients. ``wrong``: the atoms that "flow" terms number; ``names``: the parameters compared; ``odd``:
    those that deviate from the coefficients. ``whole``: the common state of every parameter, such as missing.
    ``unfounded``: the reference's own microbatches do not add up to its gradients, so nothing can be decomposed.
    """

    stage: Stage
    coefficients: Mapping[Term, float]
    residual: float
    limit: float
    explained: bool
    undecided: tuple[Term, ...] = ()
    odd: tuple[Likeness, ...] = ()
    names: tuple[str, ...] = ()
    whole: str = ""
    unfounded: bool = False
    wrong: tuple[Wrong, ...] = field(default=(), repr=False)
    atoms: tuple[Atom, ...] = field(default=(), repr=False)

    @property
    def complete(self) -> bool:
        """True if every parameter has an explanation."""
        return self.explained and all(one.is_known for one in self.odd)

    def is_by_chance(self, other: "Explanation", lead: float) -> bool:
        """True if the single factor only approximates the ``other`` one, which leaves far less.

        ``lead``: how far, relatively, rounding may move a factor. Coefficients of 1 are never by chance.
        """
        own, better = (set(one.coefficients.values()) for one in (self, other))
        if len(own) != 1 or len(better) != 1 or own <= {0.0, 1.0, -1.0}:
            return False
        apart = abs(min(own) - min(better)) > lead * abs(min(better))
        return apart and self.residual > CLEARLY * other.residual

    def predict(self, name: str) -> Gradient:
        """Predict a parameter's gradient from the coefficients; None if no atom contributes."""
        terms = [(self.coefficients[atom.term], atom.gradients.get(name)) for atom in self.atoms]
        return total(c * gradient for c, gradient in terms if gradient is not None and c)

"""Attribution: which faults explain an update's gradients, from the gradients alone.

It walks the stages from the last to the first, as output gradients flow. Errors handed on from one stage are candidates
in the next, so a consequence is not taken for a cause.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from pipeproof.core.cause import Cause, Cell, Cells, RuledOut
from pipeproof.core.limits import precision_of
from pipeproof.core.observe.likeness import Label
from pipeproof.explain.atoms import Explanation, Term, Update, Wrong
from pipeproof.explain.cause_rules import name_causes
from pipeproof.explain.gradient_fit import GradientFit
from pipeproof.explain.known import Known
from pipeproof.explain.played import Played, Setup
from pipeproof.explain.tied import Shares, explain_tied
from pipeproof.reference.copies import copies_apart
from pipeproof.reference.pairing import Pairing
from pipeproof.reference.step import Gradient, Site, Stage


@dataclass(frozen=True)
class Attribution:
    """Gradients as atoms, and the faults that this implies, likeliest first.

    ``stages`` by stage; ``tied`` for each copy of a shared parameter. ``unknown`` names what has no explanation. No
    causes and nothing unknown: the gradients are right. ``cells`` are the coefficients of this operation's
    microbatches, None if only their sum is known.
    """

    stages: tuple[Explanation, ...]
    tied: tuple[Shares, ...]
    causes: tuple[Cause, ...]
    unknown: tuple[str, ...]
    ruled_out: tuple[RuledOut, ...]
    cells: Cells | None

    @property
    def right(self) -> bool:
        """True if the gradients match a correct step."""
        return not self.causes and not self.unknown


def attribute(update: Update) -> Attribution:
    """Explain an update's gradients and name the faults."""

    @cache
    def expected() -> Known:
        """Index expected gradients, to find one in another's place."""
        every = ((Label.of_gradient(site), gradient) for site, gradient in update.expected.items())
        return Known((label, gradient.detach().cpu()) for label, gradient in every if gradient is not None)

    found: dict[Stage, Explanation] = {}
    wrong: Sequence[Wrong] = ()
    for stage in reversed(range(update.now.stages)):
        thorough = all(one.explained for one in found.values())
        found[stage] = GradientFit(update, stage, wrong, expected, thorough=thorough).explain()
        wrong = pass_on(found[stage])
    stages = tuple(found[stage] for stage in range(update.now.stages))
    tied = explain_tied(update, stages)
    causes, unknown, ruled_out = name_causes(update, stages, tied)
    return Attribution(stages, tied, causes, unknown, ruled_out, _cells(update, stages))


def _cells(update: Update, stages: Sequence[Explanation]) -> Cells | None:
    """Coefficients by stage and microbatch: unknown without an explanation or a gradient to compare."""
    rows, apart = [], []
    for one in stages:
        known = one.explained and (one.names or not any(one.coefficients.values()))
        unclear = {term.activation for term in one.undecided}
        row = []
        for m in range(update.now.microbatches):
            met = {term: c for term, c in one.coefficients.items() if c and term.activation == m}
            others = {t.gradient: c for t, c in met.items() if t.what in ("pair", "logits") and not t.nominal}
            behind = sum(c for term, c in met.items() if term.what == "flow")
            cell = Cell(one.coefficients.get(Term("pair", m, m), 0.0), tuple(sorted(others.items())), behind)
            row.append(cell if known and m not in unclear else Cell(None))
        rows.append(tuple(row))
        apart.append(tuple(odd.parameter for odd in one.odd if odd.kind != "right" and one.explained))
    cells = Cells(tuple(rows), tuple(apart))
    return cells if update.now.microbatches == len(update.now.batches) and cells.known else None


def attribute_coarsely(update: Update) -> Attribution | None:
    """Attribute with rounding in the reference's narrower type.

    None without such a type, and unless it explains everything: coarser rounding lets more combinations fit in part.
    """
    narrow, types = update.computed_in(), {one.dtype for one in update.expected.values() if one is not None}
    if narrow is None or all(precision_of(one).unit >= precision_of(narrow).unit for one in types):
        return None
    found = attribute(replace(update, coarse=narrow))
    return found if found.causes and not found.unknown else None


def pass_on(explanation: Explanation) -> tuple[Wrong, ...]:
    """Return the wrong atoms that a stage's errors hand to the stage before."""
    if not explanation.explained:
        return ()
    found = []
    for atom in explanation.atoms:
        term = atom.term
        if not term.nominal and atom.inputs and explanation.coefficients[term]:
            near = {term.activation, term.gradient}
            if term.what == "flow":
                near = {term.activation, *explanation.wrong[term.gradient].near}
            found.append(Wrong(atom, frozenset(near)))
    return tuple(found)


def update_of(setup: Setup, observed: Mapping[Site, Gradient], played: Sequence[Played]) -> Update:
    """Collect attribution's input from gradients ``observed`` in the last operation of ``played``, a "train".

    All operations up to it match the reference's. All is on the CPU.
    """
    last = len(played) - 1
    assert setup.plan[last] == "train", "only an update has gradients"
    pending: list[Pairing] = []
    evaluated: list[Pairing] = []
    before: Pairing | None = None
    old: Mapping[Site, Gradient] = {}
    for one in played:
        pairing = Pairing(
            one.model,
            before={name: value.detach() for name, value in one.model.named_parameters(remove_duplicate=False)},
            layers=setup.layers,
            batches=setup.batches(one.number),
            recipe=setup.recipe,
        )
        if setup.plan[one.number] == "eval":
            evaluated.append(pairing)
        else:
            pending.insert(0, pairing)
        if setup.plan[one.number] == "train" and one.number < last:
            before, old = pending[0], one.expected.gradients
            pending = []
    return Update(
        observed,
        played[last].expected.gradients,
        pending[0],
        tuple(pending[1:]),
        before,
        old,
        copies_apart(played[last].model, setup.owner),
        evaluated,
        setup.placement,
    )

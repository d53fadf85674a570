"""Attribution: which faults explain an update's gradients, from the gradients alone.

The stages are walked from the last to the first, as output gradients flow: what an error in one stage hands on is among
the things that the next may be made of, so a consequence is not taken for a cause.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reference.model import build_model
from reference.pairing import Pairing
from reference.step import Expected, Gradient, Recipe, Reference, Site, Stage
from validation.case import Case
from validation.cause import Cause
from validation.diagnosis.atoms import Wrong
from validation.diagnosis.explanation import Explainer, Explanation
from validation.diagnosis.naming import name_causes
from validation.diagnosis.tied import Shares, explain_tied
from validation.diagnosis.update import Update
from validation.observe import data_for, max_norm_of
from validation.observed import Observed
from validation.stages import layers_of, owners, tied_across


@dataclass(frozen=True)
class Attribution:
    """What an update's gradients are made of, and which faults that names, the most likely first.

    ``stages`` by stage; ``tied`` for each copy of a parameter that stages share. ``unknown`` says what is left without
    an explanation; empty where nothing is. No causes and nothing unknown: the gradients are right.
    """

    stages: tuple[Explanation, ...]
    tied: tuple[Shares, ...]
    causes: tuple[Cause, ...]
    unknown: tuple[str, ...]
    ruled_out: tuple[str, ...]

    @property
    def right(self) -> bool:
        """Whether the gradients are those of a correct step."""
        return not self.causes and not self.unknown

    def coefficients(self, stage: Stage) -> dict[tuple[int, int], float]:
        """The coefficient of each (activation, output gradient) in ``stage``'s gradients, of this operation alone."""
        found = self.stages[stage].coefficients
        return {(term.activation, term.gradient): c for term, c in found.items() if term.what == "pair"}


def attribute(update: Update) -> Attribution:
    """Explain an update's gradients and name the faults."""
    found: dict[Stage, Explanation] = {}
    wrong: Sequence[Wrong] = ()
    for stage in reversed(range(update.now.stages)):
        thorough = all(one.explained for one in found.values())
        found[stage] = Explainer(update, stage, wrong, thorough=thorough).explain()
        wrong = handed_on(found[stage])
    stages = tuple(found[stage] for stage in range(update.now.stages))
    tied = explain_tied(update, stages)
    causes, unknown, ruled_out = name_causes(update, stages, tied)
    return Attribution(stages, tied, causes, unknown, ruled_out)


def handed_on(explanation: Explanation) -> tuple[Wrong, ...]:
    """What a stage's errors give the stage before to work with."""
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


def attribute_case(case: Case, observed: Observed, operation: int) -> Attribution:
    """Attribute the gradients that ``case`` produced in operation ``operation`` of its plan, which is a "train"."""
    return attribute(update_of(case, observed, operation))


def update_of(case: Case, observed: Observed, operation: int) -> Update:
    """What attribution needs, by training the reference up to ``operation``. Everything is on the CPU."""
    assert case.plan[operation] == "train", "only an update has gradients"
    model = build_model(case.model, layers=case.layers, seed=case.seed, dtype=case.dtype)
    recipe = Recipe(loss=case.loss)
    reference = Reference(model, owner=owners(model, case.split), recipe=recipe)
    pending: list[Pairing] = []
    evaluated: list[Pairing] = []
    before: Pairing | None = None
    old: Expected | None = None
    for number in range(operation + 1):
        name, batches = case.plan[number], data_for(case, number)
        orders = dict.fromkeys(range(case.stages), range(case.microbatches))
        expected = reference.perform(name, batches, orders=orders, max_norm=max_norm_of(case, number))
        if name == "eval":
            now = {key: value.detach().clone() for key, value in model.named_parameters(remove_duplicate=False)}
            evaluated.append(Pairing(model, before=now, layers=layers_of(case.split), batches=batches, recipe=recipe))
        else:
            pairing = Pairing(
                model, before=expected.before, layers=layers_of(case.split), batches=batches, recipe=recipe
            )
            pending.insert(0, pairing)
        if name == "train" and number < operation:
            before, old = pending[0], expected
            pending = []
    return Update(
        observed.gradients(operation),
        expected.gradients,
        pending[0],
        tuple(pending[1:]),
        before,
        _gradients(old),
        tied_across(model, case.split),
        evaluated,
        case.built.placement,
    )


def _gradients(expected: Expected | None) -> Mapping[Site, Gradient]:
    return expected.gradients if expected is not None else {}

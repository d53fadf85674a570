"""Causes of single parameters: those that do not follow their stage, are not trained, have copies, or are mixed up."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from torch import Tensor

from reference.step import Gradient, Site, Stage
from validation.diagnosis.explanation import Explanation, limit_of
from validation.diagnosis.known import Known
from validation.diagnosis.likeness import summed
from validation.diagnosis.microbatch_weights import ONE, uniform, weighed
from validation.diagnosis.module_pairing import Paired
from validation.diagnosis.update import Update
from validation.judging.cause import Cause
from validation.observers.likeness import GRADIENT, Label, Likeness
from validation.observers.recording import Point

WHOLE = {"missing", "unexpected", "rounded", "not-finite"}  # what a whole stage can be at once


def of_parameters(
    update: Update, stages: Sequence[Explanation], sums: Mapping[Stage, Sequence[Cause]]
) -> Iterator[Cause]:
    """The parameters that do not follow their stage."""
    for one in stages:
        if one.compared == 0 and len({each.kind for each in one.odd} & WHOLE) == 1:
            continue  # the stage's own fault
        yield from sums[one.stage]
        groups: dict[Likeness, list[str]] = {}
        for odd in _telling(one.odd):
            groups.setdefault(replace(odd, at=None), []).append(odd.parameter)
        for odd, names in groups.items():
            for cause in _odd_causes(update, odd, max(ONE, one.limit)):
                more = f"and {', '.join(names[1:])}" if len(names) > 1 else ""
                detail = "; ".join(filter(None, (cause.detail, more)))
                yield replace(cause, stage=one.stage, parameter=names[0], detail=detail)


def _telling(odd: Sequence[Likeness]) -> Sequence[Likeness]:
    """What is known of parameters, but for factors and counts where others are wrong that nobody can explain.

    They may have one cause, such as an overwritten output gradient: a bias shows it as one microbatch in place of
    others, or as some times its own, and a weight, which met it with its own activations, as nothing known.
    """
    alone = all(one.is_known for one in odd)
    return [one for one in odd if alone or one.kind not in ("counted", "multiple")]


def untrained(update: Update) -> Iterator[Cause]:
    """Parameters that are not trained, and have a gradient."""
    for stage in range(update.now.stages):
        trained = update.now.parameters(stage)
        for (owner, name), due in update.expected.items():
            seen = update.observed.get((owner, name))
            if owner == stage and name not in trained and due is None and seen is not None:
                yield Cause("unexpected", stage=stage, parameter=name)


def _odd_causes(update: Update, odd: Likeness, within: float) -> Iterator[Cause]:
    where = (f"{odd.part.text} of it, all else is right",) if odd.part is not None else ()
    for cause in _of_elements(update, odd, within):
        yield replace(cause, detail="; ".join(filter(None, (*where, cause.detail))))


def _of_elements(update: Update, odd: Likeness, within: float) -> Iterator[Cause]:
    if odd.kind in ("missing", "unexpected", "zero", "not-finite"):
        yield Cause(odd.kind)
    elif odd.kind == "rounded":
        yield Cause("rounded", detail="" if odd.step is None else odd.text)
    elif odd.kind == "reordered":
        yield Cause("altered")
    elif odd.kind == "other" and odd.source is not None:
        yield Cause("misplaced", detail=f"what is there belongs in {odd.source.text}")
    elif odd.kind == "shape":
        yield Cause("partition", detail="its gradient has another shape")
    elif odd.kind == "multiple" and odd.factor is not None:
        fault = uniform(update, odd.factor, within)
        yield Cause(fault.kind, factor=fault.factor, detail=f"{odd.factor:.6g} times" if fault.detail else "")
    elif odd.kind == "sum":
        yield Cause("extra-term", detail=odd.change)
    elif odd.kind == "counted":
        for fault in weighed(update, dict(odd.counts), within):
            yield Cause(fault.kind, microbatches=fault.microbatches, factor=fault.factor, detail=fault.detail)
    elif odd.pairs:
        paired = Paired(odd.pairs, update.now.microbatches)
        told = ", ".join(f"{j} with {i}'s" for i, j in paired.wrong)
        microbatches = tuple(sorted({j for _, j in paired.wrong}))
        detail = f"its output gradients met activations so: {told}"
        first, *others = (Cause(kind, microbatches=microbatches, detail=detail) for kind in paired.kinds)
        yield replace(first, instead=tuple(others))


Predicted = Callable[[Site], Gradient]


def mixed(stages: Sequence[Explanation], update: Update) -> Mapping[Stage, tuple[Cause, ...]]:
    """By stage, a cause for each parameter that is a sum of what two parameters of one shape should have."""
    predicted: Predicted = cache(lambda site: stages[site[0]].predicted(site[1]))
    return {one.stage: tuple(_mixed(one, update, predicted)) for one in stages}


def _mixed(one: Explanation, update: Update, predicted: Predicted) -> Iterator[Cause]:
    for odd in one.odd:
        found = None if odd.is_known else _partner((one.stage, odd.parameter), update, predicted)
        if found is not None:
            yield replace(found, stage=one.stage, parameter=odd.parameter)


def _partner(site: Site, update: Update, predicted: Predicted) -> Cause | None:
    """What it means that a gradient is so much of its own and so much of another parameter's."""
    seen, own = update.observed.get(site), predicted(site)
    if seen is None or own is None:
        return None
    others = Known((_label(other), gradient) for other, gradient in _others(site, own, update, predicted))
    found = summed(seen.double().cpu(), own, _label(site), others, limit_of(update.expected.get(site), own))
    if found is None or found.label is None or not found.label.name:
        return None
    of_own, of_other = found.factor or 0.0, found.more or 0.0
    other = f"{found.label.name}, stage {found.label.point.stage}"
    if not of_own:
        times = "" if of_other == 1.0 else f"{of_other:.4g} times "
        return Cause("misplaced", detail=f"it is {times}the gradient of {other}")
    return Cause("extra-term", detail=f"{of_own:.4g} of its own gradient and {of_other:.4g} of that of {other}")


def _label(site: Site) -> Label:
    return Label(Point(site[0], -1, GRADIENT), name=site[1])


def _others(site: Site, own: Tensor, update: Update, predicted: Predicted) -> Iterator[tuple[Site, Tensor]]:
    """What all other parameters of one shape should have."""
    for stage in range(update.now.stages):
        for name, parameter in update.now.parameters(stage).items():
            if parameter.shape == own.shape and (stage, name) != site:
                more = predicted((stage, name))
                if more is not None:
                    yield (stage, name), more

"""Gradients that add up two parameters' gradients, or equal another parameter's."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from pipeproof.core.cause import Cause
from pipeproof.core.observe.likeness import Label
from pipeproof.core.tolerance import error
from pipeproof.explain.atoms import Explanation, Update
from pipeproof.explain.known import Known
from pipeproof.explain.likeness import find_sum
from pipeproof.explain.solver import limit_of
from pipeproof.reference.step import Gradient, Site, Stage


def find_mixed(stages: Sequence[Explanation], update: Update) -> Mapping[Stage, tuple[Cause, ...]]:
    """By stage, a cause for each parameter with a sum of two parameters' gradients.

    Only if nothing else on the stage stays unknown: what two layers hand back to one residual stream adds up, too, so
    it may follow from the layer between them.
    """

    @cache
    def predicted() -> Mapping[Site, Gradient]:
        """Every gradient, given its stage's known faults."""
        found: dict[Site, Gradient] = {}
        for one in stages:
            for name in update.now.parameters(one.stage):
                expected = update.expected.get((one.stage, name))
                right = None if expected is None else expected.double().cpu()
                found[one.stage, name] = one.predict(name) if one.explained else right
        return found

    @cache
    def known() -> Known:
        every = ((Label.of_gradient(site), one) for site, one in predicted().items())
        return Known((label, one) for label, one in every if one is not None)

    def mixed(one: Explanation) -> Iterator[Cause]:
        wrong = (name for name in one.names if not _is_right((one.stage, name), update))
        unknown = [odd.parameter for odd in one.odd if not odd.is_known] if one.explained else [*wrong]
        found = [_partner((one.stage, name), update, predicted(), known()) for name in unknown]
        causes = {name: cause for name, cause in zip(unknown, found, strict=True) if cause is not None}
        if one.explained:
            for name, cause in causes.items():
                if cause.kind != "extra-term" or None not in found:
                    yield replace(cause, stage=one.stage, parameter=name)
        elif len(causes) == len(found) and len({cause.kind for cause in causes.values()}) == 1:
            details = [f"{name}: {cause.detail}" for name, cause in causes.items()]
            yield Cause(next(iter(causes.values())).kind, stage=one.stage, detail="; ".join(details))

    return {one.stage: tuple(mixed(one)) for one in stages}


def _is_right(site: Site, update: Update) -> bool:
    observed, expected = update.observed.get(site), update.expected.get(site)
    if observed is None or expected is None:
        return False
    return error(observed.cpu(), expected.cpu()) <= limit_of(expected, expected.double())


def _partner(site: Site, update: Update, predicted: Mapping[Site, Gradient], known: Known) -> Cause | None:
    """Find the cause if a gradient mixes its share with another parameter's."""
    observed, own, at = update.observed.get(site), predicted.get(site), Label.of_gradient(site)
    if observed is None or own is None:
        return None
    found = find_sum(observed.double().cpu(), own, at, known, limit_of(update.expected.get(site), own))
    if found is None or found.label is None or not found.label.name:
        return None
    of_own, of_other, other = found.factor or 0.0, found.more or 0.0, gradient_of(found.label)
    if not of_own:
        times = "" if of_other == 1.0 else f"{of_other:.4g} times "
        return Cause("misplaced", detail=f"it is {times}{other}")
    return Cause("extra-term", detail=f"{of_own:.4g} of its own gradient and {of_other:.4g} of {other}")


def gradient_of(label: Label) -> str:
    """Name a parameter's gradient."""
    return f"the gradient of {label.name}, stage {label.point.stage}"

"""Parameters whose gradient has some of another parameter's in it: summed or averaged with what is not its copy."""

from collections.abc import Iterator, Sequence

import torch

from validation.cause import Cause
from validation.diagnosis.combination import DECIDED, fit
from validation.diagnosis.explanation import Explanation, limit_of
from validation.diagnosis.update import Update


def mixed(stages: Sequence[Explanation], one: Explanation, update: Update) -> Iterator[Cause]:
    """A cause for each parameter of ``one`` that is a sum of what two parameters of one shape should have."""
    for odd in one.odd:
        if odd.what != "unknown":
            continue
        found = _partner(stages, one, odd.parameter, update)
        if found is not None:
            yield Cause("extra-term", stage=one.stage, parameter=odd.parameter, detail=found)


def _partner(stages: Sequence[Explanation], one: Explanation, name: str, update: Update) -> str | None:
    seen, own = update.observed.get((one.stage, name)), one.predicted(name)
    if seen is None or own is None:
        return None
    limit = limit_of(update.expected.get((one.stage, name)), own)
    for other in stages:
        for partner in update.now.parameters(other.stage):
            more = other.predicted(partner)
            if (other.stage, partner) == (one.stage, name) or more is None or more.shape != own.shape:
                continue
            made = fit(seen.double().cpu().flatten(), torch.stack([own.flatten(), more.flatten()]), limit)
            if made.residual <= limit and max(made.uncertain) <= DECIDED and own.numel() > 2:
                of_own, of_other = made.coefficients
                return f"{of_own:.4g} of its own gradient and {of_other:.4g} of that of {partner}, stage {other.stage}"
    return None

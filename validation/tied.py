"""The copies of tied parameters: how often each stage's share is in each copy's gradient."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from reference.step import Gradient, Stage
from validation.atoms import Evidence
from validation.combination import DECIDED, fit, residual_of
from validation.explanation import Explanation, limit_of

_NEAR = 1e-3


@dataclass(frozen=True)
class Shares:
    """One copy of a tied parameter: ``counts[stage]`` is how often that stage's share is in its gradient.

    ``explained``: that leaves only rounding. ``absent``: "missing" or "zero" in place of any count.
    """

    stage: Stage
    parameter: str
    counts: dict[Stage, float]
    explained: bool
    absent: str = ""

    @property
    def right(self) -> bool:
        """Whether every share is in it once."""
        return self.explained and not self.absent and all(count == 1 for count in self.counts.values())


def explain_tied(evidence: Evidence, stages: Sequence[Explanation]) -> tuple[Shares, ...]:
    """Each copy of each parameter that stages share, in terms of what the stages are known to give."""
    found = []
    for copies in evidence.tied:
        shares = {stage: stages[stage].predicted(name) for stage, name in copies.items()}
        wide = _sum([_nominal(stages[stage], name) for stage, name in copies.items()])
        for stage, name in sorted(copies.items()):
            due = evidence.expected.get((stage, name))
            if due is not None:
                limit = limit_of(due, wide)
                found.append(_copy(stage, name, evidence.observed.get((stage, name)), shares, limit))
    return tuple(found)


def _copy(stage: Stage, name: str, seen: Gradient, shares: dict[Stage, Gradient], limit: float) -> Shares:
    if seen is None or not bool(seen.any()):
        return Shares(stage, name, {}, explained=True, absent="missing" if seen is None else "zero")
    if not bool(seen.isfinite().all()):
        return Shares(stage, name, {}, explained=False)
    known = {holder: share for holder, share in shares.items() if share is not None}
    if not known:
        return Shares(stage, name, {}, explained=False)
    target, rows = seen.double().cpu().flatten(), torch.stack([share.flatten() for share in known.values()])
    made = fit(target, rows, limit)
    counts = [float(round(c)) if abs(c - round(c)) <= _NEAR else c for c in made.coefficients]
    explained = max(made.uncertain) <= DECIDED and residual_of(target, rows, counts) <= limit
    return Shares(stage, name, dict(zip(known, counts, strict=True)), explained)


def _nominal(explanation: Explanation, name: str) -> Gradient:
    return _sum([atom.gradients.get(name) for atom in explanation.atoms if atom.term.nominal])


def _sum(parts: Sequence[Gradient]) -> Gradient:
    found = [part for part in parts if part is not None]
    return torch.stack(found).sum(dim=0) if found else None

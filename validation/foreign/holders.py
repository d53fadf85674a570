"""Where a mismatch is: on a rank that holds the parameter that is wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipeproof.core.verdict import Mismatch, Verdict
from pipeproof.foreign.assemble import Assembled
from pipeproof.reference.step import Contribution, Site


def at_holders(verdict: Verdict, found: Assembled, made: Sequence[Contribution]) -> Verdict:
    """``verdict``; what is wrong with a parameter is placed on a rank that holds it.

    What is held against the model comes first: where ranks differ, the one that the others are held against may be it.
    """
    placed = [_at_holder(one, found, made) for one in verdict.mismatches]
    return replace(verdict, mismatches=tuple(sorted(placed, key=lambda one: one.beside is not None)))


def _at_holder(one: Mismatch, found: Assembled, made: Sequence[Contribution]) -> Mismatch:
    if one.stage is None:
        return one
    if one.law in ("gradient", "presence") and one.parameter is not None and one.what != "text":
        return replace(one, rank=found.holder((one.stage, one.parameter), _due((one.stage, one.parameter), made)))
    if one.law == "initial-weights" and one.parameter is not None and one.beside is None:
        wrong = found.beginner((one.stage, one.parameter))
        return one if wrong is None else replace(one, rank=wrong)
    lines = [found.made[rank].line for rank, _ in found.stages[one.stage].part.members]
    several = one.rank is not None and lines.count(found.made[one.rank].line) > 1
    return replace(one, rank=None) if one.law == "microbatches" and several and one.microbatch is None else one


def _due(site: Site, made: Sequence[Contribution]) -> Tensor | None:
    """What all microbatches give there."""
    parts = [one.gradients.get(site) for one in made]
    given = [one.cpu() for one in parts if one is not None]
    return torch.stack(given).sum(dim=0) if given else None


def with_notes(verdict: Verdict, notes: Mapping[str, str]) -> Verdict:
    """``verdict``, with ``notes`` said at their laws."""
    laws = [
        replace(law, note="; ".join(filter(None, [law.note, notes[law.name]]))) if law.name in notes else law
        for law in verdict.laws
    ]
    return replace(verdict, laws=tuple(laws))

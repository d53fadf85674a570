"""What an operation before had: stages that are given data, or a message, that was kept, or compute with weights of it.

Whether weights were old is tried: the reference takes the step with those of an operation before in some stages, and
what it gives then is what was observed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeproof.diagnosis.evidence import Evidence
from pipeproof.diagnosis.stale_call import Given
from pipeproof.judging.cause import Cause, listed
from pipeproof.judging.tolerance import FP32, error, same_bits
from pipeproof.reference.step import Gradient

_NEARER = FP32.factor  # times as near to what old weights give as to what is due: by chance nothing is


def stale(evidence: Evidence) -> list[Cause]:
    """The first stage that was given tensors of an operation before in place of its own."""
    if not evidence.stale:
        return []
    stage, operation = min((one.stage, one.operation) for one in evidence.stale)
    found = [one for one in evidence.stale if (one.stage, one.operation) == (stage, operation)]
    calls, theirs = [one.call for one in found], [one.microbatch for one in found]
    several = len(found) > 1
    detail = (
        f"call{'s' * several} {listed(calls)} {'were' if several else 'was'} given what microbatch"
        f"{'es' * several} {listed(theirs)} of operation {operation} had there"
    )
    return [Cause("stale-tensor", rank=evidence.placement[stage], stage=stage, detail=detail)]


def old_weights(evidence: Evidence) -> list[Cause]:
    """The stages that computed with the weights of an operation before."""
    found = _found(evidence)
    return [] if found is None else [found.cause(evidence)]


@dataclass(frozen=True)
class _OldWeights:
    """``stages`` that computed with weights of an ``operation`` before, from 1 on; 0: of a step of another check."""

    stages: tuple[int, ...]
    operation: int

    def cause(self, evidence: Evidence) -> Cause:
        when = f"operation {self.operation}" if self.operation else "the last checked step that was bit for bit"
        detail = f"computed with the weights that {when} began with: with these the reference gives all that was seen"
        ranks = {evidence.placement[stage] for stage in self.stages}
        several = self.stages if 1 < len(self.stages) < evidence.stages else ()
        cause = Cause("stale-tensor", detail=detail, stages=several, stage=None if several else self.stages[0])
        if len(self.stages) == evidence.stages > 1:
            return replace(cause, stage=None)
        return replace(cause, rank=ranks.pop()) if len(ranks) == 1 else cause


def _found(evidence: Evidence) -> _OldWeights | None:
    """With which old weights the reference gives all that was observed; None: with none that are known."""
    play, seen = evidence.with_weights, _Seen.of(evidence)
    if play is None or evidence.due is None or not seen.moved:
        return None
    known, number = evidence.due.weights, evidence.verdict.mismatches[0].operation
    for ago, earlier in enumerate(evidence.earlier_weights, start=1):
        for stages in _candidates(evidence.placement):
            names = {name for stage, name in evidence.gradients if stage in stages and name in earlier}
            same = {one for one in names if (now := known.get(one)) is not None and same_bits(earlier[one], now)}
            other = {name: earlier[name] for name in names - same}
            given = play(other) if other else None
            if given is not None and seen.is_nearer(given):
                return _OldWeights(stages, max(0, number - ago))
    return None


def _candidates(placement: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All stages; those of each rank; each one."""
    ranks = (tuple(s for s, rank in enumerate(placement) if rank == own) for own in sorted({*placement}))
    yield from dict.fromkeys([tuple(range(len(placement))), *ranks, *((stage,) for stage in range(len(placement)))])


@dataclass(frozen=True)
class _Seen:
    """What was observed of a step, beside what is due: losses, None being the whole step's, and gradients."""

    losses: Mapping[int | None, tuple[float, float]]
    gradients: Mapping[str, tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, evidence: Evidence) -> "_Seen":
        number = min(one.operation for one in evidence.verdict.mismatches)
        losses = [one for one in evidence.verdict.measured.of("loss") if one.operation == number]
        expected = {name: one for (_, name), one in evidence.expected.gradients.items()}
        there = evidence.gradients if evidence.operation == "train" else {}  # else they are of no sum that is due
        pairs = ((name, one, expected.get(name)) for (_, name), one in there.items())
        return cls(
            {one.microbatch: (one.found, one.due) for one in losses if one.found is not None and one.due is not None},
            {name: (one, due) for name, one, due in pairs if one is not None and due is not None},
        )

    @property
    def moved(self) -> bool:
        """Whether it may come of other weights in some stage: then no microbatch's loss is what is due."""
        same = [found == due for found, due in self.losses.values()]
        return not any(same) and (bool(same) or any(not same_bits(*pair) for pair in self.gradients.values()))

    def is_nearer(self, given: Given) -> bool:
        """Whether all of it is far nearer to what was ``given`` than to what is due."""
        losses = [(torch.tensor(pair, dtype=torch.float64), given.of(m)) for m, pair in self.losses.items()]
        numbers = all(_is_nearer(one[:1], one[1:], one.new_tensor([played])) for one, played in losses)
        return numbers and all(_is_nearer(*pair, given.gradients.get(name)) for name, pair in self.gradients.items())


def _is_nearer(seen: Tensor, due: Tensor, played: Gradient) -> bool:
    if played is None or seen.shape != played.shape:
        return False
    gap = error(seen.cpu(), played.cpu())
    return gap <= FP32.least or _NEARER * gap <= error(seen.cpu(), due.cpu())

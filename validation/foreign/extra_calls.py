"""Calls of stages beside those of microbatches: padding, and what tells shapes. The sums of gradients decide."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TypeVar

from pipeproof.core.ledger import Ledger
from pipeproof.foreign.chain import Chain
from pipeproof.foreign.own_calls import StageSeen
from pipeproof.foreign.sources import Data
from pipeproof.observers.observed import UNKNOWN_MICROBATCH

Value = TypeVar("Value")
_IDLE = "calls that add nothing: {} of stage {}"
_EXTRA = "stage {} was called {} times for {} microbatch{}: call {} was given none of these"
_ADDED = "; it had a backward, and gradients are wrong: pass all microbatches that the step runs, or let it add nothing"


@dataclass(frozen=True)
class ExtraCalls:
    """By stage, the places of its calls that are no microbatch's; ``idle``: those of them to which zeros alone flowed.

    Each microbatch has another call there.
    """

    stages: Mapping[int, StageSeen]
    microbatches: int
    places: Mapping[int, frozenset[int]]
    idle: Mapping[int, frozenset[int]]

    @classmethod
    def among(cls, stages: Mapping[int, StageSeen], data: Data) -> "ExtraCalls":
        """Those of ``stages``; ``data`` is what each microbatch brings."""
        numbers = {stage: order.numbers for stage, order in Chain(stages, data).orders.items()}
        idle = {stage: _idle(seen, numbers[stage]) for stage, seen in stages.items()}
        unknown = {k: {n for n, m in enumerate(own) if m == UNKNOWN_MICROBATCH} for k, own in numbers.items()}
        return cls(stages, len(data), {stage: idle[stage] | unknown[stage] for stage in stages}, idle)

    @property
    def without(self) -> dict[int, StageSeen]:
        """The stages without these."""
        return {stage: replace(seen, calls=tuple(self.left(stage, seen.calls))) for stage, seen in self.stages.items()}

    def left(self, stage: int, every: Sequence[Value]) -> list[Value]:
        """Of ``every`` one of the stage's calls, or of something for each, those of microbatches."""
        return list(compress(every, (k not in self.places[stage] for k in range(len(every)))))

    def enter(self, ledger: Ledger, own: Iterable[int]) -> None:
        """Say what a rank's ``own`` stages have of these, once gradients were compared in ``ledger``."""
        wrong = {one.stage for one in ledger.mismatches if one.law in ("gradient", "presence")}
        count = self.microbatches
        for stage in sorted(own):
            calls, idle = self.stages[stage].calls, self.idle[stage]
            if idle:
                ledger.remark("microbatches", _IDLE.format(len(idle), stage))
            for k in sorted(self.places[stage] - idle):
                told = _EXTRA.format(stage, len(calls), count, "es" * (count != 1), k + 1)
                ledger.remark("microbatches", told + _ADDED * (stage in wrong and calls[k].trained))


def _idle(seen: StageSeen, numbers: Sequence[int]) -> frozenset[int]:
    adding = {number for number, call in zip(numbers, seen.calls, strict=True) if not call.is_idle}
    return frozenset(k for k, call in enumerate(seen.calls) if call.is_idle and numbers[k] in adding)

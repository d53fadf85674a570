"""Calls of stages beside those of microbatches: padding, and a first one that tells shapes. Gradients decide."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TypeVar

from pipeproof.core.ledger import Ledger
from pipeproof.wings.composed.chain import Chain
from pipeproof.wings.composed.own_calls import StageSeen
from pipeproof.wings.composed.sources import Data

Value = TypeVar("Value")
_IDLE = "calls that add nothing: {} of stage {}"
_EXTRA = "stage {} was called {} times for {} microbatch{}: the first call is none of theirs"
_ADDED = "; it had a backward, and gradients are wrong: pass all microbatches that the step runs, or let it add nothing"


@dataclass(frozen=True)
class ExtraCalls:
    """By stage, the places of its calls that are no microbatch's; ``idle``: those of them to which zeros alone flowed.

    Each microbatch has another call there. A first call too many is such, whatever flowed back.
    """

    stages: Mapping[int, StageSeen]
    microbatches: int
    places: Mapping[int, frozenset[int]]
    idle: Mapping[int, frozenset[int]]

    @classmethod
    def among(cls, stages: Mapping[int, StageSeen], data: Data) -> "ExtraCalls":
        """Those of ``stages``; ``data`` is what each microbatch brings."""
        orders = Chain(stages, data).orders
        idle = {stage: _idle(seen, orders[stage].numbers) for stage, seen in stages.items()}
        every = [*range(len(data))]
        first = {k: _first(seen, orders[k].numbers, idle[k], every) for k, seen in stages.items()}
        return cls(stages, len(data), {stage: idle[stage] | first[stage] for stage in stages}, idle)

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
                told = _EXTRA.format(stage, len(calls), count, "es" * (count != 1))
                ledger.remark("microbatches", told + _ADDED * (stage in wrong and calls[k].trained))


def _idle(seen: StageSeen, numbers: Sequence[int]) -> frozenset[int]:
    adding = {number for number, call in zip(numbers, seen.calls, strict=True) if not call.is_idle}
    return frozenset(k for k, call in enumerate(seen.calls) if call.is_idle and numbers[k] in adding)


def _first(seen: StageSeen, numbers: Sequence[int], idle: frozenset[int], every: list[int]) -> frozenset[int]:
    """The place of a first call, where the others are of ``every`` microbatch and it is no repetition of one."""
    left = [k for k in range(len(numbers)) if k not in idle]
    if not left or sorted(numbers[k] for k in left[1:]) != every:
        return frozenset()
    again = {numbers[k]: seen.calls[k] for k in left[1:]}.get(numbers[left[0]])
    same = again is not None and again.output_gradients == seen.calls[left[0]].output_gradients
    return frozenset() if same else frozenset(left[:1])

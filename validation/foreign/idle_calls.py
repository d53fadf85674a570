"""Calls of stages that add nothing, as of padding, or to learn shapes."""

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


@dataclass(frozen=True)
class IdleCalls:
    """By stage, the places of calls that add nothing.

    To these zeros alone flowed back, and others are of the same microbatch; or they are of none, and no weight was to
    get a gradient.
    """

    places: Mapping[int, frozenset[int]]

    @classmethod
    def among(cls, stages: Mapping[int, StageSeen], data: Data) -> "IdleCalls":
        """Those of ``stages``; ``data`` is what each microbatch brings."""
        orders = Chain(stages, data).orders
        return cls({stage: _idle(seen, orders[stage].numbers) for stage, seen in stages.items()})

    def without(self, stages: Mapping[int, StageSeen]) -> dict[int, StageSeen]:
        """The ``stages`` without these."""
        return {stage: replace(seen, calls=tuple(self.left(stage, seen.calls))) for stage, seen in stages.items()}

    def left(self, stage: int, every: Sequence[Value]) -> list[Value]:
        """Of ``every`` one of the stage's calls, or something for each, those that are left."""
        return list(compress(every, (k not in self.places[stage] for k in range(len(every)))))

    def enter(self, ledger: Ledger, own: Iterable[int]) -> None:
        """Say how many a rank's ``own`` stages have."""
        for stage in sorted(k for k in own if self.places.get(k)):
            ledger.remark("microbatches", _IDLE.format(len(self.places[stage]), stage))


def _idle(seen: StageSeen, numbers: Sequence[int]) -> frozenset[int]:
    calls = list(zip(seen.calls, numbers, strict=True))
    adding = {number for call, number in calls if not call.is_idle}
    return frozenset(
        k
        for k, (call, number) in enumerate(calls)
        if (seen.trains and not call.trained if number == UNKNOWN_MICROBATCH else call.is_idle and number in adding)
    )

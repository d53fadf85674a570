"""Calls of stages beside those of microbatches: a first one, by which a runtime learns shapes, and padding."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TypeVar

from pipeproof.core.ledger import Ledger
from pipeproof.foreign.chain import Chain
from pipeproof.foreign.own_calls import StageSeen
from pipeproof.foreign.sources import Data
from pipeproof.observers.calls import Call
from pipeproof.observers.observed import UNKNOWN_MICROBATCH

Value = TypeVar("Value")
_IDLE = "calls that add nothing: {} of stage {}"
_TAKEN = "the first call of stage {}, one too many, was taken for a trial"
_ADDED = (
    "stage {} was called {} times for {} microbatch{}: what call 1 was given is of none of these, it had a backward, "
    "and gradients are not those of the others; pass all microbatches that the step runs, or let a trial add nothing"
)


@dataclass(frozen=True)
class Trials:
    """Those of ``stages`` of ``microbatches``, by stage; ``nobodys``: the stages whose trial is no microbatch's.

    ``idle``: the places of calls to which zeros alone flowed back, where others are of the same microbatch. A trial is
    about nothing known, or about what lay in memory that it was given, and then other gradients flow back.
    Were it more than that, the sums of gradients would show it.
    """

    stages: Mapping[int, StageSeen]
    microbatches: int
    found: Mapping[int, Call]
    nobodys: frozenset[int]
    idle: Mapping[int, frozenset[int]]

    @staticmethod
    def among(stages: Mapping[int, StageSeen], data: Data) -> "Trials":
        """Those of ``stages``; ``data`` is what each microbatch brings."""
        orders, found, nobodys = Chain(stages, data).orders, dict[int, Call](), set[int]()
        idle = {stage: _idle(seen.calls, orders[stage].numbers) for stage, seen in stages.items()}
        for stage, seen in stages.items():
            own = [
                (n, call)
                for k, (n, call) in enumerate(zip(orders[stage].numbers, seen.calls, strict=True))
                if k not in idle[stage]
            ]
            if sorted(number for number, _ in own[1:]) != list(range(len(data))):
                continue
            (first, call), *others = own
            again = dict(others).get(first)
            if again is None or _flows(again) != _flows(call):
                found[stage] = call
                nobodys |= {stage} if again is None else set()
        return Trials(stages, len(data), found, frozenset(nobodys), idle)

    @property
    def without(self) -> dict[int, StageSeen]:
        """The stages without these."""
        return {stage: replace(seen, calls=tuple(self.own(stage, seen.calls))) for stage, seen in self.stages.items()}

    def own(self, stage: int, calls: Sequence[Value]) -> list[Value]:
        """Of something for each of the stage's ``calls``, that for those of microbatches."""
        seen = self.stages[stage].calls
        those = [k not in self.idle[stage] and call is not self.found.get(stage) for k, call in enumerate(seen)]
        return list(compress(calls, those))

    def enter(self, ledger: Ledger, own: Iterable[int]) -> None:
        """Say what was taken for a trial of a rank's ``own`` stages, whose gradients were compared in ``ledger``.

        Where gradients are wrong it may be none.
        """
        count = self.microbatches
        wrong = {one.stage for one in ledger.mismatches if one.law in ("gradient", "presence")}
        for stage in sorted(k for k in own if self.idle.get(k)):
            ledger.remark("microbatches", _IDLE.format(len(self.idle[stage]), stage))
        for stage in sorted(self.found.keys() & {*own}):
            added = stage in wrong & self.nobodys and self.found[stage].trained
            told = _ADDED.format(stage, len(self.stages[stage].calls), count, "es" * (count != 1))
            ledger.remark("microbatches", told if added else _TAKEN.format(stage))


def _idle(calls: Sequence[Call], numbers: Sequence[int]) -> frozenset[int]:
    """The places of ``calls`` that add nothing, where another is about the same of the ``numbers``."""
    adding = {number for number, call in zip(numbers, calls, strict=True) if not call.is_idle}
    return frozenset(k for k, call in enumerate(calls) if call.is_idle and numbers[k] in adding - {UNKNOWN_MICROBATCH})


def _flows(call: Call) -> dict[int, bytes]:
    return {number: one.digest for number, one in call.output_gradients.items()}

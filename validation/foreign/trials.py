"""First calls of stages, too many, by which a runtime learns shapes before the step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pipeproof.foreign.chain import Chain
from pipeproof.foreign.own_calls import StageSeen
from pipeproof.foreign.sources import Data
from pipeproof.judging.ledger import Ledger
from pipeproof.observers.calls import Call
from pipeproof.observers.observed import UNKNOWN_MICROBATCH

_TAKEN = "the first call of stage {}, one too many, was taken for a trial"
_ADDED = (
    "stage {} was called {} times for {} microbatch{}: what call 1 was given is of none of these, it had a backward, "
    "and gradients are not those of the others; pass all microbatches that the step runs, or let a trial add nothing"
)


@dataclass(frozen=True)
class Trials:
    """Those of ``stages`` of ``microbatches``, by stage; ``nobodys``: the stages whose trial is no microbatch's.

    A trial is about nothing known, or about what lay in memory that it was given, and then other gradients flow back.
    Were it more than that, the sums of gradients would show it.
    """

    stages: Mapping[int, StageSeen]
    microbatches: int
    found: Mapping[int, Call]
    nobodys: frozenset[int]

    @staticmethod
    def among(stages: Mapping[int, StageSeen], data: Data) -> "Trials":
        """Those of ``stages``; ``data`` is what each microbatch brings."""
        orders, found, nobodys = Chain(stages, data).orders, dict[int, Call](), set[int]()
        for stage, seen in stages.items():
            first, *others = orders[stage].numbers or (UNKNOWN_MICROBATCH,)
            if sorted(others) != list(range(len(data))):
                continue
            own = seen.calls[1 + others.index(first)] if first in others else None
            if own is None or _flows(own) != _flows(seen.calls[0]):
                found[stage] = seen.calls[0]
                nobodys |= {stage} if own is None else set()
        return Trials(stages, len(data), found, frozenset(nobodys))

    @property
    def without(self) -> dict[int, StageSeen]:
        """The stages without their trials."""
        return {k: replace(one, calls=one.calls[1:]) if k in self.found else one for k, one in self.stages.items()}

    def enter(self, ledger: Ledger, own: Iterable[int]) -> None:
        """Say what was taken for a trial of a rank's ``own`` stages, whose gradients were compared in ``ledger``.

        Where gradients are wrong it may be none.
        """
        count = self.microbatches
        wrong = {one.stage for one in ledger.mismatches if one.law in ("gradient", "presence")}
        for stage in sorted(self.found.keys() & {*own}):
            added = stage in wrong & self.nobodys and self.found[stage].trained
            told = _ADDED.format(stage, len(self.stages[stage].calls), count, "es" * (count != 1))
            ledger.remark("microbatches", told if added else _TAKEN.format(stage))


def _flows(call: Call) -> dict[int, bytes]:
    return {number: one.digest for number, one in call.output_gradients.items()}

"""A stage's calls as the chain reads them: those that are microbatches', each with one backward."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pipeproof.core.ledger import Ledger
from pipeproof.observers.calls import Call
from pipeproof.observers.sketch import Sketch
from pipeproof.wings.composed.chain import Chain
from pipeproof.wings.composed.link import StageSeen
from pipeproof.wings.composed.sources import Data

Value = TypeVar("Value")
_IDLE = "calls that add nothing: {} of stage {}"
_EXTRA = "stage {} was called {} times for {} microbatch{}: the first call is none of theirs"
_ADDED = "; it had a backward, and gradients are wrong: pass all microbatches that the step runs, or let it add nothing"


def counting(calls: Sequence[Call], microbatches: int) -> list[Call]:
    """The calls that are about microbatches: where there are too many, those that gradients came back to."""
    trained = [call for call in calls if call.ran]
    return trained if len(trained) >= microbatches or len(calls) > microbatches else list(calls)


def with_own_loss(call: Call, *, apart: bool) -> Call:
    """``call`` of a stage with a loss of its own, if nobody saw what it handed back: as in a backward ``apart``.

    Or an input's gradient was asked for before, as for a loss that punishes it: which was handed back is not known.
    """
    several = any(len(those) > 1 for (is_output, _), those in call.parts.items() if not is_output)
    parts = {at: those for at, those in call.parts.items() if at[0]}
    return replace(call, input_gradients={}, in_parts={}, parts=parts) if apart or several else call


@dataclass(frozen=True)
class ExtraCalls:
    """By stage, the places of its calls beside those of microbatches, each of which has another call there.

    ``idle``: those to which zeros alone flowed, as to padding. ``first``: a first call too many, as one that tells
    shapes, whatever flowed back: gradients decide.
    """

    stages: Mapping[int, StageSeen]
    microbatches: int
    idle: Mapping[int, frozenset[int]]
    first: Mapping[int, frozenset[int]]

    @classmethod
    def among(cls, stages: Mapping[int, StageSeen], data: Data) -> "ExtraCalls":
        """Those of ``stages``; ``data`` is what each microbatch brings."""
        chain, idle, first = Chain(stages, data), dict[int, frozenset[int]](), dict[int, frozenset[int]]()
        for stage in stages:
            calls = chain.calls(stage)
            adding = {m for m, call in calls if not call.is_idle}
            idle[stage] = frozenset(k for k, (m, call) in enumerate(calls) if call.is_idle and m in adding)
            left = [k for k in range(len(calls)) if k not in idle[stage]]
            others = {calls[k][0]: calls[k][1].output_gradients for k in left[1:]}
            whole = len(left) == len(data) + 1 and others.keys() == {*range(len(data))}
            again = any(others.get(calls[k][0]) == calls[k][1].output_gradients for k in left[:1])
            first[stage] = frozenset(left[:1] if whole and not again else ())
        return cls(stages, len(data), idle, first)

    @property
    def without(self) -> dict[int, StageSeen]:
        """The stages without these."""
        return {stage: replace(seen, calls=tuple(self.left(stage, seen.calls))) for stage, seen in self.stages.items()}

    def left(self, stage: int, every: Sequence[Value]) -> list[Value]:
        """Of ``every`` one of the stage's calls, or of something for each, those of microbatches."""
        return [one for k, one in enumerate(every) if k not in self.idle[stage] | self.first[stage]]

    def enter(self, ledger: Ledger, own: Iterable[int]) -> None:
        """Say what a rank's ``own`` stages have of these, once gradients were compared in ``ledger``."""
        wrong = {one.stage for one in ledger.mismatches if one.law in ("gradient", "presence")}
        for stage in sorted(own):
            calls = self.stages[stage].calls
            if self.idle[stage]:
                ledger.remark("microbatches", _IDLE.format(len(self.idle[stage]), stage))
            for k in self.first[stage]:
                told = _EXTRA.format(stage, len(calls), self.microbatches, "es" * (self.microbatches != 1))
                ledger.remark("microbatches", told + _ADDED * (stage in wrong and calls[k].trained))


def together(chain: Chain, own: Mapping[int, Sequence[Call]]) -> tuple[Chain, dict[int, list[Call]]]:
    """``chain`` and this rank's ``own`` calls, in which several backwards of a stage are one.

    Consumers, outputs and terms of a loss may each have their own. The last stage comes first: what it hands on in
    parts, others get in parts.
    """
    stages, calls = dict(chain.stages), {stage: list(those) for stage, those in own.items()}
    for stage, seen in sorted(stages.items(), reverse=True):
        sent = [_sent_back(chain, stages, stage, m) for m in chain.orders[stage].numbers]
        both = [call.together(one) for call, one in zip(calls.get(stage, seen.calls), sent, strict=True)]
        stages[stage] = replace(seen, calls=tuple(replace(call, again=None) for call in both))
        calls |= {stage: both} if stage in own else {}
    return Chain(stages, chain.data), calls


def _sent_back(chain: Chain, stages: Mapping[int, StageSeen], stage: int, microbatch: int) -> dict[int, list[Sketch]]:
    """What the consumers of each output of ``stage``, or what may be some, handed back of a microbatch."""
    found: dict[int, list[Sketch]] = {}
    for (of, number), inputs in chain.consumers.items():
        for consumer, at in sorted(inputs) if of == stage else ():
            pairs = zip(chain.orders[consumer].numbers, stages[consumer].calls, strict=True)
            for call in (call for m, call in pairs if m == microbatch and at in call.input_gradients):
                found.setdefault(number, []).extend([call.input_gradients[at], *call.in_parts.get(at, ())])
    return found

"""Consumers, outputs and terms of a loss may each have a backward of their own: together these are one of a stage."""

from collections.abc import Mapping
from dataclasses import replace

from pipeproof.observers.calls import Call
from pipeproof.observers.sketch import Sketch
from pipeproof.wings.composed.chain import Chain
from pipeproof.wings.composed.own_calls import StageSeen

Stages = dict[int, StageSeen]
Calls = dict[int, list[Call]]


def together(chain: Chain, stages: Mapping[int, StageSeen], own: Mapping[int, list[Call]]) -> tuple[Stages, Calls]:
    """``stages`` and this rank's ``own`` calls, in which what several consumers brought is one backward.

    ``chain``: of these stages, as they are. The last stage comes first: what it hands on in parts, others get in parts.
    """
    found, calls = dict(stages), dict(own)
    several = {stage for (stage, _), inputs in chain.consumers.items() if stage is not None and len(inputs) > 1}
    several |= {stage for stage, seen in chain.stages.items() if any(one.apart or one.varied for one in seen.calls)}
    several |= {stage for stage, _ in chain.sources.untold}
    several |= {stage for stage, seen in chain.stages.items() if seen.outside is not None and stage != chain.last}
    for stage in sorted(several, reverse=True):
        sent = [_sent_back(chain, found, stage, m) for m in chain.orders[stage].numbers]
        both = [call.together(one) for call, one in zip(own.get(stage, found[stage].calls), sent, strict=True)]
        found[stage] = replace(found[stage], calls=tuple(replace(call, again=None) for call in both))
        calls |= {stage: both} if stage in own else {}
    return found, calls


def _sent_back(chain: Chain, stages: Mapping[int, StageSeen], stage: int, microbatch: int) -> dict[int, list[Sketch]]:
    """What the consumers of each output of ``stage``, or what may be some, handed back of a microbatch."""
    found: dict[int, list[Sketch]] = {}
    perhaps = chain.sources.unsure.items()
    for of, number in {source for source in (*chain.consumers, *chain.sources.untold) if source[0] == stage}:
        inputs = {*chain.consumers.get((of, number), ()), *(at for at, those in perhaps if (of, number) in those)}
        for consumer, at in sorted(inputs):
            pairs = zip(stages[consumer].calls, chain.orders[consumer].numbers, strict=True)
            for call in (call for call, m in pairs if m == microbatch and at in call.input_gradients):
                found.setdefault(number, []).extend([call.input_gradients[at], *call.in_parts.get(at, ())])
    return found

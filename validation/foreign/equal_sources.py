"""Which of several equal outputs an input was: its content does not tell that, and what flowed back to each may."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product

from pipeproof.foreign.own_calls import StageSeen
from pipeproof.observers.sketch import Sketch

Input = tuple[int, int]  # a stage, and the number of the tensor there
Output = tuple[int, int]
_MOST = 256  # ways that are tried


@dataclass(frozen=True)
class Wired:
    """Where inputs come from; ``unsure`` are those of which only what flowed back tells it, with what they may be.

    If gradients went to the wrong stages, that is so as well.
    """

    sources: dict[Input, tuple[int | None, int]]
    unsure: Mapping[Input, Sequence[Output]]


def by_what_flowed(
    stages: Mapping[int, StageSeen],
    found: Mapping[Input, tuple[int | None, int]],
    among: Mapping[Input, Sequence[Output]],
) -> Wired:
    """The way of ``found``, or where by that one a sum of what flowed back does not hold, one by which all do.

    ``among``: the equal outputs that an input may be, what was found first. Where no way fits, or too many are to be
    tried, it is what was found.
    """
    concerned = {output for those in among.values() for output in those}

    def holds(chosen: Sequence[Output]) -> bool:
        wired = {**found, **dict(zip(among, chosen, strict=True))}
        every = ((one, [at for at, source in wired.items() if source == one]) for one in concerned)
        return all(_holds(stages, *one) for one in every)

    ways = list(product(*among.values())) if math.prod(map(len, among.values())) <= _MOST else []
    if not ways or holds(ways[0]) or not (holding := [way for way in ways[1:] if holds(way)]):
        return Wired(dict(found), {})
    told = [at for k, at in enumerate(among) if len({way[k] for way in holding}) == 1 and holding[0][k] != ways[0][k]]
    return Wired({**found, **dict(zip(among, holding[0], strict=True))}, {at: among[at] for at in told})


def _holds(stages: Mapping[int, StageSeen], output: Output, inputs: Sequence[Input]) -> bool:
    """Whether what flowed to an ``output`` is, call by call, what came of these ``inputs``; of none, nothing tells."""
    stage, number = output
    handed: dict[bytes, list[Sketch]] = {}
    for consumer, at in inputs:
        for call in stages[consumer].calls:
            if at in call.input_gradients:
                those = call.in_parts.get(at) or [call.input_gradients[at]]
                handed.setdefault(call.inputs[at].digest, []).extend(those)
    giving = [call for call in stages[stage].calls if number in call.giving]
    pairs = [(handed.get(call.outputs[number].digest, []), call) for call in giving]
    return bool(inputs) and all(_are_one(call.received(number, sent), sent) for sent, call in pairs)


def _are_one(came: Sequence[Sketch], sent: Sequence[Sketch]) -> bool:
    """Whether both add up to the same, and are anything."""
    if not came or not sent or len({(one.shape, one.dtype) for one in (*came, *sent)}) > 1:
        return False
    return reduce(Sketch.plus, came).is_like(reduce(Sketch.plus, sent))

"""Which of several equal outputs an input was: its content does not tell that, and what flowed back to each may."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from itertools import combinations, product

from pipeproof.foreign.own_calls import StageSeen
from pipeproof.observers.sketch import Sketch

Input = tuple[int, int]  # a stage, and the number of the tensor there
Output = tuple[int, int]
_MOST = 4096  # ways that are tried


@dataclass(frozen=True)
class Wired:
    """Where inputs come from; ``unsure`` are those of which at most what flowed back tells it, with what they may be.

    If gradients went to the wrong stages, that is so as well. ``untold``: outputs of which nobody knows to what they
    went, so that it is not known what should have flowed back to them.
    """

    sources: dict[Input, tuple[int | None, int]]
    unsure: Mapping[Input, Sequence[Output]] = field(default_factory=dict)
    untold: Collection[Output] = frozenset()


def by_what_flowed(
    stages: Mapping[int, StageSeen],
    found: Mapping[Input, tuple[int | None, int]],
    among: Mapping[Input, Sequence[Output]],
) -> Wired:
    """The likely way: no stage gets an output more often than it was put out, each goes somewhere, and one stage's go
    in their order. Of several, one by which every sum of what flowed back holds; that is sure only if it holds by all.

    ``among``: the equal outputs that an input may be, what was ``found`` first.
    """
    if _count(among) <= _MOST:
        return _tried(stages, found, among)
    one_each = {at: [one for one in those if one[0] != found[at][0] or one == found[at]] for at, those in among.items()}
    in_order = {at: those for at, those in one_each.items() if len(those) > 1}
    concerned = {output for those in among.values() for output in those}
    several = any(count > 1 for one, count in Counter(found.values()).items() if one in concerned)
    other = one_each != among and not _holds_all(stages, found, concerned)  # another order of one stage's may fit
    if several or other:
        return Wired(dict(found), among, concerned)
    wired = _tried(stages, found, in_order) if _count(in_order) <= _MOST else Wired(dict(found))
    return wired if _holds_all(stages, wired.sources, concerned) else Wired(dict(found), among, concerned)


def _holds_all(
    stages: Mapping[int, StageSeen],
    found: Mapping[Input, tuple[int | None, int]],
    concerned: Collection[Output],
) -> bool:
    every = ((one, [at for at, source in found.items() if source == one]) for one in concerned)
    return all(_holds(stages, *one) for one in every)


def _tried(
    stages: Mapping[int, StageSeen],
    found: Mapping[Input, tuple[int | None, int]],
    among: Mapping[Input, Sequence[Output]],
) -> Wired:
    concerned = {output for those in among.values() for output in those}
    known = [source for at, source in found.items() if at not in among]
    fixed = {one: tuple(at for at, source in found.items() if at not in among and source == one) for one in concerned}
    copies = {one: _copies(stages, one) for one in concerned}
    adds_up = cache(partial(_holds, stages))

    def holds(chosen: Sequence[Output], *, all_used: bool = True) -> bool:
        more = [(one, tuple(at for at, its in zip(among, chosen, strict=True) if its == one)) for one in concerned]
        return all(adds_up(one, (*fixed[one], *inputs), used=all_used) for one, inputs in more)

    def is_likely(chosen: Sequence[Output]) -> bool:
        given = Counter((consumer, output) for (consumer, _), output in zip(among, chosen, strict=True))
        often = all(count <= copies[output] for (_, output), count in given.items())
        return often and concerned <= {*chosen, *known} and _in_order({*zip(among, chosen, strict=True)})

    ways = list(product(*among.values()))
    likely = list(filter(is_likely, ways)) or ways
    holding = list(filter(holds, likely))
    wired = {**found, **dict(zip(among, (holding or likely)[0], strict=True))}
    if holding == likely:
        return Wired(wired)
    if not holding and (holding := [way for way in ways if holds(way, all_used=False)]):
        wired |= dict(zip(among, holding[0], strict=True))
    told = {at for k, at in enumerate(among) if len({way[k] for way in (*likely, *holding)}) > 1}
    return Wired(wired, {at: those for at, those in among.items() if at in told})


def _count(among: Mapping[Input, Sequence[Output]]) -> int:
    """How many ways there are."""
    return math.prod(map(len, among.values()))


def _copies(stages: Mapping[int, StageSeen], output: Output) -> int:
    """How often a stage puts out the very tensor that an ``output`` is."""
    stage, number = output
    return 1 + max((sum(one == number for one in call.repeated.values()) for call in stages[stage].calls), default=0)


def _in_order(chosen: Collection[tuple[Input, Output]]) -> bool:
    """Whether of each stage's outputs, a later input is no earlier one."""
    outputs = [output for _, output in sorted(chosen)]
    return all(one[1] <= other[1] for one, other in combinations(outputs, 2) if one[0] == other[0])


def _holds(stages: Mapping[int, StageSeen], output: Output, inputs: Sequence[Input], *, used: bool = True) -> bool:
    """Whether what flowed to an ``output`` is, call by call, what came of these ``inputs``.

    Of none, nothing tells, if it is ``used``; if it need not be, nothing may have flowed there.
    """
    stage, number = output
    handed: dict[bytes, list[Sketch]] = {}
    for consumer, at in inputs:
        for call in stages[consumer].calls:
            if at in call.input_gradients:
                those = call.in_parts.get(at) or [call.input_gradients[at]]
                handed.setdefault(call.inputs[at].digest, []).extend(those)
    giving = [call for call in stages[stage].calls if number in call.giving]
    pairs = [(handed.get(call.outputs[number].digest, []), call) for call in giving]
    return (bool(inputs) or not used) and all(_are_one(call.received(number, sent), sent) for sent, call in pairs)


def _are_one(came: Sequence[Sketch], sent: Sequence[Sketch]) -> bool:
    """Whether both add up to the same, but for rounding of the parts, or are nothing: parts may cancel."""
    if not came or not sent:
        return not any(one.norm for one in (*came, *sent))
    if len({(one.shape, one.dtype) for one in (*came, *sent)}) > 1:
        return False
    size = sum(one.norm for one in came)
    return reduce(Sketch.plus, came).gap(reduce(Sketch.plus, sent)) <= came[0].limit * size

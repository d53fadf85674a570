"""What passed the boundaries of watched stages, call by call, and whether it is the reference's."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.action import Action, Kind
from validation.diagnosis.address import What
from validation.observed import UNTOLD, Crossing
from validation.recording import GIVEN, MADE
from validation.whitebox.changed import changed, nearest, rounded
from validation.whitebox.places import Both
from validation.whitebox.sketch import Sketch
from validation.whitebox.watching import Call
from validation.whitebox.whose import Column, Order, columns, orders, without_trial


@dataclass(frozen=True)
class Passed:
    """A stage's actions in the order in which they ran, its module's calls, and what crossed its boundary.

    ``begins`` and ``ends`` are the places in the reference where its inputs and its outputs pass, by their numbers.
    ``lost`` are the microbatches that no call was known to be about; ``complete``: there is one call for each of them.
    """

    actions: tuple[Action, ...]
    called: tuple[tuple[Action, bool], ...]
    crossings: tuple[Crossing, ...]
    begins: Mapping[int, str] = field(default_factory=dict)
    ends: Mapping[int, str] = field(default_factory=dict)
    lost: tuple[int, ...] = ()
    complete: bool = True

    @property
    def untold(self) -> bool:
        """Whether there is a call of which nothing tells the microbatch."""
        return any(action.microbatch == UNTOLD for action in self.actions)


def passed(watched: Mapping[int, Sequence[Call]], microbatches: int, places: Both) -> dict[int, Passed]:
    """What the calls of every stage were; ``places`` are those of tensors and of gradients.

    The places where a stage ends stand for those of the next one's inputs that are like nothing in the reference.
    """
    stages: dict[int, tuple[Sequence[Call], Sequence[Column]]] = {}
    for stage, calls in sorted(watched.items()):
        own = without_trial(calls, microbatches, places)
        _, before = stages.get(stage - 1, ((), ()))
        stages[stage] = own, list(columns(own, places, _at(MADE, before)))
    found = orders(stages, microbatches)
    return {stage: _passed(stage, *seen, found[stage]) for stage, seen in stages.items()}


def _passed(stage: int, calls: Sequence[Call], seen: Sequence[Column], order: Order) -> Passed:
    backs = sorted((end, order.numbers[k]) for k, call in enumerate(calls) for end in call.backwards)
    forwards = [Action(stage, Kind.FORWARD, microbatch) for microbatch in order.numbers]
    backwards = [Action(stage, Kind.BACKWARD, microbatch) for _, microbatch in backs]
    called = tuple((action, call.training) for action, call in zip(forwards, calls, strict=True))
    crossings = tuple(one for column in seen for k in range(len(calls)) for one in _crossing(stage, column, k, order))
    actions = (*forwards, *backwards)
    return Passed(actions, called, crossings, _at(GIVEN, seen), _at(MADE, seen), order.left, order.complete)


def _at(where: str, seen: Sequence[Column]) -> dict[int, str]:
    return {column.number: column.place for column in seen if column.where == where}


def _crossing(stage: int, column: Column, call: int, order: Order) -> Iterator[Crossing]:
    seen, microbatch = column.seen[call], order.numbers[call]
    expected = column.known.get(microbatch)
    action = Action(stage, column.kind, microbatch)
    if seen is not None and microbatch == UNTOLD:
        what = _nobodys(seen)
        yield Crossing(action, column.what, False, False, what, column.where, column.judged, call + 1)
    if seen is None or expected is None:
        return
    # Half of the digits is more than a narrower type has, but what went through one shows it in every element.
    same, exact = seen.is_like(expected) and not rounded(seen, expected), seen.digest == expected.digest
    if column.kind is Kind.BACKWARD and not column.judged:
        same = same or seen.factor(expected) is not None  # by which a runtime may divide later
    really = None if same else _really(column, call, microbatch, order.inferred.get(call, ""))
    yield Crossing(action, column.what, same, exact, really, column.where, column.judged, call + 1)


def _really(column: Column, call: int, microbatch: int, inferred: str) -> What:
    """What a tensor is that is not the expected one."""
    seen, expected = column.seen[call], column.known[microbatch]
    assert seen is not None, "asked for what was seen only"
    told = f" ({microbatch} {inferred})" if inferred else ""
    owners, made = sorted(column.owners(call)), _empty(seen, told) or changed(seen, expected)
    if owners and not rounded(seen, expected):
        return What("other", f"microbatch {owners[0]}'s")
    if seen.shape != expected.shape:
        other = f"shape {list(seen.shape)} in place of {list(expected.shape)}"
        return What("shape", other)
    if made is not None:
        return made
    elsewhere = next(column.places.find(seen), None)
    if elsewhere is not None:
        return What("other", f"microbatch {elsewhere[1]}'s {elsewhere[0]}")
    distance = f"relative error about {seen.distance(expected):.1g}"
    if nearest(seen, column.known) == microbatch:
        return What("noisy", f"its own with something added: {distance}")
    return What("different", f"no microbatch's{told}: {distance}")


def _nobodys(seen: Sketch) -> What:
    """What a tensor is of which nothing tells the microbatch."""
    return _empty(seen) or What("different", "like nothing the reference made, so its microbatch is not known")


def _empty(seen: Sketch, told: str = "") -> What | None:
    """What has nothing in it of any microbatch; ``told`` is what tells its own all the same."""
    if not math.isfinite(seen.norm):
        return What("not-finite", f"not finite{told}")
    return None if seen.norm else What("zero", f"zero{told}")

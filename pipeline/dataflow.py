"""Which action needs which: the edges between stages, and a walk that respects them."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipeline.action import GIVES_INPUT_GRADIENT, Action, Kind
from pipeline.schedule import ScheduleError


class Product(NamedTuple):
    """What an action leaves for a neighbouring stage: ``stage``'s output (F) or input gradient (I), per microbatch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        what = "output" if self.kind is Kind.FORWARD else "input gradient"
        return f"stage {self.stage}'s {what} of microbatch {self.microbatch}"


def product_of(action: Action) -> Product | None:
    """What ``action`` makes that another stage may need; None for a weight-gradient backward and for messages."""
    if action.kind is Kind.FORWARD:
        return Product(action.stage, Kind.FORWARD, action.microbatch)
    if action.kind in GIVES_INPUT_GRADIENT:
        return Product(action.stage, Kind.BACKWARD_INPUT, action.microbatch)
    return None


def need_of(action: Action, n_stages: int) -> Product | None:
    """What ``action`` needs from a neighbouring stage; None where the stage can start by itself.

    A forward needs the previous stage's output. A backward (full, or with respect to the input) needs the next
    stage's input gradient; on the last stage it starts from the stage's own loss.
    """
    stage, kind, microbatch = action
    if kind is Kind.FORWARD:
        return Product(stage - 1, Kind.FORWARD, microbatch) if stage > 0 else None
    if kind in GIVES_INPUT_GRADIENT and stage < n_stages - 1:
        return Product(stage + 1, Kind.BACKWARD_INPUT, microbatch)
    return None


class Stuck(ScheduleError):
    """No rank can go on: ``waits`` holds, per stuck rank, its next action and what that action needs."""

    def __init__(self, waits: Sequence[tuple[int, Action, Product]]) -> None:
        lines = (f"rank {rank} waits at {action} for {need}" for rank, action, need in waits)
        super().__init__("no rank can go on: " + "; ".join(lines))
        self.waits = tuple(waits)


def walk(ranks: Sequence[Sequence[Action]], n_stages: int) -> Iterator[tuple[int, int]]:
    """Every (rank, slot), each after whatever it needs; raises ``Stuck`` where the ranks' orders contradict.

    Each rank runs until it needs something that is not there and is woken by whoever makes it, so the cost is linear
    in the number of actions.
    """
    made: set[Product] = set()
    sleepers: dict[Product, list[int]] = defaultdict(list)
    slots = [0] * len(ranks)
    awake = list(range(len(ranks)))[::-1]
    while awake:
        rank = awake.pop()
        actions = ranks[rank]
        while slots[rank] < len(actions):
            action = actions[slots[rank]]
            need = need_of(action, n_stages)
            if need is not None and need not in made:
                sleepers[need].append(rank)
                break
            yield rank, slots[rank]
            slots[rank] += 1
            product = product_of(action)
            if product is not None:
                made.add(product)
                awake.extend(sleepers.pop(product, ()))
    if sleepers:
        waits = [(rank, ranks[rank][slots[rank]], need) for need, stuck in sleepers.items() for rank in stuck]
        raise Stuck(sorted(waits))

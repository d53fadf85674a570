"""Collectives that ranks do not call alike, or whose tensors are used too early; and keys of the store."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.own.faults import Plant
from pipeproof.pipeline.step import Parts
from pipeproof.pipeline.transports import Transport
from pipeproof.wings.specimens.families.by_hand import (
    beside,
    control,
    gradients_on,
    hung,
    raced,
    row,
    scale_gradients,
    where_simulated,
)
from pipeproof.wings.specimens.planting import (
    Call,
    Changes,
    both,
    first,
    gradients_of,
    on_stages,
    on_work,
    second,
)
from pipeproof.wings.specimens.specimen import Entry, Fault, Specimen

_GLOO = Transport.UNLIMITED


def _is_last(parts: Parts) -> bool:
    return parts.transport.rank == parts.transport.n_ranks - 1


def _reduced_by_one(parts: Parts) -> None:
    """Where the losses are they are added up; the others go on."""
    if _is_last(parts):
        dist.all_reduce(torch.ones(1))
    dist.barrier()


def _barrier_of_some(parts: Parts) -> None:
    """Who has nothing to write does not wait for who has."""
    if _is_last(parts):
        dist.barrier()


def _reduced(parts: Parts, *, own: bool) -> None:
    """A number for each loss: of a rank's ``own``, and it has none or several, or of all."""
    losses = sum(len(stage.losses) for stage in parts.stages) if own else parts.program.schedule.microbatches
    dist.all_reduce(torch.zeros(1 + losses))


def _logged(parts: Parts, *, own: bool) -> None:
    """Sums and maxima of what is logged, each rank in an order of its ``own``, or all in one."""
    operations = [dist.ReduceOp.SUM, dist.ReduceOp.MAX]
    for operation in reversed(operations) if own and parts.transport.rank else operations:
        dist.all_reduce(torch.ones(1), op=operation)


def _told(parts: Parts, *, own: bool) -> None:
    """All ranks are told the loss, each by itself, or by the last one."""
    dist.broadcast(torch.ones(1), src=parts.transport.rank if own else parts.transport.n_ranks - 1)


def _in_a_group(parts: Parts, *, own: bool) -> None:
    """The pipeline's group; or one rank takes that, and the other the default one, which has the same ranks."""
    pipeline = dist.new_group([*range(parts.transport.n_ranks)])
    dist.all_reduce(torch.ones(1), group=None if own and parts.transport.rank else pipeline)


def _group_made(parts: Parts, *, by_all: bool) -> None:
    """A group is made by who is in it, or by the others, too; then there is another group, of all."""
    if by_all or _is_last(parts):
        dist.new_group([parts.transport.n_ranks - 1])
    _in_a_group(parts, own=False)


def _received(parts: Parts, *, waits_first: bool) -> None:
    """Ranks add what the first one has with what the second receives, which is there, or not."""
    rank, found = parts.transport.rank, torch.ones(1)
    post: Any = dist.isend if rank == 0 else dist.irecv
    work = post(found, 1 - rank, tag=10**6)
    if waits_first:
        work.wait()
    added = found.clone() if rank == 0 else found
    dist.all_reduce(added)
    work.wait()


def _let_go(parts: Parts) -> None:
    """Who prints the sum waits for it; the others do not."""
    work = dist.all_reduce(torch.ones(1), async_op=True)
    if parts.transport.rank == 0 and work is not None:
        work.wait()


def _told_factor(parts: Parts, *, early: bool) -> None:
    """The first rank tells a factor, which the second uses once it is there, or at once."""
    factor = torch.ones(1)
    work = dist.broadcast(factor, 0, async_op=True)
    assert work is not None, "its rank is in the group"
    if early and parts.transport.rank == 1:
        scale_gradients(parts, factor.item())
    work.wait()
    if not early:
        scale_gradients(parts, factor.item())


def _norm(*, waits: bool) -> Plant:
    """The squares are added up over all ranks, on the first one for the log."""

    def squares(found: list[float], parts: Parts) -> list[float]:
        total = torch.tensor([sum(found)], dtype=torch.float64)
        work = dist.all_reduce(total, async_op=True)
        assert work is not None, "its rank is in the group"
        if waits or parts.transport.rank > 0:
            work.wait()
        assert total.item() >= 0, "squares add up to no less"
        work.wait()
        return found

    return where_simulated(on_work(squares=squares))


class _Replicas:
    """The replicas of a stage, of which there is one: what they reduce is what it was. Works are waited for late."""

    def __init__(self, parts: Parts) -> None:
        groups = [dist.new_group([rank]) for rank in range(parts.transport.n_ranks)]
        self.group, self.rank, self.works = groups[parts.transport.rank], parts.transport.rank, list[Any]()

    def reduce(self, gradients: list[Tensor]) -> None:
        """Start to."""
        self.works += [dist.all_reduce(gradient, group=self.group, async_op=True) for gradient in gradients]

    def wait(self) -> None:
        """All that has been started is done."""
        while self.works:
            self.works.pop(0).wait()


def _behind_backward(microbatch: int) -> Plant:
    """The first stage's gradients are reduced behind this microbatch's backward: of two, GPipe has 0's last."""

    def plant(parts: Parts) -> Parts:
        replicas = _Replicas(parts)

        @contextmanager
        def adding(call: Call) -> Iterator[None]:
            yield
            if call.microbatch == microbatch:
                replicas.reduce(gradients_of(call.stage.module))

        def reduce(parts: Parts) -> None:
            replicas.wait()
            parts.gradients.reduce_tied()

        return both(on_stages(Changes(adding=adding), first), on_work(reduce=reduce))(parts)

    return where_simulated(plant)


def _before_stepping(*, waits: bool) -> Plant:
    """Clipped gradients of the second rank are reduced once more, and the optimizer goes on."""

    def plant(parts: Parts) -> Parts:
        replicas = _Replicas(parts)

        def scale(factor: float, parts: Parts) -> None:
            parts.gradients.scale(factor)
            if replicas.rank == 1:
                replicas.reduce(gradients_on(parts))
            if waits:
                replicas.wait()

        return on_work(scale=scale)(parts)

    return where_simulated(plant)


def _by_key(factor: Callable[..., float], **way: Any) -> Plant:
    """Gradients are multiplied by what the store has: of a rank in a step, 1 where that is right."""

    def plant(parts: Parts) -> Parts:
        steps = iter(range(1, 100))

        def multiplied(parts: Parts) -> None:
            group = dist.group.WORLD
            assert group is not None, "there is a default group"
            scale_gradients(parts, factor(group.get_group_store(), parts.transport.rank, next(steps), **way))

        return beside(multiplied)(parts)

    return plant


def _scale(store: Any, rank: int, step: int, *, waits: bool) -> float:
    """A key is waited for; or it is asked for once, and a default taken where it is not there."""
    if rank == 0:
        store.set("loss scale", "1")
        return 1.0
    return float(store.get("loss scale")) if waits or store.check(["loss scale"]) else 2.0


def _count(store: Any, rank: int, step: int, *, early: bool) -> float:
    """Ranks count themselves in the store; the first one takes the count, perhaps before all have."""
    store.add("ranks", 1)
    if not early:
        dist.barrier()
    return store.add("ranks", 0) / 2 if rank == 0 else 1.0


def _step(store: Any, rank: int, step: int, *, key: str) -> float:
    """A key that has one name in all steps: who is early finds what was there before. Or it has the step in it."""
    if rank == 0:
        store.set(key.format(step), str(step))
        return 1.0
    return float(store.get(key.format(step))) / step


_ALIKE = Fault("desynchronised", "desynchronised")
_EARLY = raced("read-before-wait", second)
_SCALED = Fault("scale", "gradient", stage=second)
_ADDED = raced("overwritten-in-flight", first)
_HALVED = Fault("scale", "gradient", stage=first, factor=lambda case: 0.5)
_TWICE = ("train", "train")

SPECIMENS: Mapping[str, Specimen] = {
    "reduced-on-one-rank": row(_ALIKE, beside(_reduced_by_one)),
    "barrier-of-some": row(hung(), beside(_barrier_of_some)),
    "reduced-in-own-sizes": row(_ALIKE, beside(_reduced, own=True)),
    "reduced-in-own-order": row(_ALIKE, beside(_logged, own=True)),
    "broadcast-from-itself": row(_ALIKE, beside(_told, own=True)),
    "reduced-in-another-group": row(hung(), beside(_in_a_group, own=True)),
    "group-made-by-members": row(hung(), beside(_group_made, by_all=False)),
    "reduced-before-received": row(_EARLY, beside(_received, waits_first=False)),
    "reduction-let-go": row(raced("never-waited", second), beside(_let_go)),
    "broadcast-used-early": row(_EARLY, beside(_told_factor, early=True)),
    "norm-read-before-reduced": row(raced("read-before-wait", first), _norm(waits=False)),
    "added-while-reduced": row(_ADDED, _behind_backward(1), schedule="gpipe", microbatches=2),
    "stepped-while-reduced": row(_EARLY, _before_stepping(waits=False)),
    "key-asked-for-once": row(_SCALED, _by_key(_scale, waits=False), _GLOO),
    "counter-read-early": row(_HALVED, _by_key(_count, early=True), _GLOO),
    "key-of-the-step-before": row(_SCALED, _by_key(_step, key="step"), _GLOO, plan=_TWICE),
}
CONTROLS: Mapping[str, Entry] = {
    "reduced-in-the-same-sizes": control(beside(_reduced, own=False)),
    "reduced-in-one-order": control(beside(_logged, own=False)),
    "broadcast-from-the-last": control(beside(_told, own=False)),
    "reduced-in-one-group": control(beside(_in_a_group, own=False)),
    "group-made-by-all": control(beside(_group_made, by_all=True)),
    "reduced-once-received": control(beside(_received, waits_first=True)),
    "broadcast-used-in-time": control(beside(_told_factor, early=False)),
    "norm-read-once-reduced": control(_norm(waits=True)),
    "added-before-reduced": control(_behind_backward(0), schedule="gpipe", microbatches=2),
    "stepped-once-reduced": control(_before_stepping(waits=True)),
    "key-waited-for": control(_by_key(_scale, waits=True), _GLOO),
    "counter-read-behind-a-barrier": control(_by_key(_count, early=False), _GLOO),
    "key-of-this-step": control(_by_key(_step, key="step {}"), _GLOO, plan=_TWICE),
}

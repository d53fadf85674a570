"""Collectives that differ between ranks, or whose tensors are used too early; and keys of the store."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.own.faults import Plant
from pipeproof.pipeline.step import Parts
from pipeproof.wings.specimens.families.by_hand import (
    gradients_on,
    plant_beside,
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
)
from pipeproof.wings.specimens.specimen import Entry


def _is_last(parts: Parts) -> bool:
    return parts.transport.rank == parts.transport.n_ranks - 1


def _reduce_by_one(parts: Parts) -> None:
    """Reduce losses on the ranks that have them; others go on."""
    if _is_last(parts):
        dist.all_reduce(torch.ones(1))
    dist.barrier()


def _barrier_of_some(parts: Parts) -> None:
    """Skip the barrier on ranks with nothing to write."""
    if _is_last(parts):
        dist.barrier()


def _reduce(parts: Parts, *, own: bool) -> None:
    """Reduce a number for each loss: for a rank's ``own`` losses, none or several, or for all."""
    losses = sum(len(stage.losses) for stage in parts.stages) if own else parts.program.schedule.microbatches
    dist.all_reduce(torch.zeros(1 + losses))


def _log(parts: Parts, *, own: bool) -> None:
    """Reduce logged sums and maxima, each rank in its ``own`` order, or all in one."""
    operations = [dist.ReduceOp.SUM, dist.ReduceOp.MAX]
    for operation in reversed(operations) if own and parts.transport.rank else operations:
        dist.all_reduce(torch.ones(1), op=operation)


def _broadcast_loss(parts: Parts, *, own: bool) -> None:
    """Broadcast the loss, each rank from itself, or all from the last one."""
    dist.broadcast(torch.ones(1), src=parts.transport.rank if own else parts.transport.n_ranks - 1)


def _in_a_group(parts: Parts, *, own: bool) -> None:
    """Use the pipeline's group; or on one rank this, on the other the default group, with the same ranks."""
    pipeline = dist.new_group([*range(parts.transport.n_ranks)])
    dist.all_reduce(torch.ones(1), group=None if own and parts.transport.rank else pipeline)


def _group_made(parts: Parts, *, by_all: bool) -> None:
    """Create a group on its members only, or on all ranks; then create another group of all."""
    if by_all or _is_last(parts):
        dist.new_group([parts.transport.n_ranks - 1])
    _in_a_group(parts, own=False)


def _receive(parts: Parts, *, waits_first: bool) -> None:
    """Add the first rank's tensor to the second's received one, before or after its arrival."""
    rank, found = parts.transport.rank, torch.ones(1)
    post: Any = dist.isend if rank == 0 else dist.irecv
    work = post(found, 1 - rank, tag=10**6)
    if waits_first:
        work.wait()
    added = found.clone() if rank == 0 else found
    dist.all_reduce(added)
    work.wait()


def _let_go(parts: Parts) -> None:
    """Wait for the sum only on the rank that prints it."""
    work = dist.all_reduce(torch.ones(1), async_op=True)
    if parts.transport.rank == 0 and work is not None:
        work.wait()


def _broadcast_factor(parts: Parts, *, early: bool) -> None:
    """Send a factor from the first rank; the second uses it after arrival, or at once."""
    factor = torch.ones(1)
    work = dist.broadcast(factor, 0, async_op=True)
    assert work is not None, "its rank is in the group"
    if early and parts.transport.rank == 1:
        scale_gradients(parts, factor.item())
    work.wait()
    if not early:
        scale_gradients(parts, factor.item())


def _norm(*, waits: bool) -> Plant:
    """Sum the squares over all ranks, on the first one for the log."""

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
    """Replicas of a stage, a single one: reduction changes nothing. Waits come late."""

    def __init__(self, parts: Parts) -> None:
        groups = [dist.new_group([rank]) for rank in range(parts.transport.n_ranks)]
        self.group, self.rank, self.works = groups[parts.transport.rank], parts.transport.rank, list[Any]()

    def reduce(self, gradients: list[Tensor]) -> None:
        """Start to."""
        self.works += [dist.all_reduce(gradient, group=self.group, async_op=True) for gradient in gradients]

    def wait(self) -> None:
        """Finish everything started."""
        while self.works:
            self.works.pop(0).wait()


def _behind_backward(microbatch: int) -> Plant:
    """Reduce the first stage's gradients after this microbatch's backward; with two, GPipe has 0's last."""

    def plant(parts: Parts) -> Parts:
        replicas = _Replicas(parts)

        @contextmanager
        def adding(call: Call) -> Iterator[None]:
            yield
            if call.microbatch == microbatch:
                replicas.reduce(gradients_of(call.stage.module))

        work = on_work(before=lambda parts: replicas.wait())
        return both(on_stages(Changes(adding=adding), first), work)(parts)

    return where_simulated(plant)


def _before_stepping(*, waits: bool) -> Plant:
    """Reduce the second rank's clipped gradients once more, while the optimizer goes on."""

    def plant(parts: Parts) -> Parts:
        replicas = _Replicas(parts)

        def reduce(parts: Parts) -> None:
            if replicas.rank == 1:
                replicas.reduce(gradients_on(parts))
            if waits:
                replicas.wait()

        return on_work(clipped=reduce)(parts)

    return where_simulated(plant)


def _by_key(factor: Callable[..., float], **way: Any) -> Plant:
    """Multiply gradients by a factor from the store, for a rank and step; correct code gets 1."""

    def plant(parts: Parts) -> Parts:
        steps = iter(range(1, 100))

        def multiply(parts: Parts) -> None:
            group = dist.group.WORLD
            assert group is not None, "there is a default group"
            scale_gradients(parts, factor(group.get_group_store(), parts.transport.rank, next(steps), **way))

        return plant_beside(multiply)(parts)

    return plant


def _scale(store: Any, rank: int, step: int, *, waits: bool) -> float:
    """Wait for a key; or ask once, and use a default without it."""
    if rank == 0:
        store.set("loss scale", "1")
        return 1.0
    return float(store.get("loss scale")) if waits or store.check(["loss scale"]) else 2.0


def _count(store: Any, rank: int, step: int, *, early: bool) -> float:
    """Count ranks in the store; the first one reads the count, perhaps too early."""
    store.add("ranks", 1)
    if not early:
        dist.barrier()
    return store.add("ranks", 0) / 2 if rank == 0 else 1.0


def _step(store: Any, rank: int, step: int, *, key: str) -> float:
    """Use one key for all steps, so early ranks find an old value; or include the step in it."""
    if rank == 0:
        store.set(key.format(step), str(step))
        return 1.0
    return float(store.get(key.format(step))) / step


PLANTS: Mapping[str, Plant | Entry] = {
    "reduced-on-one-rank": plant_beside(_reduce_by_one),
    "barrier-of-some": plant_beside(_barrier_of_some),
    "reduced-in-own-sizes": plant_beside(_reduce, own=True),
    "reduced-in-own-order": plant_beside(_log, own=True),
    "broadcast-from-itself": plant_beside(_broadcast_loss, own=True),
    "reduced-in-another-group": plant_beside(_in_a_group, own=True),
    "group-made-by-members": plant_beside(_group_made, by_all=False),
    "reduced-before-received": plant_beside(_receive, waits_first=False),
    "reduction-let-go": plant_beside(_let_go),
    "broadcast-used-early": plant_beside(_broadcast_factor, early=True),
    "norm-read-before-reduced": _norm(waits=False),
    "added-while-reduced": _behind_backward(1),
    "stepped-while-reduced": _before_stepping(waits=False),
    "key-asked-for-once": _by_key(_scale, waits=False),
    "counter-read-early": _by_key(_count, early=True),
    "key-of-the-step-before": _by_key(_step, key="step"),
    "reduced-in-the-same-sizes": plant_beside(_reduce, own=False),
    "reduced-in-one-order": plant_beside(_log, own=False),
    "broadcast-from-the-last": plant_beside(_broadcast_loss, own=False),
    "reduced-in-one-group": plant_beside(_in_a_group, own=False),
    "group-made-by-all": plant_beside(_group_made, by_all=True),
    "reduced-once-received": plant_beside(_receive, waits_first=True),
    "broadcast-used-in-time": plant_beside(_broadcast_factor, early=False),
    "norm-read-once-reduced": _norm(waits=True),
    "added-before-reduced": _behind_backward(0),
    "stepped-once-reduced": _before_stepping(waits=True),
    "key-waited-for": _by_key(_scale, waits=True),
    "counter-read-behind-a-barrier": _by_key(_count, early=False),
    "key-of-this-step": _by_key(_step, key="step {}"),
}

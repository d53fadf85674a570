"""Collectives that ranks do not call alike, or whose tensors are used too early."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.cases.specimens.by_hand import (
    across,
    beside,
    gradients_on,
    hung,
    raced,
    scale_gradients,
    where_simulated,
)
from pipeproof.cases.specimens.planting import (
    Call,
    Changes,
    both,
    first,
    gradients_of,
    on_stages,
    on_work,
    second,
)
from pipeproof.cases.specimens.specimen import Fault, Plant, Planted, Specimen
from pipeproof.pipeline.step import Parts


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


def _own_sizes(parts: Parts) -> None:
    """A number for each loss that a rank has, and it has none or several."""
    dist.all_reduce(torch.zeros(1 + sum(len(stage.losses) for stage in parts.stages)))


def _same_sizes(parts: Parts) -> None:
    dist.all_reduce(torch.zeros(1 + parts.program.schedule.microbatches))


def _in_own_order(parts: Parts) -> None:
    """Sums and maxima of what is logged, in the order in which a rank came to know of them."""
    logged = {"norm": dist.ReduceOp.SUM, "largest": dist.ReduceOp.MAX}
    names = [*logged] if parts.transport.rank == 0 else [*reversed(logged)]
    for name in names:
        dist.all_reduce(torch.ones(1), op=logged[name])


def _sorted(parts: Parts) -> None:
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        dist.all_reduce(torch.ones(1), op=operation)


def _from_itself(parts: Parts) -> None:
    """Everybody is told the loss, each by itself."""
    dist.broadcast(torch.ones(1), src=parts.transport.rank)


def _from_the_last(parts: Parts) -> None:
    dist.broadcast(torch.ones(1), src=parts.transport.n_ranks - 1)


def _of_another_group(parts: Parts) -> None:
    """One rank takes the pipeline's group, the other the default one, which has the same ranks."""
    pipeline = dist.new_group([*range(parts.transport.n_ranks)])
    dist.all_reduce(torch.ones(1), group=pipeline if parts.transport.rank == 0 else None)


def _of_one_group(parts: Parts) -> None:
    pipeline = dist.new_group([*range(parts.transport.n_ranks)])
    dist.all_reduce(torch.ones(1), group=pipeline)


def _made_by_members(parts: Parts) -> None:
    """A group is made by who is in it, and not by the others; then there is another group, of all."""
    if _is_last(parts):
        dist.new_group([parts.transport.rank])
    everybody = dist.new_group([*range(parts.transport.n_ranks)])
    dist.all_reduce(torch.ones(1), group=everybody)


def _made_by_all(parts: Parts) -> None:
    dist.new_group([parts.transport.n_ranks - 1])
    _of_one_group(parts)


def _before_it_came(parts: Parts) -> None:
    """The second rank adds what it has with what it receives, before that is there."""
    rank, found = parts.transport.rank, torch.ones(1)
    post: Any = dist.isend if rank == 0 else dist.irecv
    work = post(found, 1 - rank, tag=10**6)
    if rank == 0:
        found = found.clone()
    dist.all_reduce(found)
    work.wait()


def _once_it_came(parts: Parts) -> None:
    rank, found = parts.transport.rank, torch.ones(1)
    post: Any = dist.isend if rank == 0 else dist.irecv
    post(found, 1 - rank, tag=10**6).wait()
    dist.all_reduce(found)


def _let_go(parts: Parts) -> None:
    """Who prints the sum waits for it; the others do not."""
    work = dist.all_reduce(torch.ones(1), async_op=True)
    if parts.transport.rank == 0 and work is not None:
        work.wait()


def _told_early(parts: Parts) -> None:
    """The first rank tells a factor, and the second uses it at once."""
    factor = torch.ones(1)
    work = dist.broadcast(factor, 0, async_op=True)
    if parts.transport.rank == 1:
        scale_gradients(parts, factor.item())
    assert work is not None, "its rank is in the group"
    work.wait()


def _told_in_time(parts: Parts) -> None:
    factor = torch.ones(1)
    work = dist.broadcast(factor, 0, async_op=True)
    assert work is not None, "its rank is in the group"
    work.wait()
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


_ONE = across(microbatches=1)
_planted = partial(Specimen, classes=("tI", "mI"), needs=_ONE)
_control = partial(Planted, origin="the same code without the fault", needs=_ONE)
_alike = partial(_planted, fault=Fault("desynchronised", "desynchronised"))

SPECIMENS: Mapping[str, Specimen] = {
    "reduced-on-one-rank": _alike(
        summary="losses are added up where there are any, which is under a condition that ranks do not share",
        origin="NVIDIA/Megatron-LM#1444",
        plant=beside(_reduced_by_one),
    ),
    "barrier-of-some": _planted(
        summary="a barrier under a condition that ranks do not share: who is in it waits for who is not",
        origin="NVIDIA/Megatron-LM 08ddde0c",
        fault=hung(),
        plant=beside(_barrier_of_some),
    ),
    "reduced-in-own-sizes": _alike(
        summary="as many numbers are added up as a rank has losses",
        origin="NVIDIA/Megatron-LM#3401",
        plant=beside(_own_sizes),
    ),
    "reduced-in-own-order": _alike(
        summary="what is logged is reduced in the order of a dictionary that each rank has filled by itself",
        origin="no report: the class of NVIDIA/Megatron-LM#3401, collectives over local keys",
        plant=beside(_in_own_order),
    ),
    "broadcast-from-itself": _alike(
        summary="every rank broadcasts from its own number",
        origin="no report: the class of roots that ranks do not share",
        plant=beside(_from_itself),
    ),
    "reduced-in-another-group": _planted(
        summary="one rank reduces over the pipeline's group and the other over the default one",
        origin="NVIDIA/Megatron-LM#620",
        fault=hung(),
        plant=beside(_of_another_group),
    ),
    "group-made-by-members": _planted(
        summary="a group is made by its members alone, and not by all ranks",
        origin="no report: the class of new_group, which all ranks must call in one order",
        fault=hung(),
        plant=beside(_made_by_members),
    ),
    "reduced-before-received": _planted(
        summary="a tensor is reduced while it is still being received",
        origin="no report: the class of pytorch/PiPPy#585",
        fault=raced("read-before-wait", second),
        plant=beside(_before_it_came),
    ),
    "reduction-let-go": _planted(
        summary="a rank that does not print a sum does not wait for it",
        origin="no report: the class of works that are lost",
        fault=raced("never-waited", second),
        plant=beside(_let_go),
    ),
    "broadcast-used-early": _planted(
        summary="what is broadcast is used before it is waited for",
        origin="no report: the class of asynchronous collectives",
        fault=raced("read-before-wait", second),
        plant=beside(_told_early),
    ),
    "norm-read-before-reduced": _planted(
        summary="the norm is read before its all_reduce has been waited for",
        origin="pytorch/pytorch#144535, of the class: what is read is not waited for",
        classes=("tF", "mD"),
        fault=raced("read-before-wait", first),
        plant=_norm(waits=False),
    ),
    "added-while-reduced": _planted(
        summary="the next microbatch's backward adds to a gradient that is being reduced",
        origin="NVIDIA/Megatron-LM#1012, of the class: gradients are reduced before they are complete",
        classes=("tD", "mB"),
        schedule="gpipe",
        fault=raced("overwritten-in-flight", first),
        needs=across(),
        plant=_behind_backward(1),
    ),
    "stepped-while-reduced": _planted(
        summary="the optimizer steps with a gradient that is being reduced",
        origin="pytorch/pytorch#144535",
        classes=("tD", "mB"),
        fault=raced("read-before-wait", second),
        plant=_before_stepping(waits=False),
    ),
}
_RIGHT: Mapping[str, tuple[str, Plant]] = {
    "reduced-in-the-same-sizes": ("as many numbers are reduced on every rank", beside(_same_sizes)),
    "reduced-in-one-order": ("what is logged is reduced in one order", beside(_sorted)),
    "broadcast-from-the-last": ("every rank names the same root", beside(_from_the_last)),
    "reduced-in-one-group": ("all ranks reduce over one group", beside(_of_one_group)),
    "group-made-by-all": ("a group is made by all ranks", beside(_made_by_all)),
    "reduced-once-received": ("a tensor is reduced once it has been received", beside(_once_it_came)),
    "broadcast-used-in-time": ("what is broadcast is waited for", beside(_told_in_time)),
    "norm-read-once-reduced": ("the norm is read once it has been waited for", _norm(waits=True)),
    "stepped-once-reduced": ("the optimizer waits for a reduction", _before_stepping(waits=True)),
}
CONTROLS: Mapping[str, Planted] = {
    **{name: _control(summary=summary, plant=plant) for name, (summary, plant) in _RIGHT.items()},
    "added-before-reduced": _control(
        summary="gradients are reduced behind the last backward",
        schedule="gpipe",
        needs=across(),
        plant=_behind_backward(0),
    ),
}

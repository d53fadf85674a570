"""The bare loop: isend, irecv and autograd over one list of actions, and nothing else. What overhead is measured by."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import bench_ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof.pipeline import Action, Kind, Schedule


class _Line(NamedTuple):
    """One action with its messages looked up beforehand, as a user would write them out by hand."""

    forward: bool
    stage: int
    microbatch: int
    source: int | None  # the rank that the action's tensor comes from; None for this rank
    source_tag: int
    sink: int | None  # the rank that the product goes to; None for this rank
    sink_tag: int


def bare(
    schedule: Schedule,
    rank: int,
    modules: dict[int, nn.Module],
    microbatches: list[tuple[Tensor, Tensor]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[], None]:
    """A step of ``schedule`` on this rank, every boundary being of the shape of a microbatch's input.

    All receives are posted first and all sends are waited for at the end. Tags tell messages apart, since an
    interleaved schedule sends several kinds of them between the same two ranks.
    """
    lines, last = list(_lines(schedule, rank)), schedule.n_stages - 1
    shape, device, wire = microbatches[0][0].shape, microbatches[0][0].device, bench_ranks.wire()

    def step() -> None:
        buffers = [None if line.source is None else torch.empty(shape, device=wire) for line in lines]
        works = [
            None if line.source is None else dist.irecv(buffer, line.source, tag=line.source_tag)
            for line, buffer in zip(lines, buffers, strict=True)
        ]
        kept, here, sent = {}, {}, []
        for line, came, work in zip(lines, buffers, works, strict=True):
            forward, stage, m, _, source_tag, sink, sink_tag = line
            if work is not None:
                work.wait()
                came = came.to(device)
            else:
                came = here.pop(source_tag, None)
            if forward:
                x = microbatches[m][0] if came is None else came.requires_grad_()
                y = modules[stage](x)
                if stage == last:
                    y = loss_fn(y, microbatches[m][1]) / len(microbatches)
                kept[stage, m] = x, y
                product = y.detach()
            else:
                x, y = kept.pop((stage, m))
                torch.autograd.backward(y, came)
                product = x.grad
            if sink is None:
                here[sink_tag] = product
            else:
                product = product.to(wire)
                sent.append((product, dist.isend(product, sink, tag=sink_tag)))
        for _, work in sent:
            work.wait()

    return step


def _lines(schedule: Schedule, rank: int) -> Iterator[_Line]:
    for action in schedule.ranks[rank]:
        stage, kind, m = action
        onward = stage + (1 if kind is Kind.FORWARD else -1)
        yield _Line(
            kind is Kind.FORWARD,
            stage,
            m,
            _other(schedule, rank, 2 * stage - onward),
            _tag(schedule, action),
            _other(schedule, rank, onward),
            _tag(schedule, Action(onward, kind, m)),
        )


def _other(schedule: Schedule, rank: int, stage: int) -> int | None:
    """The rank of ``stage``, unless it is this one or there is no such stage."""
    there = 0 <= stage < schedule.n_stages and schedule.placement[stage] != rank
    return schedule.placement[stage] if there else None


def _tag(schedule: Schedule, consumer: Action) -> int:
    """A message is known by the action that consumes it; those beyond the ends of the pipeline exist on no rank."""
    return 2 * (consumer.microbatch * (schedule.n_stages + 2) + consumer.stage + 1) + (consumer.kind is Kind.BACKWARD)

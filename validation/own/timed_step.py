"""A rank's part in a bench: set up, run one step, then time steps without observers, or count memory.

Memory is exact, from the profiler's record of allocations and releases; that excludes releases of earlier allocations.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter

import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from pipeproof.own.case import Case
from pipeproof.own.data import data_for, max_norm_of
from pipeproof.own.observe import assemble
from pipeproof.own.timings import FEWEST, Turn
from pipeproof.reference.step import Recipe, objective
from pipeproof.worlds import accelerator
from pipeproof.worlds.accelerator import deterministic, synchronize
from pipeproof.worlds.worker import RankContext

_MARK = "pipeproof: memory is counted from here"


@dataclass
class Allocations:
    """A block's memory in bytes: net allocation at its end, and peak since ``mark``.

    Without a mark, the peak covers the whole block.
    """

    device: str
    net: int = 0
    most: int = 0

    def mark(self) -> None:
        """Start counting the peak."""
        if self.device != accelerator.CPU:
            accelerator.begin_peak()
        with record_function(_MARK):
            pass


@contextmanager
def allocations(device: str = accelerator.CPU) -> Iterator[Allocations]:
    """Count the block's allocations on ``device``; the yielded value is filled at the end."""
    found = Allocations(device)
    if device != accelerator.CPU:
        found.mark()
        before = accelerator.memory_in_use()
        yield found
        found.net = accelerator.memory_in_use() - before
        found.most = accelerator.peak() - before
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        yield found
    every = sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    events = [event for event in every if event.name() in ("[memory]", _MARK)]
    first = max((k for k, event in enumerate(events) if event.name() == _MARK), default=0)
    held = list(accumulate(event.nbytes() if event.name() != _MARK else 0 for event in events))
    found.net, found.most = (held[-1] if held else 0), max(held[first:], default=0)


@dataclass(frozen=True)
class Running:
    """A rank ready to step: whole model, own modules, and step function.

    A step returns losses, empty without the last stage.
    """

    model: nn.Module
    modules: Sequence[nn.Module]
    step: Callable[[], Sequence[float]]


Setup = Callable[[], Running]  # builds model and step; microbatches exist already


def take_turn(context: RankContext, prepare: Callable[[RankContext], Setup], counted: bool) -> Turn:
    """Set up a rank and run steps; a job for ``World.run``.

    ``counted``: one step with slow memory counting; otherwise steps are timed.
    """
    deterministic(context.device)
    ready_rank = prepare(context)
    if counted:
        with allocations(context.device) as found:
            running = ready_rank()
            found.mark()
            counted_losses = running.step()
        own = {id(one) for module in running.modules for one in module.parameters()}
        others = sum(one.nbytes for one in running.model.parameters() if id(one) not in own)  # of other ranks alone
        return Turn((), tuple(counted_losses), found.most - others)
    running = ready_rank()
    running.step()
    seconds, losses = list[float](), list[float]()
    for _ in range(FEWEST):  # all ranks start a step together
        for module in running.modules:
            module.zero_grad(set_to_none=True)
        synchronize(context.device)
        dist.barrier(group=context.group)
        began = perf_counter()
        losses += running.step()
        synchronize(context.device)
        seconds.append(perf_counter() - began)
    return Turn(tuple(seconds), tuple(losses))


def setup_case(context: RankContext, case: Case) -> Setup:
    """Prepare this rank of ``case``, with its microbatches in place."""
    batches = [batch.to(context.device) for batch in data_for(case, 0)]
    pairs = [(batch.inputs, batch.target) for batch in batches]
    max_norm = max_norm_of(case, case.plan.index("train"))

    def setup() -> Running:
        model, schedule = assemble(context, case)
        _, divisor = objective(model, batches, Recipe(loss=case.loss))

        def step() -> Sequence[float]:
            loss_divisor = None if case.loss == "mean" else divisor
            return schedule.train_step(pairs, max_norm=max_norm, loss_divisor=loss_divisor).losses

        return Running(model, [stage.module for stage in schedule.parts.stages], step)

    return setup

"""One rank's part of a bench: a step is set up, run once, and then timed alone, without anything that observes it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch.distributed as dist
from torch import nn

from pipeproof.cases.allocations import allocations
from pipeproof.cases.case import Case
from pipeproof.cases.data import data_for, max_norm_of
from pipeproof.cases.observe import assemble
from pipeproof.cases.primitives.layers import microbatches
from pipeproof.cases.primitives.stacked import ready, reference_of
from pipeproof.cases.primitives.stacks import Stack
from pipeproof.cases.timings import FEWEST, Turn
from pipeproof.core.replicas import Replicas
from pipeproof.reference.step import Recipe, objective
from pipeproof.worlds.accelerator import deterministic, synchronize
from pipeproof.worlds.worker import RankContext


@dataclass(frozen=True)
class Running:
    """A rank that is ready to step: the whole model, what this rank has of it, and what a step does.

    A step returns losses, none where the rank has not the last stage.
    """

    model: nn.Module
    modules: Sequence[nn.Module]
    step: Callable[[], Sequence[float]]

    def clear(self) -> None:
        """Let go of all gradients."""
        for module in self.modules:
            module.zero_grad(set_to_none=True)

    @property
    def others(self) -> int:
        """Bytes of the model's parameters that only other ranks have to do with."""
        own = {id(parameter) for module in self.modules for parameter in module.parameters()}
        return sum(one.numel() * one.element_size() for one in self.model.parameters() if id(one) not in own)


def take_turn(context: RankContext, work: Case | Stack, counted: bool) -> Turn:
    """Set ``work`` up and step; a job for ``World.run``.

    ``counted``: one step, whose memory is counted, which takes time; else it is timed.
    """
    deterministic(context.device)
    ready_rank = _of_stack(context, work) if isinstance(work, Stack) else _of_case(context, work)
    if not counted:
        running = ready_rank()
        running.step()
        return _timed(context, running)
    with allocations(context.device) as found:
        running = ready_rank()
        found.mark()
        losses = running.step()
    return Turn((), tuple(losses), found.most - running.others)


def _timed(context: RankContext, running: Running) -> Turn:
    """Each step begins on all ranks together."""
    seconds, losses = list[float](), list[float]()
    for _ in range(FEWEST):
        running.clear()
        synchronize(context.device)
        dist.barrier(group=context.group)
        began = perf_counter()
        losses += running.step()
        synchronize(context.device)
        seconds.append(perf_counter() - began)
    return Turn(tuple(seconds), tuple(losses))


def _of_case(context: RankContext, case: Case) -> Callable[[], Running]:
    """Sets this rank of ``case`` up, whose microbatches are there."""
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


def _of_stack(context: RankContext, stack: Stack) -> Callable[[], Running]:
    """Sets this rank of ``stack`` up, whose microbatches are there: those of its replica."""
    every = microbatches(stack.microbatches, stack.seed)
    own = Replicas.along(stack.sizes or 1, stack.microbatches).share(context.rank)
    given = [(x.to(context.device), y.to(context.device)) for x, y in (every[number] for number in own)]

    def setup() -> Running:
        model = reference_of(stack)().to(context.device).train()
        rank = ready(model, given, stack=stack)  # type: ignore[arg-type]  # of its layers

        def step() -> Sequence[float]:
            return rank.step().losses or ()  # a list, as it makes it

        return Running(model, rank.stages, step)

    return setup

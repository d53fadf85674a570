"""A rank's part in a bench: set up, run one step, then time steps without observers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch.distributed as dist
from torch import nn

from pipeproof.own.allocations import allocations
from pipeproof.own.case import Case
from pipeproof.own.data import data_for, max_norm_of
from pipeproof.own.observe import assemble
from pipeproof.own.timings import FEWEST, Turn
from pipeproof.reference.step import Recipe, objective
from pipeproof.worlds.accelerator import deterministic, synchronize
from pipeproof.worlds.worker import RankContext


@dataclass(frozen=True)
class Running:
    """A rank ready to step: whole model, own modules, and step function.

    A step returns losses, empty without the last stage.
    """

    model: nn.Module
    modules: Sequence[nn.Module]
    step: Callable[[], Sequence[float]]

    def clear(self) -> None:
        """Drop all gradients."""
        for module in self.modules:
            module.zero_grad(set_to_none=True)

    @property
    def others(self) -> int:
        """Bytes of model parameters that belong to other ranks alone."""
        own = {id(parameter) for module in self.modules for parameter in module.parameters()}
        return sum(one.numel() * one.element_size() for one in self.model.parameters() if id(one) not in own)


Setup = Callable[[], Running]  # builds model and step; microbatches exist already


def take_turn(context: RankContext, prepare: Callable[[RankContext], Setup], counted: bool) -> Turn:
    """Set up a rank and run steps; a job for ``World.run``.

    ``counted``: one step with slow memory counting; otherwise steps are timed.
    """
    deterministic(context.device)
    ready_rank = prepare(context)
    if not counted:
        running = ready_rank()
        running.step()
        return _time_steps(context, running)
    with allocations(context.device) as found:
        running = ready_rank()
        found.mark()
        losses = running.step()
    return Turn((), tuple(losses), found.most - running.others)


def _time_steps(context: RankContext, running: Running) -> Turn:
    """Time steps that all ranks start together."""
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

"""One rank's part of a bench: a step is set up, run once, and then timed alone, without anything that observes it."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from pipeproof.cases.allocations import Allocations, allocations
from pipeproof.cases.case import Case
from pipeproof.cases.data import data_for, max_norm_of
from pipeproof.cases.observe import assemble
from pipeproof.cases.primitives.layers import microbatches
from pipeproof.cases.primitives.stacked import ready, reference_of
from pipeproof.cases.primitives.stacks import Stack
from pipeproof.reference.step import Recipe, objective
from pipeproof.worlds.deterministic import deterministic
from pipeproof.worlds.worker import RankContext

STEPS = 3  # timed ones in a turn, after one that is not


@dataclass(frozen=True)
class Turn:
    """What one rank saw: how long each step took, the losses of all that it knows, and bytes at most (0: not counted).

    The bytes are those of its parameters, and what its step allocates beyond them.
    """

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    bytes: int = 0


@dataclass(frozen=True)
class Running:
    """A rank that is ready to step: what it has, what a step does, and how many bytes it holds before.

    A step returns losses, none where the rank has not the last stage.
    """

    modules: Sequence[nn.Module]
    step: Callable[[], Sequence[float]]
    held: int

    def clear(self) -> None:
        """Let go of all gradients."""
        for module in self.modules:
            module.zero_grad(set_to_none=True)


def take_turn(context: RankContext, work: Case | Stack, counted: bool) -> Turn:
    """Set ``work`` up and step; a job for ``World.run``.

    ``counted``: one step, whose memory is counted, which takes time; else it is timed.
    """
    deterministic(context.device)
    running = _of_stack(context, work, counted) if isinstance(work, Stack) else _of_case(context, work)
    if not counted:
        running.step()
        return _timed(context, running)
    with allocations(context.device) as taken:
        losses = running.step()
    return Turn((), tuple(losses), running.held + taken.most)


def _timed(context: RankContext, running: Running) -> Turn:
    """Each step begins on all ranks together."""
    seconds, losses = list[float](), list[float]()
    for _ in range(STEPS):
        running.clear()
        _wait(context)
        dist.barrier(group=context.group)
        began = perf_counter()
        losses += running.step()
        _wait(context)
        seconds.append(perf_counter() - began)
    return Turn(tuple(seconds), tuple(losses))


def _wait(context: RankContext) -> None:
    """Until the device has done what it was given."""
    if context.device != "cpu":
        torch.cuda.synchronize()


def _of_case(context: RankContext, case: Case) -> Running:
    model, schedule = assemble(context, case)
    batches = [batch.to(context.device) for batch in data_for(case, 0)]
    _, divisor = objective(model, batches, Recipe(loss=case.loss))
    loss_divisor = None if case.loss == "mean" else divisor
    pairs = [(batch.inputs, batch.target) for batch in batches]
    max_norm = max_norm_of(case, case.plan.index("train"))
    modules = [stage.module for stage in schedule.parts.stages]

    def step() -> Sequence[float]:
        return schedule.train_step(pairs, max_norm=max_norm, loss_divisor=loss_divisor).losses

    return Running(modules, step, sum(map(_bytes, modules)))


def _of_stack(context: RankContext, stack: Stack, counted: bool) -> Running:
    model = reference_of(stack)().to(context.device).train()
    given = [(x.to(context.device), y.to(context.device)) for x, y in microbatches(stack.microbatches, stack.seed)]
    whole = _bytes(model)
    with allocations(context.device) if counted else nullcontext(Allocations()) as made:
        rank = ready(model, given, stack=stack)  # type: ignore[arg-type]  # of its layers
    own = {id(parameter) for stage in rank.stages for parameter in stage.parameters()}
    others = sum(_size(one) for one in model.parameters() if id(one) not in own)  # stages of other ranks

    def step() -> Sequence[float]:
        return rank.step().losses or ()  # type: ignore[return-value]  # a list, as ``run`` makes it

    return Running(rank.stages, step, whole + made.net - others)


def _bytes(module: nn.Module) -> int:
    """Of its parameters, as far as they are on this rank."""
    return sum(map(_size, module.parameters()))


def _size(parameter: nn.Parameter) -> int:
    part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return part.numel() * part.element_size()

"""A pipeline by hand, GPipe, with faults to plant: held against itself, link by link."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import Contract, StageByStage, check_step
from pipeproof.core.verdict import Verdict
from pipeproof.worlds.worker import RankContext
from tests.support.steps import WIDTH, pairs

LOSS = nn.functional.mse_loss
Change = Callable[["Step", Any], Any]


def as_it_is(step: "Step", value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Faults:
    """What a rank does to what passes: each is given the step as it stands, and the value."""

    rank: int = 1
    received: Change = as_it_is  # an input, as it has come
    made: Change = as_it_is  # an output, before it is sent
    target: Change = as_it_is
    loss: Change = as_it_is  # what backward is called on
    flow: Change = as_it_is  # an output gradient, as it has come
    handed_on: Change = as_it_is  # an input gradient, before it is sent
    skip: Sequence[int] = ()  # backwards
    after: Change = as_it_is  # the stage, once all backwards are over
    norm: Change = as_it_is
    updated: Change = as_it_is  # the stage, after the optimizer


@dataclass
class Step:
    """Where a rank's step stands: one of so many ``ranks`` in a row, the first of which may be another than 0."""

    rank: int
    ranks: int
    first: int = 0
    microbatch: int = 0
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def number(self) -> int:
        return self.rank - self.first


def stage_of(rank: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(rank)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))


data = partial(pairs, seed=7)


def named(stage: int, name: str) -> str:
    return f"{stage}.{name}"


def step(context: RankContext, count: int, faults: Faults, *, clips: bool = False, **options: Any) -> Verdict:
    """A checked step of ``count`` microbatches; a job for ``World.run``."""
    rank, last, microbatches = context.rank, context.ranks - 1, data(count)
    stage, own = stage_of(rank), faults if faults.rank == rank else Faults()
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.5, momentum=0.9)
    by = StageByStage(LOSS, optimizer=optimizer, contract=Contract(max_norm=0.1)) if clips else StageByStage(LOSS)
    given = microbatches if rank in (0, last) else None
    with check_step(stage, given, against=by, rename=named, timeout_s=20, **options) as check:
        at = Step(rank, context.ranks)
        forwards(at, stage, microbatches, own)
        backwards(at, count, own)
        own.after(at, stage)
        check.gradients()
        norm = _norm(stage, own, at)
        if clips:
            for parameter in stage.parameters():
                parameter.grad *= min(1.0, 0.1 / (norm + 1e-6))
        optimizer.step()
        own.updated(at, stage)
        check.report(losses=at.losses if rank == last else None, norm=norm)
    return check.verdict


def forwards(at: Step, stage: nn.Module, microbatches: Sequence[tuple[Tensor, Tensor]], own: Faults) -> None:
    """All forwards, with what the last stage makes of them."""
    for at.microbatch, (inputs, target) in enumerate(microbatches):
        if at.number:
            inputs = torch.empty_like(inputs)
            dist.recv(inputs, at.rank - 1)
        inputs = own.received(at, inputs).requires_grad_(at.number > 0)
        output = own.made(at, stage(inputs))
        at.inputs.append(inputs)
        if at.number < at.ranks - 1:
            dist.send(output.detach(), at.rank + 1)
        else:
            loss = LOSS(output, own.target(at, target))
            at.losses.append(loss.item())
            output = own.loss(at, loss / len(microbatches))
        at.outputs.append(output)


def backwards(at: Step, count: int, own: Faults) -> None:
    """All backwards, in the order of forwards."""
    inner = at.number < at.ranks - 1
    for at.microbatch in range(count):
        flow = torch.empty_like(at.inputs[at.microbatch])
        if inner:
            dist.recv(flow, at.rank + 1)
        if at.microbatch not in own.skip:
            at.outputs[at.microbatch].backward(own.flow(at, flow) if inner else None)
        if at.number:
            gradient = at.inputs[at.microbatch].grad
            gradient = torch.zeros_like(at.inputs[at.microbatch]) if gradient is None else gradient
            dist.send(own.handed_on(at, gradient), at.rank - 1)


def _norm(stage: nn.Module, own: Faults, at: Step) -> float:
    squares = torch.stack([one.grad.double().square().sum() for one in stage.parameters() if one.grad is not None])
    total = squares.sum()
    dist.all_reduce(total)
    return float(own.norm(at, total.sqrt()))

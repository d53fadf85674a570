"""A small training loop of many steps that record_run watches, with faults that begin at some step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import PipelineSchedule, record_run
from pipeproof.wings.runs.recorder import RunStep

M, WIDTH, RATE = 4, 8, 0.1
loss_fn = nn.functional.mse_loss
State = Mapping[str, Tensor]
Fault = Callable[["Loop", int], None]


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    hidden = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(2))
    return nn.Sequential(*hidden, nn.Linear(WIDTH, WIDTH))


def microbatches_of(step: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(step)
    return [(torch.randn(6, WIDTH, generator=draw), torch.randn(6, WIDTH, generator=draw)) for _ in range(M)]


@dataclass
class Loop:
    """One device. ``order``: that of microbatches. ``fault``: what is done to a step that has run its backwards."""

    order: Sequence[int] = range(M)
    fault: Fault | None = None
    begins: int = 0
    start: tuple[State, dict[str, object]] | None = None
    model: nn.Sequential = field(default_factory=model_of)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.9)
        if self.start is not None:
            self.model.load_state_dict(self.start[0])
            self.optimizer.load_state_dict(self.start[1])

    def microbatches(self, number: int) -> list[tuple[Tensor, Tensor]]:
        return microbatches_of(number)

    def train(self, to: Path, numbers: Sequence[int], *, every: int = 1, resume: bool = False) -> "Loop":
        """Make these steps, and record them."""
        with record_run(self.model, to, optimizer=self.optimizer, every=every, resume=resume) as run:
            for number in numbers:
                microbatches = self.microbatches(number)
                with run.step(microbatches, number=number) as step:
                    self.step(step, microbatches, number)
        return self

    def step(self, step: RunStep | None, microbatches: Sequence[tuple[Tensor, Tensor]], number: int) -> None:
        self.optimizer.zero_grad()
        losses = [0.0] * M
        for k in self.order:
            inputs, target = microbatches[k]
            loss = loss_fn(self.model(inputs), target)
            losses[k] = loss.item()
            (loss / M).backward()
        if self.fault is not None and number >= self.begins:
            self.fault(self, number)
        if step is not None:
            step.gradients()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if step is not None:
            step.report(losses=losses, norm=norm.item())


def faster(loop: Loop, number: int) -> None:
    """A fault: twice the learning rate."""
    loop.optimizer.param_groups[0]["lr"] = 2 * RATE


def in_stages(to: Path, numbers: Sequence[int]) -> None:
    """The same steps, by two ranks with a stage each."""
    stage = (model_of()[:1], model_of()[1:])[dist.get_rank()]
    optimizer = torch.optim.SGD(stage.parameters(), lr=RATE, momentum=0.9)
    schedule = PipelineSchedule(kind="1f1b", n_microbatches=M, stages=[stage], loss_fn=loss_fn, optimizer=optimizer)
    with record_run(stage, to, optimizer=optimizer) as run:
        for number in numbers:
            microbatches = microbatches_of(number)
            with run.step(microbatches, number=number) as step:
                result = schedule.wrap(step.wrap).train_step(microbatches, max_norm=1.0)
                step.report(losses=result.losses, loss=result.loss, norm=result.grad_norm)


def in_replicas(to: Path, numbers: Sequence[int], *, apart: bool = False) -> None:
    """The same steps, by two replicas with half of the microbatches each; ``apart``: the second one forgets a sum."""
    model, half = model_of(), slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    with record_run(model, to, optimizer=optimizer) as run:
        for number in numbers:
            own = microbatches_of(number)[half]
            with run.step(own, number=number) as step:
                optimizer.zero_grad()
                losses = [loss_fn(model(inputs), target) for inputs, target in own]
                (sum(losses) / M).backward()
                for name, parameter in model.named_parameters():
                    total = parameter.grad.clone()
                    dist.all_reduce(total)
                    if not (apart and name == "2.bias" and dist.get_rank()):
                        parameter.grad = total
                step.gradients()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                step.report(losses=[one.item() for one in losses], norm=None if apart else norm.item())

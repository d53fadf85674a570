"""A checked job of two stages on replicas, whose last weight is tied to the first one or of its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import SingleDevice, World, check_step, record_step
from pipeproof.core.verdict import Verdict
from pipeproof.worlds.worker import RankContext
from tests.support.steps import WIDTH, backward, loss_fn, pairs

COUNT = 4
TIED = "first.weight"
Change = Callable[[int, nn.Module], object]  # of a rank's stage


class Tied(nn.Module):
    """Two layers, and the first one's weight once more at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.second(torch.tanh(nn.functional.linear(x, self.first.weight)))
        return nn.functional.linear(torch.tanh(hidden), self.last)

    @property
    def last(self) -> Tensor:
        return self.first.weight


class Apart(Tied):
    """The same with a weight of its own at the end, so that each stage's share is known."""

    def __init__(self) -> None:
        super().__init__()
        self.copy = nn.Parameter(self.first.weight.detach().clone())

    @property
    def last(self) -> Tensor:
        return self.copy


def build(kind: type[Tied] = Tied) -> Tied:
    torch.manual_seed(0)
    return kind()


def apart() -> Tied:
    return build(Apart)


def nothing(rank: int, stage: nn.Module) -> None:
    """The step is right."""


def begun(*ranks: int, by: float = 0.1, only: str = "") -> Change:
    """Something is in ``.grad`` before the step."""

    def change(rank: int, stage: nn.Module) -> None:
        for name, parameter in stage.named_parameters() if rank in ranks else ():
            parameter.grad = torch.full_like(parameter, by) if only in name else None

    return change


def times(by: Mapping[int, float], only: str = "") -> Change:
    """Gradients are multiplied after the reduction."""

    def change(rank: int, stage: nn.Module) -> None:
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None
            parameter.grad *= by.get(rank, 1.0) if only in name else 1.0

    return change


@dataclass(frozen=True)
class Job:
    """Rank ``replicas * s + r`` has stage s of replica r, and runs all of the model to get its own share.

    reduced: over which ranks a tied weight is summed. alone: the rank that reports its own norm. record: what is
    expected comes from a record.
    """

    replicas: int = 2
    tied: bool = True
    reduced: tuple[str, ...] = ("stage", "tied")
    before: Change = nothing
    after: Change = nothing
    alone: int | None = None
    record: bool = False

    def verdict(self, world: World) -> Verdict:
        verdict, *others = world.run(_step, self, ranks=2 * self.replicas)
        assert all((one.outcome, one.causes) == (verdict.outcome, verdict.causes) for one in others)
        return verdict


def _step(context: RankContext, job: Job) -> Verdict:
    rank, replicas = context.rank, job.replicas
    stage, replica = divmod(rank, replicas)
    groups = {
        "stage": [dist.new_group([s * replicas + r for r in range(replicas)]) for s in range(2)][stage],
        "tied": [dist.new_group([r, replicas + r]) for r in range(replicas)][replica],
        "all": dist.group.WORLD,
    }
    kind, data = build if job.tied else apart, pairs(COUNT)[replica::replicas]
    part, whole, held = kind(), apart(), nn.Module()
    if stage == 0 or job.tied:
        held.add_module("first", part.first)
    if stage:
        held.add_module("second", part.second)
    if stage and not job.tied:
        held.register_parameter("copy", part.copy)  # type: ignore[arg-type]
    job.before(rank, held)
    against = record_step(kind(), pairs(COUNT), loss_fn=loss_fn) if job.record else SingleDevice(kind, loss_fn)
    with check_step({stage: held}, data, against=against, timeout_s=20.0) as check:
        losses = backward(whole, data)
        square = torch.zeros(())
        for name, parameter in held.named_parameters():
            its = whole.get_parameter("copy" if stage and name == TIED else name).grad
            assert its is not None
            parameter.grad = its if parameter.grad is None else parameter.grad + its
            for what in job.reduced if name == TIED and job.tied else ("stage",):
                dist.all_reduce(parameter.grad, group=groups[what])
                parameter.grad /= replicas if what == "stage" else 1
            square += parameter.grad.square().sum()
        norms = {rank: square.sqrt().item()}
        dist.all_reduce(square)
        job.after(rank, held)
        check.gradients()
        norm = (
            None if job.tied else norms.get(-1 if job.alone is None else job.alone, (square / replicas).sqrt().item())
        )
        check.report(losses=losses if stage else None, norm=norm)
    return check.verdict

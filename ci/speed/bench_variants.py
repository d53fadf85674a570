"""Three ways to run one schedule: ours, torch.distributed.pipelining's, and a bare loop of isend and irecv.

All three are built over the same stage modules, so they do the same arithmetic and add to the same gradients.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from bench_bare import bare
from bench_ranks import Step, wire
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from pipeproof.pipeline import PipelineSchedule, Schedule, build
from pipeproof.pipeline.schedules import SPLIT
from pipeproof.worlds.accelerator import HOST

_TORCH = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "looped-bfs": ScheduleLoopedBFS,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
_VIRTUAL = {"interleaved": 2, "looped-bfs": 2}  # where the family leaves it open, and the bench wants more than one


@dataclass(frozen=True)
class Case:
    """One schedule, this rank's stage modules by stage number, and the microbatches that every rank knows."""

    schedule: Schedule
    rank: int
    modules: dict[int, nn.Module]
    microbatches: list[tuple[Tensor, Tensor]]  # (input, target), of the shape of every boundary
    loss_fn: Callable[[Tensor, Tensor], Tensor]


def schedule_of(name: str, ranks: int, microbatches: int) -> Schedule:
    """The schedule ``name``, with as many stages per rank as the bench gives it."""
    return build(name, ranks=ranks, microbatches=microbatches, virtual=_VIRTUAL.get(name))


def variants(case: Case) -> dict[str, Step]:
    """The step of each variant that exists for this schedule here, by name.

    A bare loop has whole backwards only, and tells messages apart by tags, as only the host's backend does. torch's
    sends tensors from where they are, which that backend does not.
    """
    steps = {"ours": ours(case)}
    device, host = case.microbatches[0][0].device, dist.get_backend() == HOST
    if case.schedule.name not in SPLIT and (host or case.schedule.n_ranks == 1):
        steps["bare"] = bare(case.schedule, case.rank, case.modules, case.microbatches, case.loss_fn)
    if case.schedule.name in _TORCH and (wire() == device or case.schedule.n_ranks == 1):
        steps["torch"] = torchs(case)
    return steps


def pipeline_of(case: Case) -> PipelineSchedule:
    """Ours."""
    return PipelineSchedule(
        kind=case.schedule,
        n_microbatches=len(case.microbatches),
        stages=list(case.modules.values()),
        loss_fn=case.loss_fn,
    )


def ours(case: Case) -> Step:
    """Forward and backward with ``PipelineSchedule``."""
    pipeline = pipeline_of(case)

    def step() -> None:
        pipeline.accumulate(case.microbatches)

    return step


def torchs(case: Case) -> Step:
    """Forward and backward with torch's schedule of that name: it splits one large batch into the same microbatches."""
    n_stages = case.schedule.n_stages
    device = case.microbatches[0][0].device
    stages = [PipelineStage(module, index, n_stages, device) for index, module in case.modules.items()]
    kind = _TORCH[case.schedule.name]
    several = issubclass(kind, PipelineScheduleMulti)
    pipeline = kind(stages if several else stages[0], len(case.microbatches), loss_fn=case.loss_fn)
    inputs, targets = (torch.cat(column).detach() for column in zip(*case.microbatches, strict=True))
    args = (inputs,) if 0 in case.modules else ()
    scored = n_stages - 1 in case.modules

    def step() -> None:
        if scored:
            pipeline.step(*args, target=targets, losses=[], return_outputs=False)
        else:
            pipeline.step(*args, return_outputs=False)

    return step


def clear_gradients(modules: Iterable[nn.Module]) -> None:
    """Forget every gradient, so that no variant starts from another's."""
    for module in modules:
        module.zero_grad(set_to_none=True)


def disagreement(modules: Iterable[nn.Module], steps: dict[str, Step]) -> dict[str, float]:
    """Run each variant once: the largest difference of its gradients from ours, relative to ours (Frobenius)."""
    modules, visited = list(modules), {}
    for name, step in steps.items():
        clear_gradients(modules)
        step()
        visited[name] = torch.cat([parameter.grad.flatten() for module in modules for parameter in module.parameters()])
    clear_gradients(modules)
    scale = visited["ours"].norm()
    assert scale > 0, "gradients that are all zero compare equal to anything"
    return {name: ((vector - visited["ours"]).norm() / scale).item() for name, vector in visited.items()}

"""What a race is, and what is none: code that is right on every transport is never told of one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.pipeline.transports import Transport
from pipeproof.wings.simulated import SimulatedWorld
from pipeproof.wings.simulated.buffers import HeldTensors, is_unchanged, overlap, poison
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.works import finish, race_of

Use = Callable[[Tensor, Any], object]


def used(context: RankContext, use: Use) -> None:
    """Rank 1 uses a buffer that rank 0 is about to fill."""
    if context.rank == 0:
        dist.send(torch.ones(4), 1)
        return
    buffer = torch.zeros(4)
    work = dist.irecv(buffer, 0)
    use(buffer, work)
    finish(work)
    assert buffer.tolist() == [1.0] * 4


def gradient_of(buffer: Tensor, work: Any) -> object:
    inputs = torch.ones(4, requires_grad=True)
    return torch.autograd.grad(inputs * 2, inputs, grad_outputs=buffer)


def fused_step(buffer: Tensor, work: Any) -> object:
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = buffer
    return torch.optim.AdamW([weight], lr=0.1, fused=True).step()


READS: list[Use] = [
    lambda buffer, work: buffer + 1,
    lambda buffer, work: buffer.sum(),
    lambda buffer, work: buffer.tolist(),
    lambda buffer, work: bool(buffer[0] > 0),
    lambda buffer, work: torch.zeros(4).copy_(buffer),
    lambda buffer, work: buffer.view(2, 2)[0].clone(),
    lambda buffer, work: torch.nn.functional.gelu(buffer),
    lambda buffer, work: dist.isend(buffer, 0),
    lambda buffer, work: torch.zeros(8).__setitem__(slice(4), buffer),
    lambda buffer, work: buffer.type_as(torch.zeros(1, dtype=torch.float64)),
    lambda buffer, work: torch.full((2,), buffer[0]),  # type: ignore[arg-type]  # a tensor of one number is one
    lambda buffer, work: torch.zeros(2).new_tensor(buffer),
    lambda buffer, work: np.asarray(buffer),
    lambda buffer, work: f"{buffer[0]:.2f}",
    gradient_of,
    fused_step,
]
NO_READS: list[Use] = [
    lambda buffer, work: (
        buffer.shape,
        buffer.dtype,
        buffer.device,
        buffer.numel(),
        len(buffer),
        buffer.is_contiguous(),
    ),
    lambda buffer, work: (torch.empty_like(buffer), torch.zeros_like(buffer), buffer.new_empty(3)),
    lambda buffer, work: (
        buffer.view(2, 2),
        buffer.detach(),
        buffer[1:],
        buffer.unbind(),
        torch.ones(4).view_as(buffer),
        torch.ones(4).type_as(other=buffer),  # type: ignore[call-arg]  # as torch names it
        torch.empty_like(input=buffer),
        torch.full_like(buffer, 2.0),
        buffer.new_tensor([1.0]),
    ),
    lambda buffer, work: (buffer.requires_grad, buffer.grad, buffer.data_ptr(), buffer.untyped_storage()),
    lambda buffer, work: (work.wait(), buffer + 1),
    lambda buffer, work: torch.randn(3, 3) @ torch.randn(3, 3),
]


WRITES: list[Use] = [  # what is no number stays none: the bits tell nothing
    lambda buffer, work: buffer.mul_(2),
    lambda buffer, work: buffer[1:].add_(1),
    lambda buffer, work: torch.nn.functional.relu_(buffer),
    lambda buffer, work: torch._foreach_mul_([buffer], 2.0),
    lambda buffer, work: torch.add(buffer, 1, out=buffer),
]
USES = [("read-before-wait", "used", READS), ("overwritten-in-flight", "written", WRITES)]


@pytest.mark.parametrize(("kind", "line", "use"), [(kind, line, use) for kind, line, uses in USES for use in uses])
def test_a_buffer_is_used_before_its_wait(kind: str, line: str, use: Use, simulated: SimulatedWorld) -> None:
    race = race_of(simulated, used, use, seeds=[0])
    assert (race.kind, race.rank, [what for what, _ in race.lines]) == (kind, 1, [line, "received"])
    golden(race.said)


def uses_other_parts(context: RankContext) -> list[float]:
    if context.rank == 0:
        dist.send(torch.ones(2), 1)
        return []
    whole = torch.zeros(3, 2)
    work = dist.irecv(whole[1], 0)
    whole[0].add_(1)
    whole[2] = 2
    whole.index_add_(0, torch.tensor([0, 2]), torch.ones(2, 2))
    torch.add(whole[0], 1, out=whole[0])
    finish(work)
    return whole[:, 0].tolist()


def reshapes(context: RankContext) -> float:
    if context.rank == 0:
        dist.send(torch.ones(4), 1)
        return 4.0
    work = dist.irecv(buffer := torch.zeros(4), 0)
    buffer.unsqueeze_(0)
    finish(work)
    return float(buffer.sum())


@pytest.mark.parametrize("use", NO_READS)
def test_what_asks_for_a_shape_or_makes_a_view_reads_nothing(use: Use, simulated: SimulatedWorld) -> None:
    simulated.run(used, use, ranks=2)


def answered(context: RankContext) -> None:
    """Who has an answer to what it sent may write there, whether or not it has waited for it."""
    buffer = torch.ones(4)
    if context.rank == 0:
        work = dist.isend(buffer, 1)
        dist.recv(torch.empty(1), 1)
        buffer.zero_()
        finish(work)
    else:
        dist.recv(buffer, 0)
        dist.send(torch.ones(1), 0)


def in_two_halves(context: RankContext) -> list[float]:
    buffer = torch.zeros(4, 2)
    halves = [buffer[:2], buffer[2:]]
    post: Any = dist.isend if context.rank == 0 else dist.irecv
    works = [post(half.add_(context.rank == 0), 1 - context.rank) for half in halves]
    for work in works:
        work.wait()
    return buffer.flatten().tolist()


def beside(context: RankContext) -> float:
    """Every other row is there, and is read while those between are on their way."""
    rows = torch.ones(4, 2)
    if context.rank == 0:
        dist.send(rows[1], 1)
        return 0.0
    work = dist.irecv(rows[1], 0)
    total = float(rows[::2].sum())
    finish(work)
    return total


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (answered, None),
        (in_two_halves, [1.0] * 8),
        (beside, 4.0),
        (uses_other_parts, [3.0, 1.0, 3.0]),
        (reshapes, 4.0),
    ],
)
def test_right_code_is_told_of_no_race(
    job: Callable[[RankContext], object], expected: object, simulated: SimulatedWorld
) -> None:
    for simulated.seed in range(5):
        assert simulated.run(job, ranks=2)[1] == expected


@pytest.mark.sweep
def test_a_tensor_with_gaps_is_refused_as_gloo_does(simulated: SimulatedWorld, world: World) -> None:
    for place in (simulated, world):
        with pytest.raises(RankFailed, match="input tensor has to be contiguous"):
            place.run(with_gaps, ranks=1)


def with_gaps(context: RankContext) -> None:
    dist.isend(torch.ones(4, 4)[:, :2], 0)


def test_memory_in_common() -> None:
    whole = torch.zeros(4, 4)
    assert overlap(whole[0], whole)
    assert not overlap(whole[0], whole[1])
    assert not overlap(whole[:, :2], whole[:, 2:])
    assert overlap(whole[:, :3], whole[:, 2:])
    assert not overlap(whole, torch.zeros(4, 4))
    assert not overlap(torch.empty(0), torch.empty(0))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool]
)
def test_poison_and_what_comes_leave_no_trace_in_autograd(dtype: torch.dtype) -> None:
    buffer, content = torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype)
    version = buffer._version
    poison([buffer])
    assert not is_unchanged([buffer], [torch.zeros(3, dtype=dtype)])
    HeldTensors([buffer]).fill([content])
    assert is_unchanged([buffer], [content])
    assert buffer._version == version


def left_alone(context: RankContext) -> None:
    """A send that nobody waits for, of a buffer that nobody touches again."""
    if context.rank == 0:
        dist.isend(torch.ones(4), 1)
        return
    buffer = torch.zeros(4)
    dist.recv(buffer, 0)
    assert buffer.tolist() == [1.0] * 4


@pytest.mark.parametrize("transport", Transport)
def test_a_send_is_to_be_waited_for_with_gloo_alone(transport: Transport, simulated: SimulatedWorld) -> None:
    simulated.transport = transport
    if transport is not Transport.UNLIMITED:
        simulated.run(left_alone, ranks=2)
        return
    race = race_of(simulated, left_alone, seeds=[0])
    assert (race.kind, race.rank) == ("never-waited", 0)


def swallows(context: RankContext, ending: type[Exception] | None) -> None:
    """Rank 1 reads too early, and its code catches what it is told."""
    if context.rank == 0:
        dist.send(torch.ones(4), 1)
        return
    buffer = torch.zeros(4)
    work: Any = dist.irecv(buffer, 0)
    try:
        buffer.sum()
    except Exception as error:
        if ending is not None:
            raise ending("a stage failed") from error
    work.wait()


@pytest.mark.parametrize("ending", [None, RuntimeError])
def test_a_race_is_told_though_code_catches_it(ending: type[Exception] | None, simulated: SimulatedWorld) -> None:
    assert race_of(simulated, swallows, ending, seeds=[0]).kind == "read-before-wait"

"""PipelineSchedule against plain autograd, through every kind of boundary, and the input it refuses."""

import math
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.pipeline import PipelineSchedule, Schedule, ScheduleError, build
from pipeproof.pipeline.boundary import BoundaryError
from pipeproof.pipeline.stage import StageError
from pipeproof.pipeline.step import MicrobatchError
from pipeproof.pipeline.transport import DistributedTransport, Message
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support import steps
from tests.support.steps import loss_fn

Pair = tuple[Any, Any]


pairs = partial(steps.pairs, rows=2, width=4)


def chain(stages: int) -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Linear(4, 4) for _ in range(stages)]


def alone(
    kind: str = "gpipe", count: int = 2, stages: int = 1, **more: Any
) -> tuple[PipelineSchedule, list[nn.Module]]:
    modules = chain(stages)
    return PipelineSchedule(kind=kind, n_microbatches=count, stages=modules, loss_fn=loss_fn, **more), modules


def plain_gradients(modules: Sequence[nn.Module], data: Sequence[Pair], divisor: float) -> list[Tensor]:
    whole = nn.Sequential(*modules)
    total: Any = sum(loss_fn(whole(x), y) / divisor for x, y in data)
    return list(torch.autograd.grad(total, list(whole.parameters())))


def norm_of(gradients: Sequence[Tensor]) -> float:
    return torch.cat([one.flatten() for one in gradients]).norm().item()


def near(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and bool((one - other).norm() <= 1e-6 * other.norm())


def test_one_process_needs_no_group_and_gives_plain_gradients() -> None:
    schedule, modules = alone("interleaved", 3, 2)
    result = schedule.train_step(pairs(3))
    expected = plain_gradients(modules, pairs(3), 3)
    assert all(near(p.grad, e) for p, e in zip(nn.Sequential(*modules).parameters(), expected, strict=True))
    assert result.grad_norm == pytest.approx(norm_of(expected), rel=1e-6)
    assert result.loss == pytest.approx(sum(result.losses) / 3)
    assert result.profile.compute_s > 0


def test_the_divisor_is_the_users_if_given() -> None:
    schedule, modules = alone()
    schedule.train_step(pairs(2), loss_divisor=7.0)
    assert near(modules[0].weight.grad, plain_gradients(modules, pairs(2), 7.0)[0])  # type: ignore[arg-type]


def test_accumulated_gradients_are_added_to_and_cleared_only_after_an_update() -> None:
    schedule, modules = alone()
    losses = schedule.accumulate(pairs(2))
    assert sorted(losses) == [0, 1]
    schedule.train_step(pairs(2))
    assert near(modules[0].weight.grad, 2 * plain_gradients(modules, pairs(2), 2)[0])  # type: ignore[arg-type]


def test_a_step_after_an_update_starts_from_zero_whichever_schedule_runs_it() -> None:
    modules = chain(1)
    optimizer = torch.optim.SGD(modules[0].parameters(), lr=0.0)
    schedules = [
        PipelineSchedule(kind="1f1b", n_microbatches=count, stages=modules, loss_fn=loss_fn, optimizer=optimizer)
        for count in (2, 3)
    ]
    norms = [schedule.train_step(pairs(count)).grad_norm for schedule, count in zip(schedules, (2, 3), strict=True)]
    assert all(one.grad is None for one in modules[0].parameters()), "and not zeros: those would be a gradient"
    again = schedules[0].wrap(lambda parts: parts).train_step(pairs(2)).grad_norm
    assert again == norms[0]
    assert norms[1] == pytest.approx(norm_of(plain_gradients(modules, pairs(3), 3)), rel=1e-6)


def test_a_step_that_raises_leaves_nothing_for_the_next_one() -> None:
    modules, calls = chain(1), []

    def fragile(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("a bad batch")
        return loss_fn(output, target)

    schedule = PipelineSchedule(kind="1f1b", n_microbatches=2, stages=modules, loss_fn=fragile)
    with pytest.raises(RuntimeError, match="a bad batch"):
        schedule.train_step(pairs(2))
    schedule.train_step(pairs(2))
    assert near(modules[0].weight.grad, plain_gradients(modules, pairs(2), 2)[0])  # type: ignore[arg-type]


def test_a_norm_that_is_no_number_is_not_hidden_by_clipping() -> None:
    schedule, modules = alone(stages=1)
    modules[0].weight.register_hook(lambda grad: grad * float("nan"))  # type: ignore[union-attr, operator]
    result = schedule.train_step(pairs(2), max_norm=0.1)
    assert math.isnan(result.grad_norm)
    assert all(p.grad is not None and p.grad.isnan().all() for p in modules[0].parameters())


def test_infinite_losses_are_reported_and_not_raised() -> None:
    signs = iter([1.0, -1.0])
    schedule = PipelineSchedule(
        kind="1f1b", n_microbatches=2, stages=chain(1), loss_fn=lambda o, t: loss_fn(o, t) * next(signs) * float("inf")
    )
    result = schedule.train_step(pairs(2))
    assert result.losses == (math.inf, -math.inf)
    assert math.isnan(result.loss)


def test_clipping_scales_every_gradient() -> None:
    schedule, modules = alone()
    result = schedule.train_step(pairs(2), max_norm=0.01)
    total = norm_of([p.grad for p in modules[0].parameters()])
    assert result.grad_norm > 0.01
    assert total == pytest.approx(0.01, rel=1e-3)


def test_evaluation_leaves_gradients_and_mode_alone() -> None:
    frozen, modes = nn.Dropout().eval(), []
    frozen.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    linear = nn.Linear(4, 4)
    linear.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    stage = nn.Sequential(linear, frozen)
    schedule = PipelineSchedule(kind="gpipe", n_microbatches=1, stages=[stage], loss_fn=loss_fn)
    frozen.eval()
    result = schedule.eval_step(pairs(1))
    assert result.grad_norm is None
    assert 0 < result.profile.step_s < 60, "of the step, and not of the clock"
    assert modes == [False, False]
    assert [p.grad for p in stage.parameters()] == [None, None]
    assert [module.training for module in (stage, linear, frozen)] == [True, True, False]
    assert result.losses == schedule.train_step(pairs(1)).losses
    assert modes[2:] == [True, False]


class Gate(nn.Module):
    """Two streams and a flag; the second is used only where the flag, an integer, is odd."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor, flag: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.a(x) + (y if flag.item() % 2 else 0.0), self.b(y).t().contiguous().t(), flag


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor, flag: Tensor) -> Tensor:
        return self.a(x)


def gates() -> list[nn.Module]:
    torch.manual_seed(2)
    return [Gate(), Gate(), Gate(), Last()]


def flagged(flags: Sequence[int]) -> list[Pair]:
    return [((x, x.flip(0), torch.tensor(flag)), y) for (x, y), flag in zip(pairs(len(flags)), flags, strict=True)]


def gated(context: RankContext, kind: str, flags: Sequence[int], steps: int = 2) -> dict[int, list[Tensor | None]]:
    """Gradients of this rank's gates, by stage, after some steps, the later of which know the shapes already."""
    modules = gates()
    per_rank = 4 // context.ranks
    plan = build(kind, ranks=context.ranks, microbatches=len(flags), virtual=per_rank)
    own = {stage: modules[stage] for stage in plan.stages_of(context.rank)}
    stages = [*own.values()]
    schedule = PipelineSchedule(
        kind=plan,
        n_microbatches=len(flags),
        stages=stages,
        loss_fn=loss_fn,
        pp_group=DistributedTransport(context.group),
    )
    for _ in range(steps):
        for module in stages:
            module.zero_grad(set_to_none=True)
        schedule.train_step(flagged(flags))
    return {stage: [p.grad for p in module.parameters()] for stage, module in own.items()}


@pytest.mark.parametrize(("kind", "ranks"), [("1f1b", 4), ("gpipe", 4), ("naive", 4), ("interleaved", 2)])
@pytest.mark.parametrize("flags", [(1, 1, 1), (0, 1, 2), (0, 2, 4)], ids=["always", "sometimes", "never"])
def test_streams_used_in_some_microbatches_only(world: World, kind: str, ranks: int, flags: tuple[int, ...]) -> None:
    """Integers and strided tensors cross boundaries, and what was never used has None for a gradient, not zeros."""
    modules = gates()
    total: Any = 0.0
    for inputs, target in flagged(flags):
        for module in modules:
            inputs = module(*inputs)
        total = total + loss_fn(inputs, target) / len(flags)
    parameters = [p for module in modules for p in module.parameters()]
    expected = torch.autograd.grad(total, parameters, allow_unused=True)

    by_stage: dict[int, list[Tensor | None]] = {}
    for row in world.run(gated, kind, flags, ranks=ranks):
        by_stage |= row
    observed = [grad for stage in range(4) for grad in by_stage[stage]]
    assert [g is None for g in observed] == [e is None for e in expected]
    assert all(near(g, e) for g, e in zip(observed, expected, strict=True) if e is not None)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: s.train_step(pairs(3)), "got 3 microbatches: this schedule was built for 2"),
        (lambda s: s.train_step([pairs(1)[0], (torch.zeros(2, 4, 1), None)]), "microbatch 1 has .* 3 dimensions"),
        (lambda s: s.train_step([pairs(1)[0], ((torch.zeros(2, 4),) * 2, None)]), "microbatch 1 has .*, .*same number"),
        (lambda s: s.train_step([pairs(1)[0], (torch.zeros(2, 4).long(), None)]), "microbatch 1 has .int64"),
        (lambda s: s.train_step(pairs(2), loss_divisor=0), "loss_divisor is 0: expected a number above 0"),
    ],
    ids=["count", "dimensions", "members", "type", "divisor"],
)
def test_microbatches_that_cannot_run_are_refused(call: Callable[[PipelineSchedule], object], words: str) -> None:
    schedule, _ = alone()
    with pytest.raises(MicrobatchError, match=words):
        call(schedule)


def test_inputs_that_are_no_tensors_are_refused() -> None:
    schedule, _ = alone()
    with pytest.raises(BoundaryError, match="the input of microbatch 0 is a str"):
        schedule.train_step([("tokens", None), ("more", None)])


def test_stages_that_do_not_fit_the_schedule_are_refused() -> None:
    plan = build("interleaved", ranks=1, virtual=3, microbatches=2)
    for kind, count, words in (
        (plan, 2, "3 stages on rank 0 .0, 1, 2., but 1 modules"),
        (plan, 4, "for 2 microbatches, not 4"),
        (build("1f1b", ranks=2, microbatches=2), 2, "for 2 ranks, but the process group has 1"),
    ):
        with pytest.raises(ScheduleError, match=words):
            PipelineSchedule(kind=kind, n_microbatches=count, stages=chain(1), loss_fn=loss_fn)


def test_a_schedule_that_breaks_a_law_is_refused() -> None:
    good = build("1f1b", ranks=1, microbatches=2)
    backwards = Schedule("mine", 2, good.placement, (good.ranks[0][::-1],))
    with pytest.raises(ScheduleError, match="local-order"):
        PipelineSchedule(kind=backwards, n_microbatches=2, stages=chain(1), loss_fn=loss_fn)


class Moody(nn.Module):
    """Hands on fewer rows for the second microbatch, whose input has the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)[: 3 - self.calls]


def moody(context: RankContext) -> None:
    transport = DistributedTransport(context.group, timeout_s=5.0)
    stages = [Moody() if context.rank == 0 else nn.Linear(4, 4)]
    schedule = PipelineSchedule(kind="gpipe", n_microbatches=2, stages=stages, loss_fn=loss_fn, pp_group=transport)
    schedule.train_step(pairs(2))


@pytest.mark.sweep
def test_shapes_that_follow_from_values_are_refused(world: World) -> None:
    with pytest.raises(
        RankFailed, match=r"stage 0 handed on float32\[1, 4\] .* for microbatch 1, but float32\[2, 4\]"
    ) as e:
        world.run(moody, ranks=2)
    assert isinstance(e.value.cause, BoundaryError)


class Strict:
    """Ranks in threads, messages matched by posting order alone; a send waits until its receive is posted."""

    in_order = True

    def __init__(self, rank: int, n_ranks: int, ways: dict[tuple[int, int], "queue.Queue[Any]"]) -> None:
        self.rank, self.n_ranks, self._ways = rank, n_ranks, ways
        self._arrived: dict[object, Tensor] = {}

    def send(self, message: Message, buffer: Tensor) -> None:
        taken = threading.Event()
        self._ways[self.rank, message.peer].put((buffer.clone(), taken))
        assert taken.wait(10.0), f"{message} was never taken"

    def post(self, message: Message, nbytes: int) -> None:
        buffer, taken = self._ways[message.peer, self.rank].get(timeout=10.0)
        assert len(buffer) == nbytes, f"{message} got another's {len(buffer)} bytes, expected {nbytes}"
        self._arrived[message] = buffer
        taken.set()

    def receive(self, message: Message) -> Tensor:
        return self._arrived.pop(message)

    def flush(self) -> None:
        pass


def in_threads(ranks: int, job: Callable[[int, Strict], Any]) -> list[Any]:
    """What ``job`` gives on each rank, with its transport."""
    ways: dict[tuple[int, int], queue.Queue[Any]] = {
        (a, b): queue.Queue() for a in range(ranks) for b in range(ranks) if a != b
    }
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda rank: job(rank, Strict(rank, ranks, ways)), range(ranks)))


@pytest.mark.parametrize(
    ("kind", "ranks", "virtual"), [("naive", 3, 1), ("gpipe", 3, 1), ("1f1b", 3, 1), ("interleaved", 2, 2)]
)
def test_every_schedule_runs_over_a_strict_rendezvous_in_posting_order(kind: str, ranks: int, virtual: int) -> None:
    """As NCCL would have it: lowered order, headers and gathers make no cycle and pair no wrong messages."""
    plan = build(kind, ranks=ranks, virtual=virtual, microbatches=5)
    modules = chain(plan.n_stages)
    data = [(x[: 1 + m % 2], y[: 1 + m % 2]) for m, (x, y) in enumerate(pairs(5))]  # two lengths
    expected = plain_gradients(modules, data, 5)

    def one(rank: int, transport: Strict) -> float | None:
        own = [modules[stage] for stage in plan.stages_of(rank)]
        schedule = PipelineSchedule(kind=plan, n_microbatches=5, stages=own, loss_fn=loss_fn, pp_group=transport)
        schedule.eval_step(data)
        schedule.train_step(data)
        for module in own:
            module.zero_grad()
        return schedule.train_step(data).grad_norm

    assert len(set(in_threads(ranks, one))) == 1
    observed = [p.grad for p in nn.Sequential(*modules).parameters()]
    assert all(near(g, e) for g, e in zip(observed, expected, strict=True))


class Counts(nn.Module):
    """Hands on a stream and a count, which the next stage, the ``last``, changes in place."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(4, 4), last

    def forward(self, x: Tensor, n: Tensor) -> Any:
        y = self.linear(x)
        n += 1
        return y * y * n.sum() if self.last else (y * y, n)


def counted(context: RankContext) -> list[Tensor | None]:
    torch.manual_seed(context.rank)
    module = Counts(last=context.rank == 1)
    transport = DistributedTransport(context.group, timeout_s=10.0)
    schedule = PipelineSchedule(kind="gpipe", n_microbatches=2, stages=[module], loss_fn=loss_fn, pp_group=transport)
    schedule.train_step([((x, torch.zeros(3, dtype=torch.int64)), y) for x, y in pairs(2)])
    return [p.grad for p in module.parameters()]


@pytest.mark.sweep
def test_an_integer_that_travelled_may_be_changed_in_place(world: World) -> None:
    assert all(grad is not None for grads in world.run(counted, ranks=2) for grad in grads)


def test_a_stage_that_changes_its_input_in_place_is_told_how_to_mend_it() -> None:
    modules = [nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))]
    schedule = PipelineSchedule(kind="interleaved", n_microbatches=1, stages=modules, loss_fn=loss_fn)
    with pytest.raises(StageError, match="stage 1 changes its input in place"):
        schedule.train_step(pairs(1))

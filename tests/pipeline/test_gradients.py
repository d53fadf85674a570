"""Between the last backward and the optimizer: tied copies, squares, scaling."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from pipeproof.core.observe.wrappers import AroundGradients
from pipeproof.pipeline import PipelineSchedule
from pipeproof.pipeline.gradients import StageGradients, TiedError, clip_factor, norm_of
from pipeproof.pipeline.stage import ModuleStage
from pipeproof.pipeline.step import Parts
from pipeproof.pipeline.transport import Alone, DistributedTransport
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.pipeline.test_step import Strict, in_threads

TIED = {0: "weight", 1: "weight", 2: "weight"}
PAIRS = [(torch.ones(2, 4), torch.zeros(2, 4))] * 2


def reduced(context: RankContext, have: tuple[int, ...], placement: tuple[int, ...]) -> list[object]:
    """Stages ``have`` have a gradient; the weight is tied over all three."""
    own = [stage for stage, rank in enumerate(placement) if rank == context.rank]
    stages = [ModuleStage(nn.Linear(2, 2, bias=False), stage) for stage in own]
    for stage in stages:
        parameter = next(stage.module.parameters())
        parameter.grad = torch.full((2, 2), 10.0**stage.index) if stage.index in have else None
    work = StageGradients(stages, DistributedTransport(context.group), placement, [TIED])
    work.reduce_tied()
    grads = [next(stage.module.parameters()).grad for stage in stages]
    return [*(None if g is None else g[0, 0].item() for g in grads), len(work.squares())]


@pytest.mark.parametrize(
    ("have", "total"),
    [((0, 1, 2), 111.0), ((1,), 10.0), ((0, 2), 101.0), ((), None)],
    ids=["all", "one", "ends", "none"],
)
def test_every_copy_gets_the_sum_and_one_rank_answers_for_it(
    world: World, have: tuple[int, ...], total: float | None
) -> None:
    answers = int(total is not None)
    assert world.run(reduced, have, (0, 1, 2), ranks=3) == [[total, answers], [total, 0], [total, 0]]
    assert world.run(reduced, have, (0, 1, 0), ranks=2) == [[total, total, answers], [total, 0]]


def plain(*modules: nn.Module, tied: tuple[dict[int, str], ...] = ()) -> StageGradients:
    stages = [ModuleStage(module, index) for index, module in enumerate(modules)]
    return StageGradients(stages, Alone(), (0,) * len(modules), tied)


def test_squares_count_a_tensor_once_and_skip_what_has_no_gradient() -> None:
    one, two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    one.weight.grad = torch.full((2, 2), 2.0)
    two.weight = one.weight
    assert plain(one, two).squares() == [pytest.approx(16.0)]
    assert plain(nn.Linear(1, 1)).squares() == []


def test_scale_touches_a_shared_tensor_once() -> None:
    one, two = nn.Linear(1, 1, bias=False), nn.Linear(1, 1)
    one.weight.grad = torch.ones(1, 1)
    two.weight = one.weight
    plain(one, two).scale(0.5)
    assert one.weight.grad.item() == 0.5


@pytest.mark.parametrize(
    ("tied", "words"),
    [
        ({0: "weight", 7: "weight"}, "there is no stage 7, stages are 0..1"),
        ({0: "weight", 1: "wheight"}, "stage 1 has no parameter of that name"),
    ],
)
def test_a_tie_that_the_stages_do_not_bear_out_is_refused(tied: dict[int, str], words: str) -> None:
    with pytest.raises(TiedError, match=words):
        plain(nn.Linear(1, 1), nn.Linear(1, 1), tied=(tied,))


def test_one_tensor_declared_as_two_copies_is_refused() -> None:
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    two.weight = one.weight
    with pytest.raises(TiedError, match="summed already"):
        plain(one, two, tied=({0: "weight", 1: "weight"},))


def test_the_norm_does_not_depend_on_how_squares_are_grouped() -> None:
    squares = [float(x) for x in torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))]
    assert norm_of(squares) == norm_of(squares[::-1]) == math.sqrt(math.fsum(squares))


def test_clipping_only_ever_shrinks() -> None:
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(4.0, 1.0) == pytest.approx(0.25)


def test_a_norm_that_is_no_number_gives_no_factor() -> None:
    assert math.isnan(clip_factor(math.nan, 1.0))
    assert clip_factor(math.inf, 1.0) == 0.0


def unlike(context: RankContext, kind: str) -> object:
    """Tied copies that differ between the ranks, or only in how they lie in memory."""
    weight = torch.arange(6.0).reshape(2, 3)
    if context.rank == 1:
        weight = {
            "shape": weight.t().contiguous(),
            "type": weight.double(),
            "strides": weight.t().contiguous().t(),
        }.get(kind, weight)
    module = nn.Module()
    module.weight = nn.Parameter(weight, requires_grad=not (kind == "frozen" and context.rank == 1))
    module.weight.grad = weight.clone() if module.weight.requires_grad else None
    stages = [ModuleStage(module, context.rank)]
    transport = DistributedTransport(context.group, timeout_s=10.0)
    work = StageGradients(stages, transport, (0, 1), [{0: "weight", 1: "weight"}])
    work.reduce_tied()
    work.reduce_tied()
    return None if module.weight.grad is None else module.weight.grad.tolist()


@pytest.mark.parametrize("kind", ["shape", "type", "frozen"])
def test_copies_that_are_not_alike_are_refused_in_words(world: World, kind: str) -> None:
    with pytest.raises(RankFailed, match="copies of one parameter must be alike") as caught:
        world.run(unlike, kind, ranks=2)
    assert isinstance(caught.value.cause, TiedError)


@pytest.mark.sweep
def test_copies_may_lie_in_memory_as_they_like(world: World) -> None:
    plain = (4 * torch.arange(6.0).reshape(2, 3)).tolist()
    assert world.run(unlike, "strides", ranks=2) == [plain, plain]


def test_a_strict_transport_that_ignores_tags_is_enough_for_tied_gradients() -> None:
    def one(rank: int, transport: Strict) -> float:
        module = nn.Linear(1, 1, bias=False)
        module.weight.grad = torch.full((1, 1), 10.0**rank)
        tied = [{0: "weight", 1: "weight"}]
        StageGradients([ModuleStage(module, rank)], transport, (0, 1), tied).reduce_tied()
        return module.weight.grad.item()

    assert in_threads(2, one) == [11.0, 11.0]


def step_of(**more: Any) -> tuple[PipelineSchedule, nn.Module]:
    module = nn.Linear(4, 4)
    given = {"kind": "gpipe", "n_microbatches": 2, "stages": [module], "loss_fn": nn.functional.mse_loss}
    return PipelineSchedule(**given, **more), module


class Raising(AroundGradients):
    """Gradient work of which one part raises."""

    def __init__(self, parts: Parts, part: str) -> None:
        super().__init__(parts.gradients, parts.stages)
        setattr(self, part, self._raise)

    def _raise(self, *_: object) -> Any:
        raise RuntimeError("a peer is gone")


@pytest.mark.parametrize("part", ["reduce_tied", "squares", "scale"])
def test_gradients_are_cleared_wherever_a_step_raises(part: str) -> None:
    schedule, module = step_of()
    broken = schedule.wrap(lambda parts: replace(parts, gradients=Raising(parts, part)))
    with pytest.raises(RuntimeError, match="a peer is gone"):
        broken.train_step(PAIRS, max_norm=1.0)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_gradients_are_cleared_where_sharing_the_losses_or_the_optimizer_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(*_: object) -> Any:
        raise RuntimeError("a peer is gone")

    for target in ("pipeproof.pipeline.step.gather", "torch.optim.SGD.step"):
        schedule, module = step_of()
        schedule._optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with monkeypatch.context() as patch:
            patch.setattr(target, gone)
            with pytest.raises(RuntimeError, match="a peer is gone"):
                schedule.train_step(PAIRS)
        assert all(parameter.grad is None for parameter in module.parameters()), target

"""A step divides and scales as its contract says: nothing else passes, and where nothing is said, it is asked for."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import Composed, Contract, check_step
from pipeproof.core.contract import DEFAULTS
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import Verdict
from pipeproof.reference.accumulation import Accumulation
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.chain_by_hand import Both, Chained, chain_step
from tests.support.golden import golden
from tests.support.pipeline_here import DATA, MSE, Job, layers

WIDTH, ROWS = 8, 4


@dataclass(frozen=True)
class Dividing:
    """How replicas divide: losses by ``losses``, sums by ``sums`` at last. ``counts`` are their microbatches.

    ``padded`` are the replica and the microbatch that are all padding. ``reported``: the loss of them all. ``said``:
    the contract. ``other``: what the last microbatch's loss is divided by, if not by the same.
    """

    losses: tuple[float, ...]
    sums: float
    counts: tuple[int, ...] = (2, 2)
    padded: tuple[int, int] | None = None
    reported: str = "own"
    stages: str = "all"
    said: Contract = DEFAULTS
    other: float | None = None


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output * 0).sum() if target.isnan().any() else nn.functional.mse_loss(output, target)


def step(context: RankContext, way: Dividing) -> Verdict:
    rank, draw = context.rank, torch.Generator().manual_seed(context.rank)
    count, by = way.counts[rank], Composed(loss_fn, stages=way.stages, contract=way.said)  # type: ignore[arg-type]
    data = [(torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, WIDTH, generator=draw)) for _ in range(count)]
    if way.padded is not None and way.padded[0] == rank:
        data[way.padded[1]][1].fill_(torch.nan)
    torch.manual_seed(0)
    stage, losses = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), list[float]()
    with check_step({0: stage}, data, against=by, timeout_s=20) as check:
        for x, target in data:
            loss = loss_fn(stage(x), target)
            losses.append(loss.item())
            torch.autograd.backward(loss / (way.other if way.other and len(losses) == count else way.losses[rank]))
        for parameter in stage.parameters():
            if context.ranks > 1:
                dist.all_reduce(_there(parameter.grad))
            parameter.grad = _there(parameter.grad) / way.sums
        check.gradients()
        check.report(losses=losses, loss=reported(way, sum(losses), count) if context.ranks > 1 else None)
    return check.verdict


def _there(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


def reported(way: Dividing, total: float, count: int) -> float:
    own = torch.tensor([total, float(count), total / count], dtype=torch.float64)
    dist.all_reduce(own)
    ways = {"own": total / count, "all": own[0].item() / own[1].item(), "mean": own[2].item() / len(way.counts)}
    return ways[way.reported]


def one_scale(rank: int) -> float:
    return 1024.0


def each_its_own(rank: int) -> float:
    return 1024.0 * 2**rank


def too_large(rank: int) -> float:
    return 3e38


LATE = Contract(accumulation=Accumulation(late=True))
RIGHT = {
    "averaged, the first is padding": Dividing((2, 2), 2, padded=(0, 0)),
    "added up, the first is padding": Dividing((4, 4), 1, padded=(0, 0)),
    "added up, all of one is padding": Dividing(
        (3, 3), 1, (1, 2), padded=(0, 0), reported="all", said=Contract(loss_divisor=3)
    ),
    "divided at last, the first is padding": Dividing((1, 1), 4, padded=(0, 0), said=LATE),
    "unequal, averaged": Dividing((3, 1), 2, (3, 1)),
    "unequal, averaged, as is the loss": Dividing((3, 1), 2, (3, 1), reported="mean"),
    "unequal, weighted, averaged": Dividing((2, 2), 2, (3, 1), reported="all", said=Contract(loss_divisor=4)),
    "unequal, added up": Dividing((4, 4), 1, (3, 1), reported="all", said=Contract(loss_divisor=4)),
    "one pipeline, divided at last, the first is padding": Dividing((1,), 3, (3,), padded=(0, 0), said=LATE),
    "one stage, divided at last": Dividing((1,), 3, (3,), padded=(0, 0), stages="one by one", said=LATE),
    "scaled by a constant": Dividing((2 / 64, 2 / 64), 2 * 64, said=Contract(loss_scale=64)),
    "by another divisor": Dividing((7,), 1, (3,), said=Contract(loss_divisor=7)),
}


@pytest.mark.parametrize("way", RIGHT.values(), ids=RIGHT)
def test_each_way_of_dividing_passes_as_it_is_said(way: Dividing, simulated: World) -> None:
    verdict = simulated.run(step, way, ranks=len(way.counts))[0]
    assert verdict.verdict == "pass", str(verdict)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_loss_that_is_scaled_is_right(ranks: int, simulated: World) -> None:
    verdict = simulated.run(chain_step, Chained(scale=one_scale), ranks=ranks)[0]
    assert (verdict.verdict, verdict.tier) == ("pass", "bitwise"), str(verdict)
    assert verdict.law("updated-parameters").checked == 2 * ranks


def test_each_rank_by_its_own_scale_is_wrong(simulated: World) -> None:
    verdict = simulated.run(chain_step, Chained(scale=each_its_own), ranks=2)[0]
    assert (verdict.verdict, verdict.cause[0].kind, verdict.cause[0].rank) == ("fail", "scale", 0), str(verdict)


def test_a_step_that_is_skipped_moves_nothing(simulated: World) -> None:
    verdict = simulated.run(chain_step, Chained(scale=too_large, far=1e4), ranks=2)[0]
    assert verdict.verdict == "unknown", str(verdict)
    assert verdict.law("updated-parameters").outcome == "pass"
    assert Reason.NOT_FINITE in verdict.law("boundaries").reasons, str(verdict)


class Overflowing(Both):
    """Its own weight's gradient overflows where the loss is scaled, and what it hands on does not."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(()))

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        return tuple(one + 1e37 * self.large for one in super().forward(*given))


def overflowing(rank: int) -> nn.Module:
    return Overflowing() if rank else Both()


def test_a_step_that_one_rank_alone_skips_is_wrong_on_the_others(simulated: World) -> None:
    verdict = simulated.run(chain_step, Chained(overflowing, scale=one_scale), ranks=2)[0]
    assert (verdict.verdict, verdict.law("updated-parameters").outcome) == ("fail", "fail"), str(verdict)
    assert (verdict.cause[0].kind, verdict.cause[0].rank) == ("step-skipped", 0), str(verdict)
    golden("\n".join(cause.detail for cause in verdict.cause), numbers=False)
    assert not verdict.alternatives


WRONG = {
    "not averaged": Dividing((2, 2), 1),
    "averaged twice": Dividing((4, 4), 2, padded=(0, 0)),
    "unequal, not averaged": Dividing((3, 1), 1, (3, 1)),
    "one by all, one by its own": Dividing((4, 2), 1),
    "one as if there were more": Dividing((2, 6), 2),
    "one microbatch alone is not divided": Dividing((3,), 1, (3,), other=1),
    "another scale than is said": Dividing((2 / 64, 2 / 64), 2 * 64, said=Contract(loss_scale=1024)),
    "another divisor than is said": Dividing((2, 2), 2, said=Contract(loss_divisor=7)),
    "divided at last by other than is said": Dividing((1, 1), 8, said=LATE),
    "nothing is divided": Dividing((1,), 1, (3,)),
    "multiplied, and not divided": Dividing((3 / 64,), 1, (3,)),
}


@pytest.mark.parametrize("name", [*WRONG])
def test_another_division_is_wrong(name: str, simulated: World) -> None:
    verdict = simulated.run(step, WRONG[name], ranks=len(WRONG[name].counts))[0]
    assert verdict.verdict == "fail", str(verdict)
    assert verdict.cause[0].kind == "scale"


ONCE, UNEQUAL = "all losses are {} times the contract's: if that is meant, {}", "unequal numbers of microbatches"
UNSAID = {
    "multiplied, and gradients divided": (Dividing((3 / 1024,), 1024, (3,)), ONCE.format(1024, "loss_scale=1024")),
    "one stage alone": (Dividing((3 / 64,), 64, (3,), stages="one by one"), ONCE.format(64, "loss_scale=64, or")),
    "a part": (Dividing((9,), 1 / 3, (3,)), ONCE.format("0.333333", "loss_scale=0.333333, or loss_divisor=9 where")),
    "one part in two hundred": (Dividing((3 / 1.005,), 1.005, (3,)), ONCE.format(1.005, "loss_scale=1.005")),
    "negated": (Dividing((-3,), -1, (3,)), "all losses are -1 times the contract's, which no contract says"),
    "divided at last": (Dividing((1, 1), 4, padded=(0, 0)), ONCE.format(2, "loss_scale=2, or loss_divisor=2 where")),
    "multiplied in replicas": (Dividing((1 / 32, 1 / 32), 2 * 64), ONCE.format(64, "loss_scale=64")),
    "unequal, added up": (Dividing((4, 4), 1, (3, 1), reported="all"), f"{UNEQUAL}, and losses are not divided by"),
    "unequal, by the other's": (Dividing((1, 3), 2, (3, 1)), "say loss_divisor=4, or what it is"),
}


@pytest.mark.parametrize("name", [*UNSAID])
def test_what_a_contract_does_not_say_is_asked_for(name: str, simulated: World) -> None:
    way, sentence = UNSAID[name]
    verdict = simulated.run(step, way, ranks=len(way.counts))[0]
    assert verdict.verdict == "unknown", str(verdict)
    assert sentence in verdict.details


def checked(divided: dict[int, float]) -> Verdict:
    """A step whose losses are multiplied, and the gradients of whose stages are ``divided``, by stage."""
    stages = layers(torch.tanh, torch.sin, torch.tanh)
    with check_step(dict(enumerate(stages)), DATA, against=Composed(MSE), rename="{}.{}".format) as check:
        Job(stages, times=128.0).step()
        for one, by in ((one, by) for stage, by in divided.items() for one in stages[stage].parameters()):
            _there(one.grad).div_(by)
        check.gradients()
    return check.verdict


@pytest.mark.parametrize("stages", [{0}, {1}, {2}, {0, 1}, {0, 1, 2}])
def test_stages_whose_gradients_are_not_divided_are_named(stages: set[int]) -> None:
    verdict = checked({other: 128.0 for other in range(3) if other not in stages})
    assert [law.name for law in verdict.laws if law.outcome == "fail"] == ["gradient"], str(verdict)
    named = {(cause.kind, cause.stage) for cause in verdict.cause}
    assert named == ({("scale", stage) for stage in stages} if len(stages) < 3 else {("scale", None)})

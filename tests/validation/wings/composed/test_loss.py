"""The loss is a link: it is divided and scaled as a contract says, and its targets tell which messages crossed."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import Contract, StageByStage, check_step
from pipeproof.core.contract import DEFAULTS
from pipeproof.core.ledger import Ledger
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import Verdict
from pipeproof.own.case import Case
from pipeproof.reference.accumulation import PLAIN, Accumulation
from pipeproof.wings.composed import validate_composed
from pipeproof.wings.composed.loss import Division, round_factor
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.chain_by_hand import Both, Chained, chain_step
from tests.support.golden import golden
from tests.support.pipeline_here import DATA, MSE, Job, checked, layers
from tests.support.sweeps import SWEEP

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
    count, by = way.counts[rank], StageByStage(loss_fn, stages=way.stages, contract=way.said)  # type: ignore[arg-type]
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


WRONG = {
    "not averaged": Dividing((2, 2), 1),
    "averaged twice": Dividing((4, 4), 2, padded=(0, 0)),
    "unequal, not averaged": Dividing((3, 1), 1, (3, 1)),
    "one by all, one by its own": Dividing((4, 2), 1),
    "one as if there were more": Dividing((2, 6), 2),
    "one microbatch alone is not divided": Dividing((3,), 1, (3,), other=1),
    "another scale than is said": Dividing((2 / 64, 2 / 64), 2 * 64, said=Contract(loss_scale=1024)),
    "scaled as is said, and not divided": Dividing((3 / 64,), 1, (3,), said=Contract(loss_scale=64)),
    "another divisor than is said": Dividing((2, 2), 2, said=Contract(loss_divisor=7)),
    "divided at last by other than is said": Dividing((1, 1), 8, said=LATE),
    "nothing is divided": Dividing((1,), 1, (3,)),
    "multiplied, and not divided": Dividing((3 / 64,), 1, (3,)),
}


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


WAYS = [
    *((name, way, "pass", "") for name, way in RIGHT.items()),
    *((name, way, "fail", "") for name, way in WRONG.items()),
    *((name, way, "unknown", sentence) for name, (way, sentence) in UNSAID.items()),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("way", "outcome", "sentence"), [one[1:] for one in WAYS], ids=[one[0] for one in WAYS])
def test_each_way_of_dividing(way: Dividing, outcome: str, sentence: str, simulated: World) -> None:
    verdict = simulated.run(step, way, ranks=len(way.counts))[0]
    assert verdict.outcome == outcome, str(verdict)
    assert [one.kind for one in verdict.causes[:1]] == ["scale"] * (outcome == "fail")
    assert sentence in verdict.details


class Overflowing(Both):
    """Its own weight's gradient overflows where the loss is scaled, and what it hands on does not."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(()))

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        return tuple(one + 1e37 * self.large for one in super().forward(*given))


def overflowing(rank: int) -> nn.Module:
    return Overflowing() if rank else Both()


SCALED = {
    "one stage": (Chained(scale=one_scale), 1, "pass", None),
    "three stages": (Chained(scale=one_scale), 3, "pass", None),
    "each rank by its own": (Chained(scale=each_its_own), 2, "fail", ("scale", 0)),
    "all skip": (Chained(scale=too_large, far=1e4), 2, "unknown", None),
    "one rank skips": (Chained(overflowing, scale=one_scale), 2, "fail", ("step-skipped", 0)),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_loss_may_be_scaled(name: str, simulated: World) -> None:
    way, ranks, outcome, cause = SCALED[name]
    verdict = simulated.run(chain_step, way, ranks=ranks)[0]
    assert verdict.outcome == outcome, str(verdict)
    assert [(one.kind, one.rank) for one in verdict.causes[:1]] == ([] if cause is None else [cause])
    update = verdict.law("updated-parameters")
    if outcome == "pass":
        assert (verdict.tier, update.checked) == ("bitwise", 2 * ranks)
    elif name == "all skip":
        assert (update.outcome, Reason.NOT_FINITE in verdict.law("boundaries").reasons) == ("pass", True)
    elif name == "one rank skips":
        golden("\n".join(one.detail for one in verdict.causes), numbers=False)
        assert (update.outcome, verdict.alternatives) == ("fail", ())


@pytest.mark.parametrize("stages", [{0}, {1}, {2}, {0, 1}, {0, 1, 2}])
def test_stages_that_divide_nothing_are_named(stages: set[int]) -> None:
    job, others = Job(layers(torch.tanh, torch.sin, torch.tanh), times=128.0), {0, 1, 2} - stages
    job.change = lambda: job.divide(128.0, *others) if others else None
    verdict = checked(job)
    assert [law.name for law in verdict.laws if law.outcome == "fail"] == ["gradient"], str(verdict)
    named = {(cause.kind, cause.stage) for cause in verdict.causes}
    assert named == ({("scale", stage) for stage in stages} if len(stages) < 3 else {("scale", None)})


@pytest.mark.parametrize(
    ("factor", "within", "found"),
    [(1000.0005, 1e-6, 1000.0), (0.3333334, 1e-6, 1 / 3), (0.33334, 1e-6, 0.33334), (1.5, 1e-3, 1.5)],
)
def test_factors_are_numbers_or_their_parts(factor: float, within: float, found: float) -> None:
    assert round_factor(factor, within) == found


@pytest.mark.parametrize(
    ("division", "note", "doubtful"),
    [
        (Division(PLAIN), "", False),
        (Division(PLAIN, came=0.5, replicas=2), "", False),  # replicas divide by their number and add up
        (Division(PLAIN, came=2.0, declared=True), "all losses are 2 times the contract's", False),
        (Division(PLAIN, came=2.0), "loss_scale=2, or loss_divisor=0.5 where", True),
    ],
)
def test_what_no_contract_says_is_in_doubt(division: Division, note: str, doubtful: bool) -> None:
    ledger = Ledger(["boundaries"])
    assert division.doubt(ledger, 2) == ""
    (law,) = ledger.laws()
    assert (note in law.note, Reason.LOSS_SCALE in law.reasons) == (True, doubtful)


def crossed(specimen: str, stages: int, **more: Any) -> Any:
    split = ",".join("1" for _ in range(stages))
    case = f"gpipe r{stages} s{stages} m4 split={split} model=mlp plan=train seed=0 specimen={specimen}"
    wrong = {"activations-crossed": 1, "microbatches-swapped": stages - 1}.get(specimen, 0)
    kind = {"microbatches-swapped": "swapped-data", "backward-of-another": "mispaired"}.get(specimen, "wrong-message")
    return pytest.param(case, wrong, kind, id=f"{specimen} in {stages}", **more)


CROSSED = [
    crossed("activations-crossed", 2),
    crossed("activations-crossed", 3, marks=SWEEP),
    crossed("activations-crossed", 4),
    *(crossed(one, 2, marks=SWEEP) for one in ("gradients-crossed", "microbatches-swapped", "backward-of-another")),
    *(crossed(one, 3) for one in ("gradients-crossed", "microbatches-swapped", "backward-of-another")),
]


@pytest.mark.parametrize(("case", "stage", "kind"), CROSSED)
def test_what_crossed_is_wrong_where_it_came(case: str, stage: int, kind: str, simulated: World) -> None:
    verdict = validate_composed(Case.parse(case), simulated)
    assert {one.stage for one in verdict.mismatches if one.law == "boundaries"} == {stage}, str(verdict)
    causes = [*verdict.causes, *(one for some in verdict.alternatives for one in some)]
    assert kind in {one.kind for one in causes}, str(verdict)
    if kind == "swapped-data":
        assert [(one.kind, one.stage) for one in verdict.causes] == [(kind, stage)]
    if "activations-crossed" in case:
        assert [(law.name, law.wrong) for law in verdict.laws if law.outcome == "fail"] == [("boundaries", 2)]
        assert [(one.rank, one.stage, one.microbatches) for one in verdict.causes] == [(1, 1, (0, 1))]
        golden(next(line for line in verdict.details.splitlines() if "loss, presence, gradient" in line))


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("times", [1.0, 128.0, 3.0])
def test_what_came_back_tells_whether_losses_are_cast(inside: bool, times: float) -> None:
    def cast(of_loss: bool) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=inside or not of_loss)

    data = [(x, torch.rand(4, 8)) for x, _ in DATA]
    job = Job(layers(torch.tanh, torch.tanh), data, cast=cast, times=times)
    job.change = lambda: job.divide(times)
    verdict = checked(job)
    assert verdict.outcome == ("pass" if times == 1.0 else "unknown"), str(verdict)
    assert (verdict.law("loss").outcome, verdict.law("gradient").outcome) == ("pass", "pass"), str(verdict)


class WithHead(nn.Module):
    """A last stage whose head only the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))


@pytest.mark.parametrize("times", [1.0, 128.0])
@pytest.mark.parametrize("wrong", [False, True])
def test_weights_that_the_loss_alone_uses_are_compared(times: float, wrong: bool) -> None:
    last = WithHead()
    job = Job([*layers(torch.tanh), last], loss_fn=lambda y, target: MSE(last.head(y), target), times=times)

    def change() -> None:
        job.divide(times)
        _there(last.head.weight.grad).mul_(1.001 if wrong else 1.0)

    job.change = change
    law = checked(job).law("gradient")
    assert (law.outcome, law.checked) == ("fail" if wrong else "pass", 6)


def of_some(output: Tensor, target: Tensor) -> Tensor:
    """A loss that takes no notice of the output where all of the target is zero."""
    return MSE(output, target) if bool(target.any()) else torch.zeros(())


class Skipping(Job):
    """No backward of ``lost`` runs, nor of a microbatch whose loss trains nothing."""

    lost: int | None = None

    def _train(self, m: int, x: Tensor, target: Any) -> float:
        if bool(target.any()) and m != self.lost:
            return super()._train(m, x, target)
        for stage in self.stages:
            x = stage(x.detach())
        return of_some(x, target).item()


@pytest.mark.parametrize("lost", [None, 2])
def test_a_loss_that_trains_nothing_owes_nothing(lost: int | None) -> None:
    job = Skipping(layers(torch.tanh, torch.sin), loss_fn=of_some)  # the first target is zero
    job.lost = lost
    verdict = checked(job)
    assert verdict.outcome == ("pass" if lost is None else "fail"), str(verdict)


def test_a_loss_of_a_head_owes_a_backward() -> None:
    last = WithHead()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return MSE(last.head(output if bool(target.any()) else output.detach()), target)

    verdict = checked(Skipping([*layers(torch.tanh), last], loss_fn=loss_fn))  # it drops the first one's backward
    assert verdict.outcome == "fail", str(verdict)

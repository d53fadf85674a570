"""Floors measured on a run: what order and precision do, and what a lost microbatch would."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pipeproof.core.floors import Floors
from pipeproof.core.limits import BF16, FP32, PRECISIONS
from pipeproof.core.tolerance import error, scalar_error, update_floor
from pipeproof.core.updates import Pending
from pipeproof.own.stages import owners
from pipeproof.reference.data import Batch, Shapes, microbatches
from pipeproof.reference.model import DTYPES, build_model
from pipeproof.reference.step import Contribution, Expected, Loss, Recipe, Reference
from tests.support.golden import golden
from tests.support.steps import Pairs, pairs

ORDERS = {0: [0, 1, 2, 3], 1: [3, 2, 1, 0]}


def data(model: str, seed: int = 0) -> list[Batch]:
    return microbatches(model, count=4, shapes=Shapes(ragged=True), seed=seed)


def floors_of(name: str, plan: Sequence[str] = ("train",), *, dtype: str = "fp32") -> tuple[Reference, Floors]:
    model = build_model(name, layers=4, seed=0, dtype=dtype)
    reference = Reference(model, owner=owners(model, (2, 2)), recipe=Recipe())
    pending = []
    for number, operation in enumerate(plan):
        batches = [batch.cast(DTYPES[dtype]) for batch in data(name, number)]
        pending.append(Pending(reference.perform(operation, batches, orders=ORDERS), batches, ORDERS))
    return reference, Floors(reference, pending)


@pytest.mark.parametrize("plan", [("train",), ("accumulate", "train")], ids="+".join)
@pytest.mark.parametrize("name", ["mlp", "gpt-tied"])
def test_rounding_is_small_and_a_lost_microbatch_is_not(name: str, plan: tuple[str, ...]) -> None:
    _, floors = floors_of(name, plan)
    for site in floors._last.gradients:
        floor = floors.gradient(site)
        assert 1e-9 < floor.largest < 3e-6, site
        assert FP32.least <= floor.limit < FP32.most
        assert floor.fault > 100 * floor.limit, site
    assert floors.worst() == max(floors.gradient(site).largest for site in floors._last.gradients)
    assert all(0 <= floors.loss(m).rounding < 1e-6 for m in range(4))
    assert floors.norm().largest < 1e-6


def test_the_floor_of_an_order_is_that_of_its_reverse() -> None:
    _, floors = floors_of("mlp")
    for site, expected in floors._last.gradients.items():
        parts = [floors._last.contributions[m].gradients[site] for m in reversed(ORDERS[site[0]])]
        assert floors.gradient(site).permutation == error(sum(parts), expected)  # type: ignore[arg-type]


def test_a_model_that_draws_otherwise_in_fp64_says_nothing_about_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout's mask depends on the dtype. Taken for rounding, it would excuse gradients of any size."""

    def otherwise(reference: Reference, expected: Expected, *_: object, **__: object) -> tuple[Contribution, ...]:
        return tuple(
            Contribution(2 * one.loss, {site: None if g is None else 3 * g for site, g in one.gradients.items()})
            for one in expected.contributions
        )

    monkeypatch.setattr("pipeproof.core.floors.in_double", otherwise)
    _, floors = floors_of("mlp")
    assert all(floors.gradient(site).rounding == 0 for site in floors._last.gradients)
    assert floors.loss(0).rounding == 0
    assert floors.norm().rounding < 1e-6


@pytest.mark.parametrize("name", ["mlp", "gpt-tied"])
def test_the_floor_of_an_update_is_about_what_rounding_does_to_it(name: str) -> None:
    """Which the update shows when it is made once more in fp64 and stored: nothing is left that its floor forbids."""
    reference, floors = floors_of(name)
    expected, rate = floors._last, reference._optimizer.param_groups[0]["lr"]
    clip = min(1.0, Recipe().max_norm / (expected.norm + 1e-6))
    for site, gradient in floors._apart_total.items():
        update = -rate * clip * gradient
        wide = expected.before[site[1]].double() + update
        before, after = expected.before[site[1]], expected.parameters[site]
        allowed, late = update_floor(floors.gradient(site), before, after), before.double() + 1.01 * update
        for observed, passes in ((wide, True), (late, False)):
            size = error(observed.to(before.dtype), after, base=before, rounded=True)
            assert (allowed.outcome(size) == "pass") == passes, site


@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
@pytest.mark.parametrize("name", ["mlp", "gpt-tied"])
def test_other_dtypes_have_floors_of_a_few_of_their_own_units(name: str, dtype: str) -> None:
    _, floors = floors_of(name, dtype=dtype)
    unit = PRECISIONS[DTYPES[dtype]].unit
    for site, expected in floors._last.gradients.items():
        assert expected.dtype is DTYPES[dtype]
        floor = floors.gradient(site)
        assert floor.precision is PRECISIONS[DTYPES[dtype]]
        assert unit / 2 < floor.rounding < 32 * unit, site
        assert floor.permutation < 8 * unit, site
    rounding = max(floors.loss(m).rounding for m in range(4))
    assert rounding < 8 * unit
    assert rounding > unit / 100 or dtype == "fp64"  # there weights that are one rounding off may give the same loss
    assert floors.norm().largest < 8 * unit


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("name", ["mlp", "gpt-tied"])
def test_the_same_sum_in_any_order_or_in_a_wide_accumulator_never_fails(name: str, dtype: str) -> None:
    reference, floors = floors_of(name, dtype=dtype)
    contributions = floors._last.contributions
    wide = [
        replace(one, gradients={site: g if g is None else g.double() for site, g in one.gradients.items()})
        for one in contributions
    ]
    others = [
        reference.accumulate(contributions, orders={0: order, 1: order})
        for order in itertools.islice(itertools.permutations(range(4)), 0, None, 4)
    ]
    others.append(reference.accumulate(wide, orders=ORDERS))
    allowed = {site: floors.gradient(site) for site in floors._last.gradients}
    for sums in others:
        for site, total in reference.total(sums).items():
            expected = floors._last.gradients[site]
            assert allowed[site].outcome(error(total.to(expected.dtype), expected)) != "fail", site


def test_a_step_that_vanished_proves_no_fault_where_it_did_not() -> None:
    """A weight of bf16 that stood still may have moved by one unit in another order of things."""
    _, floors = floors_of("mlp", dtype="bf16")
    site = (0, "blocks.0.norm.weight")
    assert torch.equal(floors._last.parameters[site], floors._last.before[site[1]])
    before, after = floors._last.before[site[1]], floors._last.parameters[site]
    allowed = update_floor(floors.gradient(site), before, after)
    assert allowed.outcome(0.0) == "unknown", "a lost microbatch would not show either"
    _, frozen = floors_of("frozen", dtype="bf16")
    still = (1, "blocks.2.linear.weight")
    before, after = frozen._last.before[still[1]], frozen._last.parameters[still]
    assert update_floor(frozen.gradient(still), before, after).outcome(math.inf) == "fail"


def test_a_parameter_without_a_gradient_has_no_floor() -> None:
    _, floors = floors_of("pair")
    assert floors.gradient((1, "blocks.3.other.weight")).largest == 0.0


class MakesItsOwn(nn.Linear):
    """Multiplies by a matrix of fp32 that it makes: such a model cannot run in fp64."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ torch.eye(x.shape[-1]))


def floors_beside(model: nn.Module, data: Pairs) -> Floors:
    """Of a step of ``model`` on one stage."""
    owner, orders = dict.fromkeys(dict(model.named_parameters()), 0), {0: range(len(data))}
    reference = Reference(model, owner=owner, recipe=Recipe(loss=Loss(nn.functional.mse_loss, 4.0)))
    batches = [Batch.of(*pair) for pair in data]
    return Floors(reference, [Pending(reference.perform("train", batches, orders=orders), batches, orders)])


def floors_of_own(kind: type[nn.Linear]) -> Floors:
    torch.manual_seed(0)
    return floors_beside(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), kind(8, 1)), pairs(rows=3, width=4, to=1, seed=1))


def test_where_fp64_cannot_run_no_more_passes_and_rounding_is_no_proof_of_a_fault() -> None:
    plain, narrow = floors_of_own(nn.Linear), floors_of_own(MakesItsOwn)
    for site in plain._last.gradients:
        wide, other = plain.gradient(site), narrow.gradient(site)
        assert (other.permutation, other.fault) == (wide.permutation, wide.fault)
        assert other.rounding == 0 < other.nudged < 1e-5
        assert other.limit <= wide.limit
        for size in (wide.limit / 2, other.limit * 1.01, FP32.most * 0.9):
            assert other.outcome(size) in (wide.outcome(size), "unknown"), size
        assert other.outcome(wide.fault) == "fail"
    golden(narrow.obstacle.partition(",")[0])
    assert plain.obstacle == ""


def test_a_loss_that_rounds_little_by_chance_may_be_as_far_off_as_others() -> None:
    floors = floors_of_own(nn.Linear)
    apart = sorted(scalar_error(own, one.loss) for own, one in zip(floors._last.losses, floors._apart[-1], strict=True))
    found = [floors.loss(k).rounding for k in range(4)]
    assert min(found) == (apart[1] + apart[2]) / 2
    assert max(found) == apart[-1]


def test_how_far_other_weights_move_a_step_is_measured_where_a_narrow_type_is_computed_in() -> None:
    assert floors_of("mlp")[1].moved is None
    moved = floors_of("mlp", dtype="bf16")[1].moved
    assert all(2.0**-9 < far < 0.2 and moved.leads[name] >= 1.5 * 2.0**-8 for name, far in moved.gradients.items())
    assert 0 < moved.norm < 0.1


def test_without_fp64_losses_and_norms_may_be_unknown() -> None:
    narrow = floors_of_own(MakesItsOwn)
    for floor in (narrow.loss(1), narrow.norm()):
        sizes = (FP32.least / 2, FP32.most / 2, FP32.most * 2)
        assert [floor.outcome(size) for size in sizes] == ["pass", "unknown", "fail"]
    shaky = replace(floor, nudged=1e-3)
    assert (floor.outcome(5e-3), shaky.outcome(5e-3)) == ("fail", "unknown")
    assert shaky.limit == floor.limit, "what other weights explain lets nothing pass"


def test_floors_never_raise_what_the_reference_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> tuple[Contribution, ...]:
        raise OSError("out of everything")

    for way in ("in_double", "one_place_off"):
        monkeypatch.setattr(f"pipeproof.core.floors.{way}", never)
    floors = floors_of_own(nn.Linear)
    assert [floors.gradient(site).nudged for site in floors._last.gradients] == [0.0] * 4
    golden(floors.obstacle)


class Casting(nn.Module):
    """A part of it computes in bf16, by autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.last(torch.tanh(self.first(x))).float()


class CastByHand(Casting):
    """The same, where it says what is cast."""

    def forward(self, x: Tensor) -> Tensor:
        for one in (self.first, self.last):
            x = nn.functional.linear(torch.tanh(x).bfloat16(), one.weight.bfloat16(), one.bias.bfloat16())
        return x.float()


class Dropping(Casting):
    """What it drops is drawn otherwise in fp64."""

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.rand(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(int(x.abs().sum() * 8)))
        return super().forward(x * (keep > 0.3))


@pytest.mark.parametrize("build", [Casting, CastByHand, Dropping])
@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_what_is_rounded_inside_a_reference_is_no_fault(factor: float, build: type[Casting]) -> None:
    """Where fp64 tells how coarsely, that passes; else it is no proof."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    floors = floors_beside(build(), [(torch.randn(8, 8, generator=draw), torch.zeros(8, 8)) for _ in range(4)])
    expected = floors._last
    told, outcome = build is not Dropping, "unknown" if build is Dropping else "pass"
    for site in expected.gradients:
        right, wide = expected.gradients[site], (floors._apart_total if told else floors._nudged_total)[site]
        other = (wide * factor).to(right.dtype)  # as another kernel, which rounds less, gives it
        floor = floors.gradient(site)
        assert floor.compare(other, right)[1] == (outcome if factor == 1.0 else "fail")
        assert floor.limit <= (BF16.least if told else FP32.most)
    why = "rounding was not measured against fp64: there the reference gives other losses"
    assert floors.obstacle == ("" if told else why)
    if told:  # a single tensor, as the last bias here, rounds little by chance
        gaps = {site: error(one, floors._apart_total[site]) for site, one in expected.gradients.items()}  # type: ignore[arg-type]
        usual = statistics.median(gaps.values())
        assert min(gaps.values()) < usual
        assert {site: floors.gradient(site).rounding for site in gaps} == {
            site: max(usual, gap) for site, gap in gaps.items()
        }
        assert min(floors.norm().rounding, *(floors.loss(m).rounding for m in range(4))) >= usual


class Constant(nn.Linear):
    """It has a table in bf16, which is no rounding of what is computed."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.arange(self.in_features).bfloat16())


def test_a_narrow_type_in_which_little_is_computed_lets_no_more_pass() -> None:
    plain, table = floors_of_own(nn.Linear), floors_of_own(Constant)
    assert table._narrowest is BF16
    assert table._coarse[0] is plain._coarse[0] is FP32

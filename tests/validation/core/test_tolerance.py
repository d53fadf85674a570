"""Errors and floors: what counts as rounding, what as a fault, and what as neither."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.core.limits import BF16, FP32, PRECISIONS
from pipeproof.core.tolerance import Floor, error, floor_of, rounding_of, same_bits, scalar_error, update_floor
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.support.steps import WIDTH, backward, blocks, loss_fn, pairs

ONES = [1.0, 1.0]


@pytest.mark.parametrize(
    ("observed", "expected", "size"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.4], [3.0, 4.0], 0.1),  # 0.4 / 4, above 0.4 / 5
        ([1.5] * 4, [1.0] * 4, 0.5),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        (ONES, [0.0, 0.0], math.inf),
        ([1.0, *ONES], ONES, math.inf),
        ([math.nan, 1.0], ONES, math.inf),
    ],
)
def test_error_is_the_larger_of_two_norms(observed: list[float], expected: list[float], size: float) -> None:
    assert error(torch.tensor(observed), torch.tensor(expected)) == pytest.approx(size)


def test_an_error_beside_a_movement_may_ignore_storage() -> None:
    assert error(torch.tensor([10.1]), torch.tensor([10.0]), base=torch.tensor([9.9])) == pytest.approx(1.0, rel=1e-4)
    assert scalar_error(1.1, 1.0) == pytest.approx(0.1)
    before, after = torch.ones(4), torch.ones(4) + 1e-4
    place = torch.nextafter(after, torch.tensor(2.0))
    assert error(place, after, base=before) > 1e-4
    assert error(place, after, base=before, rounded=True) == 0.0
    assert error(before, after, base=before, rounded=True) > 0.99
    assert error(after * float("nan"), after, base=before, rounded=True) == float("inf")


def test_bits_tell_zeros_and_types_apart() -> None:
    assert same_bits(torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64))
    assert not same_bits(torch.ones(2), torch.ones(3))
    assert same_bits(torch.ones(2, 3).t(), torch.ones(3, 2))


@pytest.mark.parametrize(
    ("floor", "limit", "outcomes"),
    [
        (Floor(0.0, 0.0, 1.0), FP32.least, {}),
        (Floor(0.0, 1.0, 1.0), FP32.most, {}),
        (
            Floor(1e-6, 5e-7, 0.1),
            1.6e-5,
            {0.0: "pass", 1.6e-5: "pass", 1.7e-5: "unknown", 0.99e-4: "unknown", 1e-4: "fail", math.inf: "fail"},
        ),
        (Floor(0.0, 1e-3, 1e-2), 1e-4, {1e-4: "pass", 2e-4: "unknown", 1.6e-2: "unknown", 1.7e-2: "fail"}),
        (Floor(2e-7, 8e-7, 0.5), 1.28e-5, {1 / 4096: "fail"}),  # one token of 4096
        (Floor(1e-6, 6e-6, 5e-5), 9.6e-5, {0.0: "unknown", 5e-5: "unknown"}),  # it could hide a lost microbatch
        (Floor(1e-6, 6e-6, 0.0), 9.6e-5, {1e-6: "pass"}),  # nothing can be lost of a loss
        (Floor(math.nan, 0.0, 0.0), None, {1.0: "fail"}),
        (Floor(0.0, math.nan, 0.0), None, {1.0: "fail"}),
    ],
)
def test_a_floor_bounds_what_counts_as_rounding(floor: Floor, limit: float | None, outcomes: dict[float, str]) -> None:
    assert limit is None or floor.limit == pytest.approx(limit, rel=1e-12)
    assert {size: floor.outcome(size) for size in outcomes} == outcomes


def test_a_narrower_type_rounds_as_that() -> None:
    floor = Floor(0.0, 1e-7, 0.1)
    assert floor.through(torch.float64) == floor
    through = floor.through(torch.bfloat16)
    assert (through.precision, through.rounding) == (BF16, BF16.unit)
    assert replace(floor, rounding=0.5).through(torch.bfloat16).rounding == 0.5
    summed = replace(floor, precision=BF16, sums=floor)  # wide sums of narrow summands
    assert (summed.through(torch.bfloat16).sums, summed.through(torch.float32)) == (None, summed)


def test_every_precision_excuses_a_few_of_its_own_roundings_and_no_lost_microbatch() -> None:
    for dtype, precision in PRECISIONS.items():
        assert precision.unit == torch.finfo(dtype).eps / 2
        assert precision.unit < precision.least < precision.most <= 1 / 16
        assert Floor(0.0, 0.0, 0.5, precision).outcome(2 * precision.least) == "unknown"
        assert Floor(0.0, 0.0, 0.5, precision).outcome(0.25) == "fail"
        assert Floor(precision.unit, 0.0, 0.5, precision).outcome(precision.unit) == "pass"


@pytest.mark.parametrize(("dtype", "outcome"), [(torch.float32, "pass"), (torch.bfloat16, "unknown")])
def test_bf16_passes_nothing_that_could_hide_a_lost_microbatch(dtype: torch.dtype, outcome: str) -> None:
    assert floor_of(torch.ones(4, dtype=dtype), [], torch.ones(4), [torch.ones(4) / 64]).outcome(0.0) == outcome


def test_what_is_rounding_alone_is_compared_with_its_own_rounding() -> None:
    noise = torch.tensor([3e-9, -4e-9])
    floor = floor_of(noise, [2 * noise], 1e-17 * torch.ones(2, dtype=torch.float64), [noise / 3])
    assert floor.noise
    assert [floor.outcome(e) for e in (0.0, 1.0, 15.0, 17.0, 1e3)] == ["pass", "pass", "pass", "unknown", "fail"]
    small = floor_of(noise, [noise], noise.double() * 1e-2, [noise])  # little of it is left in fp64, and not nothing
    assert not small.noise
    assert small.outcome(1.0) == "unknown"
    assert not floor_of(torch.zeros(2), [], torch.zeros(2), []).noise


def test_a_zero_of_which_fp64_has_a_trace_is_rounding_too() -> None:
    """How much rounding makes there is what it makes with other weights, and no more than the trace lets expect."""
    zero, trace, other = torch.zeros(2), torch.tensor([3e-16, -4e-16], dtype=torch.float64), torch.tensor([3e-7, 4e-7])
    floor = floor_of(zero, [zero], trace, [zero], again=lambda: other)
    assert floor.size == pytest.approx(5e-16 * 2**29, rel=1e-3)
    assert [floor.compare(n * other, zero)[1] for n in (0, 1, 8, 16, 1000)] == [
        "pass",
        "pass",
        "pass",
        "unknown",
        "fail",
    ]
    assert not rounding_of(zero, trace).noise, "nothing shows how much rounding makes"
    assert not rounding_of(zero, torch.zeros(2), again=lambda: other).noise, (
        "a unit that no input reached, and now one does"
    )
    assert not rounding_of(zero, 1e-3 * torch.ones(2), again=lambda: other).noise, "a gradient that fp32 lost"
    assert floor_of(zero, [], trace, [], again=lambda: torch.ones(2)).size == floor.size, "a unit that now is reached"


def test_a_measured_floor_sees_order_precision_and_the_least_microbatch() -> None:
    parts = [torch.tensor([1.0, 1.0]), torch.tensor([0.1, 0.0])]
    total = parts[0] + parts[1]
    floor = floor_of(total, [total * (1 + 1e-6)], total.double() * (1 + 1e-5), [*parts, None])
    assert floor.permutation == pytest.approx(1e-6, rel=0.2)
    assert floor.rounding == pytest.approx(1e-5, rel=1e-3)
    assert floor.fault == pytest.approx(0.1 / total.norm().item())


def test_the_floor_of_an_update_is_its_gradients_unless_the_last_place_hides_a_fault() -> None:
    gradient, before = Floor(1e-8, 1e-7, 0.25), torch.ones(3)
    assert update_floor(gradient, before, before + 1e-3) == gradient
    tiny = update_floor(gradient, before, before + 2**-22)
    assert [tiny.outcome(error) for error in (0.0, 1e-7, 0.1)] == ["unknown", "unknown", "fail"]
    assert update_floor(gradient, before, before).outcome(0.0) == "unknown"
    # A step of one large element beside many weights that may all have been rounded: both norms are asked.
    wide, one = torch.ones(10_000), torch.zeros(10_000)
    one[0] = 2**-14
    assert update_floor(replace(gradient, fault=0.125), wide, wide + one).outcome(0.0) == "unknown"


def test_a_whole_number_has_no_last_place() -> None:
    floor = Floor(0.0, 1e-7, 0.1)
    assert update_floor(floor, torch.tensor([1]), torch.tensor([2])) == floor


def test_an_update_larger_than_its_gradient_is_no_rounding_even_where_that_is() -> None:
    """Adam makes a step of any gradient, and weight decay needs none: that either was left out is no agreement."""
    gradient, before = torch.tensor([3e-9, -4e-9]), torch.zeros(2)
    noise = rounding_of(gradient, torch.zeros(2))
    assert noise.noise
    after = before - 0.1 * gradient
    floor = update_floor(noise, before, after, gradient)
    assert [floor.compare(before + k * after, after, base=before)[1] for k in (0, 2, 20, 999)] == [
        "pass",
        "pass",
        "unknown",
        "fail",
    ]
    for after in (before - 1e-3 * gradient.sign(), torch.full((2,), 0.99)):
        floor = update_floor(noise, before, after, gradient)
        left_out = error(before, after, base=before, rounded=True)
        assert [floor.outcome(one) for one in (1e-6, left_out, 100.0)] == ["pass", "unknown", "fail"]
        assert floor.compare(before, after, base=before)[1] == "unknown"


def test_a_step_that_follows_rounding_passes_where_it_is_as_long_and_no_decay() -> None:
    gradient, weights = torch.tensor([3e-9, -4e-9, 2e-9, 1e-9]), torch.tensor([0.5, 0.25, -0.5, 0.75])
    noise, signs = rounding_of(gradient, torch.zeros(4)), torch.tensor([1.0, -1.0, -1.0, 1.0])
    floor = update_floor(noise, weights, weights - 1e-3 * gradient.sign(), gradient)
    told = [
        floor.compare(weights - k * signs, weights - 1e-3 * gradient.sign(), base=weights)[1]
        for k in (0, 1e-4, 1e-3, 1e-2, 0.1)
    ]
    assert told == ["unknown", "unknown", "pass", "unknown", "fail"]
    decay = update_floor(noise, weights, 0.9 * weights, gradient)
    assert decay.compare(0.95 * weights, 0.9 * weights, base=weights)[1] == "unknown"
    still = update_floor(noise, weights, weights, torch.zeros(4))
    assert still.compare(weights - 1e-3 * signs, weights, base=weights)[1] == "unknown", "Adam makes that of rounding"


def judged(whitebox: WhiteBox, step: Callable[..., Any], **more: Any) -> Verdict:
    return whitebox.validate(step, **{"microbatches": pairs(), "ranks": 1, "loss_fn": loss_fn} | more)


def before_a_norm() -> nn.Module:
    """The bias of the linear layer has a gradient of rounding alone: what is added to all is taken away again."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def rows_turned(model: nn.Module, microbatches: list[Any], *, added: float = 0.0) -> Any:
    """Right, with rows in another order, which no mean notices; something is ``added`` to that bias's gradient."""
    losses = backward(model, [(x.flip(0), target.flip(0)) for x, target in microbatches])
    model.get_parameter("0.bias").grad += added
    return model, losses


def test_a_gradient_of_rounding_alone_has_its_own_floor(whitebox_here: WhiteBox) -> None:
    verdict = judged(whitebox_here, rows_turned, reference=before_a_norm)
    assert (verdict.outcome, verdict.tier) == ("pass", "fp32"), verdict
    assert "up to rounding" in verdict.law("gradient").note
    assert verdict.law("gradient").worst < 1e-6
    assert verdict.floor < 1e-6
    wrong = judged(whitebox_here, partial(rows_turned, added=1e-4), reference=before_a_norm)
    assert wrong.outcome == "fail", wrong
    assert [(one.law, one.parameter) for one in wrong.mismatches] == [("gradient", "0.bias")]
    assert "made of what they should be" not in wrong.details


def summed_after_a_norm() -> nn.Module:
    """What comes before the norm makes no difference to the sum of what it gives, and in fp32 is exactly zero."""
    torch.manual_seed(1)
    norm = nn.LayerNorm(WIDTH)
    nn.init.constant_(norm.bias, 0.1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), norm)


def total(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()


def one_by_one(model: nn.Module, microbatches: list[Any], *, added: float = 0.0, kept: bool = False) -> Any:
    """Right, with inputs a hair off; ``kept``: with the very inputs."""
    losses = backward(model, [(x if kept else x * (1 + 2**-22), target) for x, target in microbatches], by=total)
    weight = model.get_parameter("0.weight")
    assert not kept or not weight.grad.any(), "else it is another test"
    weight.grad += added
    return model, losses


def test_a_gradient_that_is_zero_by_rounding_has_a_floor(whitebox_here: WhiteBox) -> None:
    draw = torch.Generator().manual_seed(1)
    batches = [(torch.randn(2, WIDTH, generator=draw), torch.zeros(2, WIDTH)) for _ in range(4)]
    judge = partial(judged, whitebox_here, reference=summed_after_a_norm, microbatches=batches, loss_fn=total)
    verdict = judge(one_by_one)
    assert (verdict.outcome, verdict.tier) == ("pass", "fp32"), verdict
    assert "up to rounding" in verdict.law("gradient").note
    assert judge(partial(one_by_one, added=1e-3)).outcome == "fail"
    assert judge(partial(one_by_one, kept=True)).outcome == "pass"


def backwards_first(model: nn.Module, microbatches: list[Any]) -> Any:
    """Right, with the last microbatch first."""
    return model, backward(model, microbatches[::-1])[::-1]


def test_half_precision_rounds_as_it_does_and_no_finer(whitebox_here: WhiteBox) -> None:
    microbatches = [(x.half(), target.half()) for x, target in pairs(seed=0)]
    verdict = judged(whitebox_here, backwards_first, reference=lambda: blocks().half(), microbatches=microbatches)
    assert (verdict.outcome, verdict.tier) == ("pass", "fp16"), verdict
    assert verdict.law("gradient").worst > FP32.most


WIDE = torch.arange(1, 65) / 7  # most need more digits than bf16 has


def of_sums(nearest: float = 0.0) -> Floor:
    """Of sums in fp32 of what is in bf16, where ``nearest`` is what another order makes."""
    parts = [WIDE.bfloat16() / 64] * 2
    return floor_of(WIDE, [WIDE * (1 + nearest)], WIDE.double() * (1 + 2.0**-9), parts)


def test_what_agrees_as_sums_in_a_wider_type_do_passes_where_bf16_could_hide_a_lost_microbatch() -> None:
    floor = of_sums()
    assert floor.outcome(1e-6) == "unknown"
    assert floor.compare(WIDE * (1 + 1e-6), WIDE)[1:] == ("pass", floor.sums)
    assert floor.number(1e-6) == ("pass", floor.sums)
    assert floor.sums.precision is FP32
    assert floor.sums.limit == FP32.least
    assert of_sums(1.0).compare(WIDE * 1.01, WIDE)[1] != "pass"  # not even where another order makes much


def test_a_wide_sum_that_has_numbers_of_bf16_alone_fails_and_one_that_is_as_far_off_may_be_rounding() -> None:
    floor = of_sums()
    observed = WIDE.bfloat16().float()
    assert floor.compare(observed, WIDE)[1:] == ("fail", floor.sums)
    other = observed * (1 + 2.0**-16)
    assert floor.compare(other, WIDE)[1] == "unknown"
    few = slice(0, 8)  # by chance so few numbers may be such
    assert floor.compare(observed[few], WIDE[few])[1] == "unknown"

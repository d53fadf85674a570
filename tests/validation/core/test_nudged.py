"""What weights that are one rounding off move as far, or products that are rounded otherwise, proves no fault."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof import StepResult, watch
from pipeproof.core.measured import Compared, Measured
from pipeproof.core.nudged import Nudged, OtherProducts, doubt_rounding
from pipeproof.core.verdict import LawResult, Mismatch, Size, Verdict
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_record import record_step
from pipeproof.reference.products import CONVOLUTION, MATRICES
from pipeproof.reference.step import Expected
from pipeproof.whitebox import WhiteBox
from tests.support import steps
from tests.support.check_here import check_here, show_all
from tests.support.golden import golden
from tests.support.in_halves import InHalves, build
from tests.support.rounded_products import Rounded

loss_fn = nn.functional.mse_loss
DATA = steps.pairs(4, width=32, seed=0)
TF32 = 10  # bits behind the first
Hurt = Callable[[nn.Module], None]
MOVED = Nudged({"w": 0.2, "b": 0.1}, {"w": 0.01, "b": 0.01}, norm=0.02, loss=0.1, least=0.01)


def wrong(law: str = "gradient", name: str | None = "w", *, error: float = 0.25, times: float = 1.0) -> Mismatch:
    return Mismatch(law, 1, Size((2,), 1.0, factor=times), parameter=name, error=error, limit=0.03)


def verdict(*mismatches: Mismatch, **more: object) -> Verdict:
    laws = [LawResult(law, "fail", 2) for law in dict.fromkeys(one.law for one in mismatches)]
    return Verdict("a step", "fail", "none", (*laws, LawResult("loss", "pass", 2)), mismatches, **more)  # type: ignore[arg-type]


def outcome(*mismatches: Mismatch, moved: Nudged | None = MOVED, **more: object) -> str:
    return doubt_rounding(verdict(*mismatches, **more), lambda number: moved if number == 0 else None).outcome


def test_what_all_moves_as_far_is_unknown_and_anything_that_does_not_is_wrong() -> None:
    norm, loss = wrong("grad-norm", None, error=0.025), replace(wrong("loss", None, error=0.12), microbatch=1)
    assert outcome(wrong(), wrong(name="b", error=0.1), norm, loss) == "unknown"
    for more in (
        wrong(name="b"),
        wrong(name="other"),
        wrong(times=1.2),
        replace(norm, error=0.1),
        wrong("loss"),
        wrong("presence"),
    ):
        assert outcome(wrong(), more) == "fail", more
    assert outcome(wrong(), Mismatch("gradient", 1, parameter="w", error=None)) == "fail"
    assert outcome(wrong(), replace(wrong(name="b", error=0.1), limit=1e-6)) == "fail", "it is not of its size"
    assert outcome(wrong(), moved=None) == "fail"


def test_what_overflows_or_grows_out_of_zero_explains_nothing() -> None:
    site, zero = (0, "w"), (0, "b")
    expected = Expected("train", (1.0, 0.0), 0.5, gradients={site: torch.ones(2), zero: torch.zeros(2)}, norm=1.0)
    gradients = [{site: torch.tensor([1.0, far]), zero: torch.ones(2)} for far in (1.1, math.inf)]
    others = [*zip(gradients, ([1.01, 0.1], [math.inf, 0.0]), strict=True)]
    sizes = iter([1.05, math.nan])
    found = Nudged.measure(expected, others, unit=2.0**-8, least=0.0, norm=lambda _: next(sizes))
    assert found.gradients == pytest.approx({"w": 0.1})
    assert (found.leads, found.norm) == (pytest.approx({"w": 0.2, "b": 1.5 * 2.0**-8}), pytest.approx(0.05))
    assert found.loss == pytest.approx(0.01)


def test_what_follows_later_and_what_is_in_doubt_by_itself_need_not_move() -> None:
    later, doubtful = replace(wrong(name="other"), operation=2), wrong(name="other")
    assert outcome(wrong(), later) == "unknown"
    compared = Compared("gradient", 1, "unknown", parameter="other"), Compared("gradient", 1, "fail", parameter="w")
    found = doubt_rounding(verdict(wrong(), doubtful, measured=Measured(compared)), lambda _: MOVED)
    assert (found.outcome, {one.outcome for one in found.measured.compared}) == ("unknown", {"unknown"})
    golden(found.laws[0].note)


def test_boundaries_are_as_doubtful_as_the_results_that_follow_from_them() -> None:
    boundary = replace(wrong("boundaries", None, error=0.4), stage=1, microbatch=0)
    assert outcome(boundary, wrong()) == "unknown"
    assert outcome(boundary) == "unknown"
    assert outcome(boundary, wrong(name="b")) == "fail"
    assert outcome(boundary, wrong(), moved=None) == "fail"


def test_a_model_that_does_not_run_once_more_leaves_the_verdict_as_it_is() -> None:
    assert doubt_rounding(verdict(wrong()), lambda _: Nudged(**{"other": {}})).outcome == "fail"  # type: ignore[arg-type]


def narrow() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(372)
        layers = [nn.Linear(32, 32) for _ in range(3)]
        return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]).bfloat16()


def in_halves(model: nn.Module) -> None:
    for module in model.modules():
        module.__class__ = InHalves if isinstance(module, nn.Linear) else module.__class__


def mixed(model: nn.Module) -> None:
    model.get_parameter("4.weight").register_hook(lambda one: one + one.roll(1, 0) / 4)


def pairs() -> steps.Pairs:
    return [(x.bfloat16(), y.bfloat16()) for x, y in steps.pairs(2, rows=2, width=32, seed=1372)]


@pytest.mark.parametrize(
    ("change", "outcome", "beside"),
    [(in_halves, "unknown", True), (in_halves, "unknown", False), (mixed, "fail", True)],
)
def test_a_unit_near_zero_that_another_kernel_turns_is_no_fault(
    change: Callable[[nn.Module], None], outcome: str, beside: bool
) -> None:
    given = pairs()
    model, source = narrow(), SingleDevice(narrow, loss_fn) if beside else record_step(narrow(), given, loss_fn=loss_fn)
    change(model)
    found = check_here(model, given, source)
    assert (found.outcome, found.causes) == (outcome, ()), str(found)
    assert max(one.error for one in found.measured.of("gradient")) > 0.2


def step(
    model: nn.Sequential, microbatches: list[tuple[Tensor, Tensor]], change: Callable[[nn.Module], None]
) -> StepResult:
    change(model)
    stage = watch(model)
    return StepResult([stage], steps.backward(stage, microbatches, by=loss_fn))


step_in_halves, mixed_step = partial(step, change=in_halves), partial(step, change=mixed)


def test_nor_is_it_in_a_step_that_is_watched(whitebox_here: WhiteBox) -> None:
    found = whitebox_here.validate(step_in_halves, reference=narrow, microbatches=pairs(), ranks=1, loss_fn=loss_fn)
    assert (found.outcome, found.law("gradient").outcome) == ("unknown", "unknown"), str(found)
    golden(found.law("gradient").note)


def rounded(bits: int | None) -> Any:
    return nullcontext() if bits is None else Rounded(bits)


def checked(*, expected: int | None, observed: int | None, hurt: Hurt = lambda _: None, count: int = 4) -> Verdict:
    """A step with another kernel, and what is expected with products of so many bits."""
    model = build(InHalves)
    with rounded(expected):
        record = record_step(build(), DATA, loss_fn=loss_fn)

    def finish(check: Any, losses: list[float]) -> None:
        hurt(model)
        show_all(check, losses)

    with rounded(observed):
        return check_here(model, DATA, record, order=range(count), finish=finish)


def one_is_scaled(model: nn.Module) -> None:
    next(model.parameters()).grad *= 1.1


def test_all_that_is_a_little_off_is_unknown_with_its_cure() -> None:
    verdict = checked(expected=None, observed=TF32)
    assert verdict.outcome == "unknown", str(verdict)
    told = "the job computes matrix products of fp32 in TF32, and the reference in fp32"
    assert told in verdict.law("gradient").note
    assert "torch.set_float32_matmul_precision says how" in verdict.law("gradient").note
    assert checked(expected=TF32, observed=None).outcome == "pass", "TF32's own rounding was measured"


@pytest.mark.parametrize(("bits", "tier"), [(None, "fp32"), (TF32, "TF32"), (7, "bf16")])
def test_computed_alike_it_is_judged_and_other_kernels_pass(bits: int | None, tier: str) -> None:
    right = checked(expected=bits, observed=bits)
    assert (right.outcome, right.tier) == ("pass", tier)
    assert checked(expected=bits, observed=bits, hurt=one_is_scaled).outcome == "fail"


def test_a_microbatch_less_is_no_rounding() -> None:
    verdict = checked(expected=None, observed=TF32, count=3)
    assert verdict.outcome == "fail", str(verdict)


def otherwise(model: nn.Module, microbatches: list[Any], share: int = len(DATA)) -> StepResult:
    """On a rank that goes on with other products than it began with."""
    Rounded(TF32).__enter__()  # type: ignore[no-untyped-call]  # in torch
    stage = watch(model)
    return StepResult([stage], steps.backward(stage, microbatches, by=loss_fn, skipped=range(share, len(DATA))))


@pytest.mark.pipeproof_fresh_ranks
def test_what_ranks_are_told_in_the_step_is_no_fault_of_a_stage(whitebox: WhiteBox) -> None:
    given: dict[str, Any] = {"reference": build, "microbatches": DATA, "loss_fn": loss_fn, "ranks": 1}
    right = whitebox.validate(otherwise, **given)
    assert right.outcome == "unknown", str(right)
    golden(right.law("gradient").note, numbers=False)
    assert whitebox.validate(partial(otherwise, share=3), **given).outcome == "fail"


def test_of_several_ranks_any_may_be_other_and_older_records_say_nothing() -> None:
    plain, coarse = {MATRICES: "fp32"}, {MATRICES: "TF32", CONVOLUTION: "TF32"}
    assert OtherProducts.among(plain, [plain, {}]) is None
    assert OtherProducts.among({}, [coarse]) is None
    assert OtherProducts.among(plain, [plain, coarse]) == OtherProducts(MATRICES, "fp32", "TF32")
    assert OtherProducts.among(plain, [{MATRICES: "of another time"}]) is None

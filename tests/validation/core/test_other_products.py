"""Products of fp32 that are rounded more coarsely here than there prove no fault, and excuse none that is larger."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pipeproof.core.other_products import OtherProducts
from pipeproof.core.verdict import Verdict
from pipeproof.foreign import HandedBack, WhiteBox, watch
from pipeproof.records.step_check import check_step
from pipeproof.records.step_record import record_step
from pipeproof.reference.products import CONVOLUTION, MATRICES
from tests.support.golden import golden
from tests.support.in_halves import InHalves, build
from tests.support.rounded_products import Rounded
from tests.support.steps import Pairs, pairs

DATA = pairs(4, width=32, seed=0)
TF32 = 10  # bits behind the first
Hurt = Callable[[nn.Module], None]


def rounded(bits: int | None) -> Any:
    return nullcontext() if bits is None else Rounded(bits)


def checked(*, due: int | None, seen: int | None, hurt: Hurt = lambda _: None, job: Pairs = DATA) -> Verdict:
    """A step with another kernel, and what is due with products of so many bits."""
    mse, model = nn.functional.mse_loss, build(InHalves)
    with rounded(due):
        record = record_step(build(), DATA, loss_fn=mse)
    with rounded(seen), check_step(model, DATA, against=record) as check:
        losses = [mse(model(inputs), target) for inputs, target in job]
        (torch.stack(losses).sum() / 4).backward()
        hurt(model)
        check.gradients()
        check.report(losses=[loss.item() for loss in losses])
    return check.verdict


def one_is_scaled(model: nn.Module) -> None:
    first = next(model.parameters())
    assert first.grad is not None
    first.grad *= 1.1


def test_all_that_is_a_little_off_is_unknown_with_its_cure() -> None:
    verdict = checked(due=None, seen=TF32)
    assert verdict.verdict == "unknown", str(verdict)
    told = "the job computes matrix products of fp32 in TF32, and what is due was computed in fp32"
    assert told in verdict.law("gradient").note
    assert "torch.set_float32_matmul_precision says how" in verdict.law("gradient").note
    assert checked(due=TF32, seen=None).verdict == "pass", "TF32's own rounding was measured"


@pytest.mark.parametrize(("bits", "tier"), [(None, "fp32"), (TF32, "TF32"), (7, "bf16")])
def test_computed_alike_it_is_judged_and_other_kernels_pass(bits: int | None, tier: str) -> None:
    right = checked(due=bits, seen=bits)
    assert (right.verdict, right.tier) == ("pass", tier)
    assert checked(due=bits, seen=bits, hurt=one_is_scaled).verdict == "fail"


def test_a_microbatch_less_is_no_rounding() -> None:
    verdict = checked(due=None, seen=TF32, job=DATA[:3])
    assert verdict.verdict == "fail", str(verdict)


def step(model: nn.Module, microbatches: list[Any], share: int = len(DATA)) -> HandedBack:
    """On a rank that goes on with other products than it began with."""
    Rounded(TF32).__enter__()  # type: ignore[no-untyped-call]  # in torch
    stage = watch(model)
    losses = [nn.functional.mse_loss(stage(x), y) for x, y in microbatches]
    (torch.stack(losses[:share]).sum() / len(losses)).backward()
    return HandedBack([stage], [loss.item() for loss in losses])


@pytest.mark.pipeproof_fresh_ranks
def test_what_ranks_are_told_in_the_step_is_no_fault_of_a_stage(whitebox: WhiteBox) -> None:
    given: dict[str, Any] = {"reference": build, "microbatches": DATA, "loss_fn": nn.functional.mse_loss, "ranks": 1}
    right = whitebox.validate(step, **given)
    assert right.verdict == "unknown", str(right)
    golden(right.law("gradient").note, numbers=False)
    assert whitebox.validate(partial(step, share=3), **given).verdict == "fail"


def test_of_several_ranks_any_may_be_other_and_older_records_say_nothing() -> None:
    plain, coarse = {MATRICES: "fp32"}, {MATRICES: "TF32", CONVOLUTION: "TF32"}
    assert OtherProducts.among(plain, [plain, {}]) is None
    assert OtherProducts.among({}, [coarse]) is None
    assert OtherProducts.among(plain, [plain, coarse]) == OtherProducts(MATRICES, "fp32", "TF32")
    assert OtherProducts.among(plain, [{MATRICES: "of another time"}]) is None

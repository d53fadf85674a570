"""What an optimizer makes of gradients within their limits is no proof of a fault, and a wrong rate is one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof import StepResult, watch
from pipeproof.core.limits import BF16
from pipeproof.core.tolerance import Floor
from pipeproof.core.updates import gradients_off
from pipeproof.core.verdict import Verdict
from pipeproof.records.step_record import record_step
from pipeproof.reference.step import Site
from pipeproof.whitebox import WhiteBox
from tests.support.check_here import check_here
from tests.support.in_halves import InHalves, build
from tests.support.steps import Pairs, backward, pairs

FLOOR = Floor(0.0, 0.01, 1.0, BF16)  # so that a gradient's element may be off by 0.04 of the largest
DATA = pairs(4, width=32, seed=0)
IN_BF16 = [(x.bfloat16(), y.bfloat16()) for x, y in DATA]
GRADIENT = torch.tensor([1.0, -0.5, 0.2, 0.03, -0.01, 0.0])
W: Site = (0, "w")


def off(gradient: Tensor, *, floor: Floor = FLOOR, there: Tensor | None = None) -> list[Tensor]:
    """How far each way leads from ``gradient``."""
    there = gradient if there is None else there
    return [one[W] - gradient for one in gradients_off({W: gradient}, {W: floor}, there={W: there})]  # type: ignore[operator]


def test_every_element_is_off_by_its_limit_or_to_the_other_side_of_zero() -> None:
    up, down = off(GRADIENT)
    assert up.tolist() == pytest.approx([0.04, 0.04, 0.04, 0.04, 0.02, 0.0025], rel=1e-4)
    assert down.tolist() == pytest.approx([-one for one in up.tolist()], rel=1e-4)


def test_lines_of_zeros_stay_where_fp64_has_none_either() -> None:
    rows = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    assert off(rows)[0].tolist() == [[0.0, 0.0], [pytest.approx(0.04), 0.0]]
    assert off(rows, there=torch.full((2, 2), 1e-9))[0].all()


def test_a_gradient_of_rounding_alone_stays() -> None:
    assert not any(one.any() for one in off(GRADIENT, floor=Floor(0.0, 0.01, 1.0, BF16, size=1.0)))


def adam(model: nn.Module, rate: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate)


def muon(model: nn.Module, rate: float = 0.01) -> torch.optim.Optimizer:
    """It computes in bf16, whatever the weights are in."""
    return torch.optim.Muon([one for one in model.parameters() if one.dim() == 2], lr=rate)


def in_halves(model: nn.Module) -> nn.Module:
    """``model``, with another kernel than the reference's."""
    own = build(InHalves).to(next(model.parameters()).dtype)
    own.load_state_dict(model.state_dict())
    return own


def checked(
    rate: float,
    *,
    data: Pairs,
    makes: Callable[[nn.Module, float], torch.optim.Optimizer] = adam,
) -> Verdict:
    """A step that is held against a record."""
    mse, model = nn.functional.mse_loss, build().to(data[0][0].dtype)
    job = in_halves(model)
    record, optimizer = record_step(model, data, loss_fn=mse, optimizer=makes(model, 0.01)), makes(job, rate)

    def finish(check: Any, losses: list[float]) -> None:
        check.gradients()
        optimizer.step()

    return check_here(job, data, record, finish=finish)


def step(model: nn.Module, microbatches: list[tuple[Tensor, Tensor]], rate: float = 0.01) -> StepResult:
    """In fp32. It clips, so that every element of a gradient counts for all."""
    own = in_halves(model)
    stage, optimizer = watch(own), adam(own, rate)
    losses = backward(stage, microbatches, by=nn.functional.mse_loss)
    gradients = {one: None if one.grad is None else one.grad.clone() for one in own.parameters()}
    norm = nn.utils.clip_grad_norm_(own.parameters(), 0.01).item()
    optimizer.step()
    return StepResult([stage], losses, norm, gradients=gradients, max_norm=0.01)


def watched(whitebox: WhiteBox, rate: float) -> Verdict:
    given: dict[str, Any] = {"microbatches": DATA, "loss_fn": nn.functional.mse_loss, "optimizer": adam}
    return whitebox.validate(partial(step, rate=rate), reference=build, ranks=1, **given)


def decided() -> Verdict:
    """A right step on the first data whose gradients are nowhere so near to zero that rounding may turn them round.

    Which these are depends on the processor's kernels.
    """
    every = (checked(0.01, data=pairs(4, width=32, seed=seed)) for seed in range(40))
    return next(one for one in every if one.law("updated-parameters").outcome != "unknown")


def test_a_right_step_of_adam_with_another_kernel_passes_and_a_wrong_rate_does_not(whitebox_here: WhiteBox) -> None:
    for right, exact in ((watched(whitebox_here, 0.01), 6), (decided(), 0)):
        assert right.law("gradient").outcome == right.law("updated-parameters").outcome == "pass", str(right)
        assert right.law("updated-parameters").exact == exact, "a record has no optimizer to ask"
    for wrong in (checked(0.0105, data=DATA), watched(whitebox_here, 0.0105)):
        assert wrong.law("updated-parameters").outcome == "fail", str(wrong)


def test_where_rounding_turns_gradients_round_a_record_does_not_know_what_adam_makes_of_them() -> None:
    right = checked(0.01, data=IN_BF16)
    assert right.law("gradient").outcome == "pass", str(right)
    assert (right.law("updated-parameters").outcome, right.causes) == ("unknown", ()), str(right)
    assert right.law("updated-parameters").left_out, "no element is named as wrong"


class InFp32(torch.optim.Optimizer):
    """Adam as a kernel makes it that has in fp32 how much of its averages is there by now, as CUDA's fused one."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        super().__init__(model.parameters(), {"lr": rate})
        self.inner = torch.optim.Adam(model.parameters(), lr=1.0)
        self.number = 0

    def step(self, closure: Any = None) -> None:
        self.number += 1
        off = [(1 - torch.tensor(beta) ** self.number) / (1 - beta**self.number) for beta in (0.9, 0.999)]
        self.inner.param_groups[0]["lr"] = self.param_groups[0]["lr"] * float(off[1].sqrt() / off[0])
        self.inner.step()


def second_update(rate: float) -> str:
    """How the second step of such a kernel is judged by Adam's own."""
    mse, model = nn.functional.mse_loss, build()
    optimizer = InFp32(model, rate)
    for number in range(2):
        expected = build()
        expected.load_state_dict(model.state_dict())
        own = torch.optim.Adam(expected.parameters(), lr=0.01)
        own.load_state_dict({**optimizer.inner.state_dict(), "param_groups": own.state_dict()["param_groups"]})
        record = record_step(expected, DATA, loss_fn=mse, optimizer=own)
        optimizer.zero_grad()
        verdict = check_here(model, DATA, record, finish=lambda check, _: (check.gradients(), optimizer.step()))
        if number:
            assert verdict.law("updated-parameters").exact == 0
    return verdict.law("updated-parameters").outcome


def test_settings_that_a_kernel_has_in_fp32_are_rounding_and_a_rate_that_is_a_little_off_is_not() -> None:
    assert second_update(0.01) == "pass"
    assert second_update(0.01001) == "fail"


def test_what_an_optimizer_makes_of_all_elements_together_is_no_proof_of_a_fault() -> None:
    right, wrong = (checked(rate, data=pairs(4, width=32, seed=3), makes=muon) for rate in (0.01, 0.04))
    assert right.law("updated-parameters").outcome != "fail", f"as far as this processor rounds: {right}"
    assert wrong.law("updated-parameters").outcome == "fail", str(wrong)

"""A gradient that is None where zeros are expected stands for these.

One that is missing where anything is expected does not.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.core.verdict import Verdict
from pipeproof.explain.atoms import Update
from pipeproof.explain.attribution import attribute
from pipeproof.own.case import Case
from pipeproof.records.case_record import record_expected
from pipeproof.records.compare import RUNS, compare
from pipeproof.records.record import Record
from pipeproof.reference.step import Gradient, Site
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden
from tests.support.steps import loss_fn, pairs
from tests.validation.explain.test_attribution import BIAS, UP, attributed, known, only, summed

WIDTH = 8
NONES = "no gradient where zeros are expected: "
DROPPED = "every microbatch is in every stage's sum"


class Idle(nn.Module):
    """Half of it is multiplied by zero: it is in the graph, and its gradients are zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + 0 * self.idle(x)


def build_model() -> nn.Module:
    torch.manual_seed(3)
    return Idle()


def build_idle() -> nn.Module:
    """All of it is multiplied by zero, but for what adds nothing to learn."""
    model = build_model()
    model.used = nn.Identity()
    return model


def judged(
    whitebox_here: WhiteBox, without: Collection[str], reference: Callable[[], nn.Module] = build_model
) -> Verdict:
    """A right step, but for the gradients of ``without``, which are None."""

    def step(model: nn.Module, microbatches: list[Any]) -> Any:
        losses = [loss_fn(model(x), target) for x, target in microbatches]
        (torch.stack(losses).sum() / len(losses)).backward()
        for name, parameter in model.named_parameters():
            if name in without or name.partition(".")[0] in without:
                parameter.grad = None
        return model, losses

    return whitebox_here.validate(step, reference=reference, microbatches=pairs(), ranks=1, loss_fn=loss_fn)


@pytest.mark.parametrize("without", [["idle"], ["idle.bias"]], ids=["both", "one"])
def test_none_where_zeros_are_due_passes_and_is_told(whitebox_here: WhiteBox, without: list[str]) -> None:
    verdict = judged(whitebox_here, without)
    assert verdict.outcome == "pass", verdict
    golden(verdict.law("presence").note)


def test_one_that_is_missing_where_something_is_due_fails(whitebox_here: WhiteBox) -> None:
    verdict = judged(whitebox_here, ["used.bias"])
    assert [(cause.kind, cause.parameter) for cause in verdict.causes] == [("missing", "used.bias")]
    assert DROPPED in [one.evidence for one in verdict.ruled_out], "the weight shows it"


def test_zeros_that_are_due_tell_nothing_of_the_microbatches(whitebox_here: WhiteBox) -> None:
    verdict = judged(whitebox_here, ["used"])
    assert [(cause.kind, cause.parameter, cause.detail) for cause in verdict.causes] == [
        ("missing", "used.bias", "also: used.weight")
    ], "two others have their gradients: it is not every parameter"
    assert verdict.law("gradient").outcome == "unknown"
    assert DROPPED not in [one.evidence for one in verdict.ruled_out]


def test_where_no_parameter_has_a_gradient_every_one_is_named(whitebox_here: WhiteBox) -> None:
    verdict = judged(whitebox_here, ["used", "idle"])
    assert [(cause.kind, cause.parameter, cause.detail) for cause in verdict.causes] == [
        ("missing", None, "every gradient")
    ]


def test_where_all_is_none_and_zeros_nothing_was_compared(whitebox_here: WhiteBox) -> None:
    verdict = judged(whitebox_here, ["idle"], reference=build_idle)
    assert verdict.outcome == "unknown", verdict
    assert verdict.law("gradient").note == "nothing was compared"


@pytest.mark.parametrize("zeros_first", [True, False])
def test_two_runs_agree_whichever_has_the_zeros(zeros_first: bool) -> None:
    expected = record_expected(Case.parse("1f1b r2 s2 m3 split=1,1 model=mlp plan=train seed=3"))
    name = min(expected.operations[0].gradients)
    zeros, nones = (with_gradient(expected, name, each) for each in (torch.zeros_like, lambda _: None))
    verdict = compare(zeros, nones, sides=RUNS) if zeros_first else compare(nones, zeros, sides=RUNS)
    assert verdict.outcome == "pass", verdict
    told = NONES if zeros_first else "zeros where no gradient is expected: "
    assert told + name in verdict.law("presence").note
    assert compare(nones, expected, sides=RUNS).outcome == "fail", "what is missing is more than zeros"


def with_gradient(record: Record, name: str, change: Callable[[Tensor], Tensor | None]) -> Record:
    """``record`` with another gradient, and no norm and no update that would follow from the one it had."""
    one = record.operations[0]
    gradients = {**one.gradients, name: change(one.gradients[name])}  # type: ignore[arg-type]
    return replace(record, operations=(replace(one, gradients=gradients),))


def times(factor: float, stages: Collection[int]) -> Callable[[dict[Site, Gradient]], None]:
    def after(gradients: dict[Site, Gradient]) -> None:
        for site, one in gradients.items():
            if site[0] in stages and one is not None:
                one *= factor

    return after


def test_a_factor_near_1_is_told_of_every_stage_also_where_rounding_hides_each_microbatch() -> None:
    cause = only(attributed(after=times(0.97, range(3)), dtype=torch.bfloat16))
    assert (cause.kind, cause.stage, cause.factor) == ("scale", None, pytest.approx(0.97, rel=1e-2))


def test_a_factor_that_is_near_a_simple_one_is_not_taken_for_it() -> None:
    """As where each stage is clipped by its own norm."""
    cause = only(attributed(after=times(0.4936, [1]), dtype=torch.bfloat16))
    assert (cause.kind, cause.stage, cause.factor) == ("scale", 1, pytest.approx(0.4936, rel=2e-3))
    assert cause.detail == "0.49 times"
    assert only(attributed(after=times(0.5, [1]), dtype=torch.bfloat16)).factor == 0.5


def test_what_passes_beside_what_is_wrong_is_right() -> None:
    right, traced = known(torch.bfloat16)
    expected, observed = summed(right), summed(right)
    one, other = observed[UP], observed[BIAS]
    assert one is not None
    assert other is not None
    one += 0.1 * one.std() * torch.randn(one.shape, generator=torch.Generator().manual_seed(0))
    other.zero_()
    update = Update(observed, expected, traced, placement=(0, 1, 2))
    assert any(UP[1] in told for told in attribute(update).unknown)
    found = attribute(replace(update, passing={UP}))
    assert ([(cause.kind, cause.parameter) for cause in found.causes], found.unknown) == ([("zero", BIAS[1])], ())

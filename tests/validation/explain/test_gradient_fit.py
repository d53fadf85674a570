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
from pipeproof.own.case import Case
from pipeproof.records.case_record import record_expected
from pipeproof.records.compare import RUNS, compare
from pipeproof.records.record import Record
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden
from tests.support.steps import backward, loss_fn, pairs

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
        losses = backward(model, microbatches)
        for name, parameter in model.named_parameters():
            if name in without or name.partition(".")[0] in without:
                parameter.grad = None
        return model, losses

    return whitebox_here.validate(step, reference=reference, microbatches=pairs(), ranks=1, loss_fn=loss_fn)


@pytest.mark.parametrize(
    ("without", "reference", "outcome", "causes", "counted"),
    [
        (["idle"], build_model, "pass", [], None),
        (["idle.bias"], build_model, "pass", [], None),
        (["used.bias"], build_model, "fail", [("missing", "used.bias", "")], True),  # the weight shows every microbatch
        # Two others have their gradients, which are zeros and show none: it is not every parameter.
        (["used"], build_model, "fail", [("missing", "used.bias", "also: used.weight")], False),
        (["used", "idle"], build_model, "fail", [("missing", None, "every gradient")], False),
        (["idle"], build_idle, "unknown", [], None),  # all is none and zeros
    ],
)
def test_none_stands_for_zeros_and_for_nothing_else(
    whitebox_here: WhiteBox,
    without: list[str],
    reference: Callable[[], nn.Module],
    outcome: str,
    causes: list[tuple[str, str | None, str]],
    counted: bool | None,
) -> None:
    verdict = judged(whitebox_here, without, reference)
    assert verdict.outcome == outcome, verdict
    assert [(cause.kind, cause.parameter, cause.detail) for cause in verdict.causes] == causes
    assert counted in (None, DROPPED in [one.evidence for one in verdict.ruled_out])
    golden(f"{verdict.law('gradient').outcome} {verdict.law('gradient').note}\n{verdict.law('presence').note}")


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

"""Each extension point does with a double what it does with ours."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof.core.verdict import LawResult, Verdict
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.rule import follow_rules
from pipeproof.own import faults
from pipeproof.own.case import Case
from pipeproof.own.validator import validate
from pipeproof.whitebox import WhiteBox
from pipeproof.wings.primitives import Stack, primitive, stacked, validate_stack
from tests.support.doubles import ALWAYS_THE_LOSS, NOTED, InThisProcess, KnownLosses, OneFault, noted
from tests.support.steps import blocks, loss_fn, pairs

pytestmark = pytest.mark.pipeproof_one_rank


def step(model: Any, microbatches: list[tuple[Tensor, Tensor]], times: float = 1.0) -> tuple[nn.Module, list[float]]:
    module = blocks() if model is None else model
    losses = [times * loss_fn(module(x), target) for x, target in microbatches]
    (torch.stack(losses).sum() / len(losses)).backward()
    return module, [one.item() for one in losses]


def three_times(model: Any, microbatches: list[tuple[Tensor, Tensor]]) -> tuple[nn.Module, list[float]]:
    return step(model, microbatches, 3.0)


@pytest.mark.parametrize(("one", "outcome"), [(step, "pass"), (three_times, "fail")])
def test_a_world(one: Callable[..., Any], outcome: str) -> None:
    found = WhiteBox(InThisProcess()).validate(one, reference=blocks, microbatches=pairs(), ranks=1, loss_fn=loss_fn)
    assert found.outcome == outcome, str(found)


def test_a_world_in_this_process_leaves_it_as_it_was() -> None:
    def job(context: Any) -> None:
        os.environ["RUNS"] = "x"
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")

    def state() -> tuple[Any, ...]:
        return dict(os.environ), torch.get_default_dtype(), torch.get_float32_matmul_precision(), dist.is_initialized()

    before = state()
    InThisProcess().run(job, ranks=1)
    assert state() == before


def test_an_expectation() -> None:
    whitebox, losses = WhiteBox(InThisProcess()), step(None, pairs())[1]
    for known, outcome in ((losses, "pass"), ([2 * one for one in losses], "fail")):
        found = whitebox.validate(step, reference=KnownLosses(tuple(known)), microbatches=pairs(), ranks=1)
        assert found.outcome == outcome, str(found)


def test_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "extensions", lambda point: {"double": OneFault()})
    right = Case.parse("naive r1 s1 m2 split=1 model=mlp plan=train seed=0")
    wrong = Case.parse(f"{right} specimen=tripled")
    assert validate(right, InThisProcess()).outcome == "pass"
    (cause,) = validate(wrong, InThisProcess()).causes
    assert (cause.kind, cause.factor) == ("scale", 3.0)


def test_a_primitive(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()
    monkeypatch.setattr(primitive, "PRIMITIVES", {NOTED.name: NOTED})
    monkeypatch.setattr(stacked, "PARTS", {NOTED.name: noted(calls)})
    found = validate_stack(Stack({"ddp": 1}, (NOTED.name,)), WhiteBox(InThisProcess()))
    assert found.outcome == "pass", str(found)
    assert len(calls) == 4


def test_a_rule() -> None:
    verdict = Verdict("case", "fail", "none", (LawResult("loss", "fail", 1, wrong=1),))
    found = follow_rules(Evidence(verdict, (0,), 1, 1, gradients={}, norms=()), [ALWAYS_THE_LOSS])
    assert [one.kind for one in found.causes] == ["report"]

"""Beside the model, floors are measured once bits differ, from the state that the step began with."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.core.ledger import Ledger
from pipeproof.core.verdict import Verdict
from pipeproof.records import step_check, step_record
from pipeproof.records.floors_later import FloorsLater
from pipeproof.records.record import Record
from pipeproof.records.single_device import ReferenceBeside, SingleDevice
from pipeproof.records.step_check import check_step
from pipeproof.records.step_parts import StepPart
from tests.support.golden import golden
from tests.support.steps import backward

Data = list[tuple[Tensor, Tensor]]


def build() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target) * float(os.environ.get("FACTOR_OF_LOSS", "1"))


def checked(model: nn.Module, times: float, *, source: SingleDevice, late: Callable[[Data], object]) -> Verdict:
    """A step whose first gradient is so many times what is expected; ``late`` comes after it was compared."""
    draw = torch.Generator().manual_seed(1)
    data = [(x, y) for x, y in torch.randn(4, 2, 3, 4, generator=draw)]
    with check_step(model, data, against=source) as check:
        losses = backward(model, data, by=loss_fn)
        gradient = model.get_parameter("0.weight").grad
        assert gradient is not None
        gradient.mul_(times)
        check.gradients()
        check.report(losses=losses)
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        model.zero_grad(set_to_none=False)
        late(data)
    return check.verdict


@pytest.mark.parametrize(("times", "verdict", "runs"), [(1.0, "pass", 0), (1 + 2e-7, "pass", 1), (1.5, "fail", 1)])
def test_floors_are_measured_once_where_bits_differ(
    times: float, verdict: str, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, floors = list[object](), step_record.OneDevice._measure

    def counting(*given: object, **more: object) -> object:
        measured.append(given)
        return floors(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(step_record.OneDevice, "_measure", counting)
    found = checked(build(), times, source=SingleDevice(build, loss_fn), late=lambda data: None)
    assert (found.outcome, len(measured)) == (verdict, runs), str(found)
    assert found.law("gradient").floor > 0 or not runs


def test_the_reference_runs_again_as_it_began() -> None:
    """The step writes to its inputs, and has the very weights that the reference is built with."""
    model = build()
    source = SingleDevice(lambda: model, loss_fn)
    found = checked(model, 1 + 2e-7, source=source, late=lambda data: [one.zero_() for one, _ in data])
    assert found.outcome == "pass", str(found)
    assert found.law("gradient").exact == 3


def test_a_reference_that_gives_another_loss_later_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(_: Data) -> None:
        monkeypatch.setenv("FACTOR_OF_LOSS", "2")

    found = checked(build(), 1 + 2e-7, source=SingleDevice(build, loss_fn), late=late)
    assert found.outcome == "unknown", str(found)
    golden(found.law("comparable").note, numbers=False)


def test_what_waits_keeps_its_order_and_its_content() -> None:
    later, made, expected = FloorsLater(wait=True), list[object](), {"a": torch.ones(2), "b": torch.ones(2)}
    later.gradient("a", torch.ones(2), expected, lambda one: made.append(("a", one)))
    assert len(made) == 1
    observed = torch.full((2,), 2.0)
    later.gradient(
        "b", observed, expected, lambda one: made.append(("b", float(one.sum()) if one is not None else None))
    )
    later.enter(lambda: made.append("c"))
    observed.zero_()
    assert len(made) == 1
    assert later.asks(Ledger([]))
    for entry in later.settle():
        entry()
    assert made[1:] == [("b", 4.0), "c"]
    later.enter(lambda: made.append("d"), exact=False)
    assert made[-1] == "d"


@pytest.mark.parametrize(("times", "floors"), [(1.0, True), (1.0, False), (1 + 2e-7, False)])
def test_nothing_is_fetched_once_no_rank_waits_any_more(
    times: float, floors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that has its verdict takes back what it laid out: another that asks for it then would wait in vain."""
    asked, (fetch, joined) = list[str](), (ReferenceBeside.fetch, step_check.judge_parts)

    def fetching(self: ReferenceBeside, name: str) -> Tensor:
        asked.append(name)
        return fetch(self, name)

    def joining(parts: Sequence[StepPart], record: Record, number: int, **more: Any) -> Verdict:
        asked.clear()
        monkeypatch.setattr(record.operations[number].gradients, "_last", None)  # as of another rank
        verdict = joined(parts, record, number, **more)
        assert asked == []
        return verdict

    monkeypatch.setattr(ReferenceBeside, "fetch", fetching)
    monkeypatch.setattr(step_check, "judge_parts", joining)
    source = SingleDevice(build, loss_fn, floors=floors)
    verdict = checked(build(), times, source=source, late=lambda data: None)
    assert (verdict.outcome, verdict.stopped) == ("pass", "")

"""The model beside a job: its loss is given what it gives, and floors are measured once bits differ.

They are measured from the state that the step began with.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.core.verdict import Verdict
from pipeproof.pipeline import PipelineSchedule
from pipeproof.records import step_check, step_record
from pipeproof.records.record import Record
from pipeproof.records.single_device import ReferenceBeside, SingleDevice
from pipeproof.records.step_check import check_step
from pipeproof.records.step_parts import StepPart
from pipeproof.records.step_record import record_step
from pipeproof.whitebox.validator import WhiteBox
from tests.support.golden import golden
from tests.support.steps import backward

DATA: list[tuple[object, object]] = [(torch.full((2, 3), float(k + 1)), torch.ones(2, 3)) for k in range(2)]


class Model(nn.Module):
    """Gives a tensor, a tuple of one, or a tuple of two."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.layer, self.outputs = nn.Linear(3, 3), outputs

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return y if not self.outputs else (y, y * y)[: self.outputs]


def of_tensor(output: Any, target: Tensor) -> Tensor:
    assert isinstance(output, Tensor)
    return nn.functional.mse_loss(output, target)


def of_tuple(output: Any, target: Tensor) -> Tensor:
    assert isinstance(output, tuple)
    return nn.functional.mse_loss(output[0], target) + output[-1].mean()


CASES = [(0, of_tensor), (1, of_tuple), (2, of_tuple)]


@pytest.mark.parametrize(("outputs", "loss_fn"), CASES)
def test_every_way_has_one_convention(
    whitebox_here: WhiteBox, outputs: int, loss_fn: Callable[[Any, Tensor], Tensor]
) -> None:
    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Model(outputs)

    def step(model: nn.Module, microbatches: list[Any]) -> Any:
        schedule = PipelineSchedule(kind="gpipe", n_microbatches=2, stages=[model], loss_fn=loss_fn)
        return model, schedule.train_step(microbatches, max_norm=1e6).losses

    observed = whitebox_here.validate(step, reference=build, microbatches=DATA, ranks=1, loss_fn=loss_fn)
    assert observed.outcome == "pass", str(observed)
    for against in (record_step(build(), DATA, loss_fn=loss_fn), SingleDevice(build, loss_fn)):
        model = build()
        with check_step(model, DATA, against=against) as check:
            _, losses = step(model, DATA)
            check.gradients()
            check.report(losses=losses)
        assert check.verdict.outcome == "pass", str(check.verdict)


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


def test_a_total_waits_for_the_losses_before_it() -> None:
    """It is held against what they add up to, also where it is what the reference gives."""
    model, data = build(), [(x, y) for x, y in torch.randn(4, 2, 3, 4, generator=torch.Generator().manual_seed(1))]
    expected = record_step(model, data, loss_fn=loss_fn, floors=False).operations[0].loss
    with check_step(model, data, against=SingleDevice(build, loss_fn)) as check:
        losses = backward(model, data, by=loss_fn)
        check.gradients()
        check.report(losses=[one * (1 + 2e-7) for one in losses], loss=expected)
    law = check.verdict.law("loss")
    assert (law.outcome, law.checked, law.exact) == ("pass", 5, 0), str(check.verdict)


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

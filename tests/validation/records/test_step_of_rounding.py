"""What an optimizer makes of gradients that are rounding alone, held against a record."""

import pytest
import torch
from torch import nn

from pipeproof.judging.verdict import Verdict
from pipeproof.records.step_check import check_step
from pipeproof.records.step_record import record_step
from tests.support.steps import pairs

loss_fn = nn.functional.mse_loss


def data() -> list[tuple[object, object]]:
    return pairs(3, width=8, seed=0)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_what_adam_makes_of_rounding_passes_where_it_goes_as_far(kind: type[torch.optim.Adam]) -> None:
    """A batch norm takes no notice of the bias before it, whose gradient is rounding; Adam takes a full step of it."""

    def before_a_norm() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))

    model = before_a_norm()
    record = record_step(model, data(), loss_fn=loss_fn, optimizer=kind(model.parameters(), lr=0.01))

    def stepped(*, times: float = 1.0, name: str = "0.bias") -> Verdict:
        model = before_a_norm()
        optimizer, spared = kind(model.parameters(), lr=0.01), model.get_parameter(name)
        with check_step(model, data(), against=record) as check:
            for inputs, target in data():
                (loss_fn(model(inputs.flip(0)), target.flip(0)) / 3).backward()
            check.gradients()
            before = spared.detach().clone()
            optimizer.step()
            with torch.no_grad():
                spared.copy_(before + times * (spared - before))
        return check.verdict

    right = stepped()
    assert right.law("updated-parameters").outcome == "pass", str(right)
    assert "follow rounding alone" in right.law("updated-parameters").note
    told = [stepped(times=times).law("updated-parameters").outcome for times in (0.0, 0.25, 100.0)]
    assert told == ["unknown", "unknown", "fail"]
    assert stepped(times=0.0, name="3.bias").law("updated-parameters").outcome == "fail"

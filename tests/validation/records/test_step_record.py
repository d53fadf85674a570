"""A step of anyone's model on one device, beside torch's own training loop."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from validation.judging.tolerance import same_bits
from validation.records.compare import compare
from validation.records.record import RecordError
from validation.records.record_file import read
from validation.records.step_record import record_step, write_record


class Tied(nn.Module):
    """Two names for one weight, a parameter that is never used, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.two.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.two(self.one(x).tanh()), x


def loss_fn(output: Tensor, extra: Tensor, target: Tensor) -> Tensor:
    return (output + 0.1 * extra - target).square().sum()


MICROBATCHES = [(torch.randn(3, 4), torch.randn(3, 4)) for _ in range(4)]


@pytest.fixture
def model() -> Tied:
    return Tied()


def test_it_is_the_step_that_a_plain_loop_makes(model: Tied) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):  # the second with a state
        record = record_step(
            model, MICROBATCHES, loss_fn=loss_fn, loss_divisor=12.0, optimizer=optimizer, max_norm=0.1
        ).operations[0]
        for name, parameter in model.named_parameters(remove_duplicate=False):
            assert same_bits(record.before[name], parameter.detach())
        losses = [loss_fn(*model(x), y) for x, y in MICROBATCHES]
        for loss in losses:
            (loss / 12.0).backward()
        assert record.losses == tuple(loss.item() for loss in losses)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            wanted = record.gradients[name]
            assert (parameter.grad is None) == (wanted is None)
            assert wanted is None or torch.allclose(parameter.grad, wanted, rtol=1e-6, atol=0)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
        assert record.norm == pytest.approx(norm, rel=1e-6)
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            assert torch.allclose(record.parameters[name], parameter, rtol=1e-6, atol=1e-6)


def test_model_and_optimizer_stay_as_they_are(model: Tied) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    record_step(model, MICROBATCHES, loss_fn=loss_fn, optimizer=optimizer)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


def test_floors_are_measured_and_a_lost_microbatch_is_far_above_them(model: Tied) -> None:
    record = record_step(model, MICROBATCHES, loss_fn=loss_fn)
    floors = record.operations[0].floors
    assert floors is not None
    floor = floors.gradients["one.weight"]
    assert 0 < floor.largest < floor.limit < floor.fault / 2
    assert len(floors.losses) == 4
    assert floors.gradients["unused.weight"].largest == 0.0
    assert record_step(model, MICROBATCHES, loss_fn=loss_fn, floors=False).operations[0].floors is None


def test_the_file_is_the_record(model: Tied, tmp_path: Path) -> None:
    record = record_step(model, MICROBATCHES, loss_fn=loss_fn, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    write_record(record, str(tmp_path / "x"))
    verdict = compare(record, read(tmp_path / "x"))
    assert (verdict.verdict, verdict.tier) == ("pass", "bitwise"), str(verdict)
    assert record.config["model"] == "Tied"


def test_randomness_that_is_not_seeded_is_refused(model: Tied) -> None:
    noisy = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    with pytest.raises(RecordError, match=r"does not give the same loss twice: microbatch 0 .* seed what it draws"):
        record_step(noisy, MICROBATCHES, loss_fn=nn.functional.mse_loss)

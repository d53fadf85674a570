"""A step of anyone's model on one device, beside torch's own training loop."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.core.contract import Contract, ContractError
from pipeproof.core.tolerance import same_bits
from pipeproof.core.verdict import Verdict
from pipeproof.records.compare import compare
from pipeproof.records.record import RecordError
from pipeproof.records.record_file import read
from pipeproof.records.step_check import check_step
from pipeproof.records.step_record import record_step, write_record
from tests.support.golden import golden
from tests.support.steps import pairs

mse = nn.functional.mse_loss


class Tied(nn.Module):
    """Two names for one weight, a parameter that is never used, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.two.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.two(self.one(x).tanh()), x


def loss_fn(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    output, extra = outputs
    return (output + 0.1 * extra - target).square().sum()


MICROBATCHES = [(torch.randn(3, 4), torch.randn(3, 4)) for _ in range(4)]


@pytest.fixture
def model() -> Tied:
    return Tied()


def test_it_is_the_step_that_a_plain_loop_makes(model: Tied) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):  # the second with a state
        record = record_step(
            model,
            MICROBATCHES,
            loss_fn=loss_fn,
            contract=Contract(loss_divisor=12.0, max_norm=0.1),
            optimizer=optimizer,
        ).operations[0]
        for name, parameter in model.named_parameters(remove_duplicate=False):
            assert same_bits(record.before[name], parameter.detach())
        losses = [loss_fn(model(x), y) for x, y in MICROBATCHES]
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
    floor = floors.gradients["one.weight"]
    assert 0 < floor.largest < floor.limit < floor.fault / 2
    assert len(floors.losses) == 4
    assert floors.gradients["unused.weight"].largest == 0.0
    assert record_step(model, MICROBATCHES, loss_fn=loss_fn, floors=False).operations[0].floors is None


def test_the_file_is_the_record(model: Tied, tmp_path: Path) -> None:
    record = record_step(model, MICROBATCHES, loss_fn=loss_fn, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    write_record(record, str(tmp_path / "x"))
    verdict = compare(record, read(tmp_path / "x"))
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), str(verdict)
    assert record.config["model"] == "Tied"
    written, floors = read(tmp_path / "x").operations[0].floors, record.operations[0].floors
    assert floors is not None
    assert written.updates.keys() == floors.updates.keys() == record.operations[0].parameters.keys()
    assert all(written.updates[name].limit == one.limit for name, one in floors.updates.items())


def test_randomness_that_is_not_seeded_is_refused(model: Tied) -> None:
    noisy = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    with pytest.raises(RecordError, match=r"does not give the same loss twice: microbatch 0 .* seed what it draws"):
        record_step(noisy, MICROBATCHES, loss_fn=mse)


@pytest.mark.parametrize(
    ("model", "microbatches", "loss", "words"),
    [
        (nn.Linear(4, 4).requires_grad_(False), 2, mse, "a Linear, has no parameter to train: nothing could be"),
        (nn.Linear(4, 4), 0, mse, "microbatches is empty: expected at least one"),
        (nn.Linear(4, 4), 2, lambda y, t: y.detach().sum(), "no parameter that is trained went into the loss"),
        (nn.Linear(4, 4), 2, lambda y, t: y - t, r"the loss has the shape \[2, 4\]: expected one number"),
    ],
)
def test_what_cannot_be_differentiated_is_refused(model: nn.Module, microbatches: int, loss: Any, words: str) -> None:
    pairs: list[tuple[object, object]] = [(torch.ones(2, 4), torch.ones(2, 4))] * microbatches
    with pytest.raises(ValueError, match=words):
        record_step(model, pairs, loss_fn=loss)


class MakesItsOwn(nn.Linear):
    """Makes a matrix of fp32, and has what cannot be copied: it cannot run in fp64."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ torch.eye(4))


def test_a_model_that_cannot_run_in_fp64_has_floors_that_let_less_pass() -> None:
    torch.manual_seed(0)
    narrow, plain = MakesItsOwn(), nn.Linear(4, 4)
    plain.load_state_dict(narrow.state_dict())
    pairs: list[tuple[object, object]] = [(torch.randn(2, 4), torch.randn(2, 4)) for _ in range(3)]
    floors, wide = (record_step(one, pairs, loss_fn=mse).operations[0].floors for one in (narrow, plain))
    assert floors is not None
    assert wide is not None
    for name, floor in floors.gradients.items():
        assert floor.limit <= wide.gradients[name].limit
        assert (floor.rounding, floor.fault) == (0.0, wide.gradients[name].fault)
    for floor in (floors.norm, *floors.losses):
        assert [floor.outcome(size) for size in (1e-6, 5e-5, 1e-3)] == ["pass", "unknown", "fail"]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_what_adam_makes_of_rounding_passes_where_it_goes_as_far(kind: type[torch.optim.Adam]) -> None:
    """A batch norm takes no notice of the bias before it, whose gradient is rounding; Adam takes a full step of it."""

    def before_a_norm() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))

    model, batches = before_a_norm(), pairs(3, width=8, seed=0)
    record = record_step(model, batches, loss_fn=mse, optimizer=kind(model.parameters(), lr=0.01))

    def stepped(*, times: float = 1.0, name: str = "0.bias") -> Verdict:
        model = before_a_norm()
        optimizer, spared = kind(model.parameters(), lr=0.01), model.get_parameter(name)
        with check_step(model, batches, against=record) as check:
            for inputs, target in batches:
                (mse(model(inputs.flip(0)), target.flip(0)) / 3).backward()
            check.gradients()
            before = spared.detach().clone()
            optimizer.step()
            with torch.no_grad():
                spared.copy_(before + times * (spared - before))
        return check.verdict

    right = stepped()
    assert right.law("updated-parameters").outcome == "pass", str(right)
    golden(right.law("updated-parameters").note, numbers=False)
    told = [stepped(times=times).law("updated-parameters").outcome for times in (0.0, 0.25, 100.0)]
    assert told == ["unknown", "unknown", "fail"]
    assert stepped(times=0.0, name="3.bias").law("updated-parameters").outcome == "fail"


def test_a_step_is_recorded_by_its_contract() -> None:
    torch.manual_seed(0)
    model, pairs = nn.Linear(4, 4).half(), [(torch.full((2, 4), 1e3).half(), torch.zeros(2, 4).half())] * 2
    tiny = lambda output, target: output.float().mean() * 1e-7  # noqa: E731
    record = partial(record_step, model, pairs, loss_fn=tiny, floors=False)
    plain, scaled = (
        record(contract=Contract(loss_scale=one)).operations[0].gradients["weight"] for one in (None, 1024.0)
    )
    assert plain is not None
    assert scaled is not None
    assert not plain.any(), "it vanishes in fp16"
    assert scaled.any()
    once = record(contract=Contract(loss_scale=1024.0, loss_divisor=1)).operations[0].gradients["weight"]
    assert once is not None
    assert torch.allclose(once, 2 * scaled, rtol=0.1)
    with pytest.raises(ContractError, match="names of the contract is not read where a step is recorded"):
        record(contract=Contract(names={"a": "b"}))

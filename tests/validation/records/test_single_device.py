"""A loss function is given the output as the model returns it, and the target: whichever way a step is judged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.pipeline import PipelineSchedule
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_check import check_step
from pipeproof.records.step_record import record_step
from pipeproof.whitebox.validator import WhiteBox

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

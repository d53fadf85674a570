"""An optimizer may go either way where rounding may turn a gradient round; anywhere else it may not."""

import pytest
import torch
from torch import Tensor, nn

from pipeproof.judging.tolerance import BF16, Floor
from pipeproof.judging.turned import only_turned
from pipeproof.judging.verdict import Verdict
from pipeproof.records.step_check import check_step
from pipeproof.records.step_record import record_step
from tests.support.steps import pairs

FLOOR = Floor(0.0, 0.01, 1.0, BF16)  # so that a gradient's element may be off by 0.04 of the largest
GRADIENT = torch.tensor([1.0, -0.5, 0.2, 0.03, -0.01, 0.0])
BEFORE = torch.full_like(GRADIENT, 10.0)


def after(*steps: float) -> Tensor:
    return BEFORE + 0.1 * torch.tensor(steps)


DUE = after(-1, 1, -1, -1, 1, 0)


@pytest.mark.parametrize(
    ("seen", "turned"),
    [
        (after(-1, 1, -1, 1, -1, 0), True),
        (after(-1, 1, -1, 0, 0, 0), True),
        (after(-1, 1, 1, -1, 1, 0), False),
        (after(-1, 1, 1, 1, -1, 1), False),
        (after(-1, 1, -1, 2, 1, 0), False),
        (after(-1, 1, -1, -1, 1, 1), False),
        (after(-1.3, 1.3, -1.3, -1.1, 1.1, 0), False),
    ],
)
def test_elements_whose_gradient_is_hardly_there_may_go_either_way(seen: Tensor, turned: bool) -> None:
    assert only_turned(seen, DUE, BEFORE, gradient=GRADIENT, floor=FLOOR, limit=0.01, rounded=False) is turned


def test_what_is_of_other_sizes_or_of_rounding_alone_is_not_excused() -> None:
    flat, noise = after(-1, 1, -1, 1, -1, 0), Floor(0.0, 0.01, 1.0, BF16, size=1.0)
    for seen, floor in ((flat[:3], FLOOR), (flat, noise)):
        assert not only_turned(seen, DUE, BEFORE, gradient=GRADIENT, floor=floor, limit=0.01, rounded=False)


class InHalves(nn.Linear):
    """A kernel that adds up two halves of each sum, each rounded."""

    def forward(self, x: Tensor) -> Tensor:
        half = self.in_features // 2
        return x[:, :half] @ self.weight[:, :half].T + x[:, half:] @ self.weight[:, half:].T + self.bias


def checked(rate: float) -> Verdict:
    """A step in bf16 with AdamW and another kernel than the reference's."""

    def build(layer: type[nn.Linear]) -> nn.Module:
        torch.manual_seed(8)  # there fp64 turns none of the elements that the other kernel turns
        return nn.Sequential(*(nn.Sequential(layer(32, 32), nn.GELU()) for _ in range(3))).bfloat16()

    data = [(x.bfloat16(), y.bfloat16()) for x, y in pairs(4, width=32, seed=0)]
    mse, model, job = nn.functional.mse_loss, build(nn.Linear), build(InHalves)
    record = record_step(model, data, loss_fn=mse, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))
    optimizer = torch.optim.AdamW(job.parameters(), lr=rate)
    with check_step(job, data, against=record) as check:
        for inputs, target in data:
            (mse(job(inputs), target) / 4).backward()
        check.gradients()
        optimizer.step()
    return check.verdict


def test_a_right_step_of_adam_with_another_kernel_is_no_fault_and_a_wrong_rate_is() -> None:
    right = checked(0.01)
    assert right.law("gradient").outcome == "pass", str(right)
    assert right.law("updated-parameters").outcome == "unknown", str(right)
    assert checked(0.013).law("updated-parameters").outcome == "fail"

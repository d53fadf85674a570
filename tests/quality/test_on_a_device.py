"""What was built for a device, run on one that is pretended: it refuses what a device refuses."""

import os
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

from tests.support.sources import ROOT
from tests.support.warm_start import Ended, run_new

pytestmark = [
    pytest.mark.long,
    pytest.mark.pipeproof_ranks,
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch has no device made in Python",
    ),
]
HOST_TENSOR = """
import torch
from torch import nn

from pipeproof import World, whitebox


def build():
    torch.manual_seed(0)
    return nn.Linear(8, 8)


def step(model, microbatches):
    losses = [nn.functional.mse_loss(model(x), torch.zeros(4, 8)) for x, _ in microbatches]
    torch.stack(losses).mean().backward()
    return model, [loss.detach() for loss in losses]


if __name__ == "__main__":
    data = [(torch.randn(4, 8), torch.zeros(4, 8)) for _ in range(2)]
    with World(device="pretend", silent=True) as world:
        judge = whitebox.WhiteBox(world)
        print(judge.validate(step, reference=build, microbatches=data, ranks=1, loss_fn=nn.functional.mse_loss))
"""


def with_device(folder: Path, *arguments: str) -> Ended:
    """A program on a machine that has the device."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support" / "pretend")}
    return run_new(sys.executable, folder, arguments, environment, bound_s=120)


def test_schedules_are_right_there_through_the_host_and_it_is_found_by_itself(tmp_path: Path) -> None:
    shape = ("--ranks", "2", "--microbatches", "4", "--layers", "4", "--model", "gpt-tied")
    ran = with_device(tmp_path, "-m", "pipeproof", "validate", "--schedule", "1f1b,zb-v", *shape)
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.endswith("2 pass; 2 of 2 bit for bit\n")


def test_a_fault_is_named_there(tmp_path: Path) -> None:
    line = "1f1b r2 s2 m4 model=mlp plan=train specimen=microbatches-swapped device=pretend"
    ran = with_device(tmp_path, "-m", "pipeproof", "replay", line)
    assert ran.returncode == 1, ran.stdout
    assert "cause     swapped-data: " in ran.stdout
    assert "microbatches 0, 1" in ran.stdout
    assert "was not measured" not in ran.stdout, "rounding is measured on the device"


def test_a_tensor_that_was_left_on_the_host_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "left.py").write_text(HOST_TENSOR)
    ran = with_device(tmp_path, "left.py")
    assert "Expected all tensors to be on the same device, but aten::mse_loss has pretend:0, cpu" in ran.stdout
    assert "in step\n    losses = [nn.functional.mse_loss(model(x), torch.zeros(4, 8))" in ran.stdout

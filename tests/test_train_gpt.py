"""The training example: it learns, and equals the single device at every step (README runs it with 1F1B)."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.one_rank
def test_training_equals_the_single_device_and_the_loss_falls(torchrun: Launch) -> None:
    script = str(ROOT / "tests" / "examples" / "train_gpt.py")
    shape = ("--schedule", "interleaved", "--layers", "5", "--split", "1,2,1,1", "--tied")
    done = torchrun(ROOT, script, *shape, "--steps", "12", "--microbatches", "5", "--check", ranks=2)
    assert done.returncode == 0, done.stdout
    assert "equal the single-device run's bit for bit" in done.stdout
    losses = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0] - 0.5

"""The training example: every schedule learns, and equals the single device at every step."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("options", "ranks"),
    [(("--schedule", "interleaved", "--layers", "5", "--split", "1,2,1,1", "--tied"), 2), (("--schedule", "gpipe"), 3)],
    ids=["interleaved", "gpipe"],
)
def test_training_equals_the_single_device_and_the_loss_falls(
    torchrun: Launch, options: tuple[str, ...], ranks: int
) -> None:
    script = str(ROOT / "tests" / "examples" / "train_gpt.py")
    done = torchrun(ROOT, script, *options, "--steps", "12", "--microbatches", "5", "--check", ranks=ranks)
    assert done.returncode == 0, done.stdout
    assert "equal the single-device run's bit for bit" in done.stdout
    losses = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0] - 0.5

"""A training script under torchrun, one step of which is checked: right, wrong, and what cannot be judged."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Launch = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.one_rank
SCRIPT = str(Path(__file__).with_name("checked_training.py"))


def test_a_right_step_passes_beside_the_model_on_one_device(torchrun: Launch, tmp_path: Path) -> None:
    done = torchrun(tmp_path, SCRIPT, ranks=2)
    assert done.returncode == 0, done.stdout
    assert "PASS 53 comparisons" in done.stdout
    assert re.search(r"gradient +pass +16 compared", done.stdout)
    assert re.search(r"loss +pass +4 compared", done.stdout)
    assert re.search(r"grad-norm +pass +2 compared", done.stdout), "one of each rank"


def test_a_wrong_step_is_named_on_its_rank_and_stage(torchrun: Launch, tmp_path: Path) -> None:
    done = torchrun(tmp_path, SCRIPT, "--fault", "dropped", ranks=2)
    assert done.returncode == 1, done.stdout
    assert "FAIL gradient (8 of 16), grad-norm (2 of 2)" in done.stdout
    assert "where     rank 0, stage 0, parameter 1.2.bias" in done.stdout
    assert f"replay    torchrun --nproc-per-node 2 {SCRIPT} --fault dropped" in done.stdout


def test_against_a_record_the_update_is_judged_too(torchrun: Launch, python: Launch, tmp_path: Path) -> None:
    assert python(tmp_path, SCRIPT, "--write", "x").returncode == 0
    options = ("--record", "x", "--check-at", "0", "--steps", "1")
    right = torchrun(tmp_path, SCRIPT, *options, ranks=2)
    assert right.returncode == 0, right.stdout
    assert re.search(r"updated-parameters +pass +16 compared", right.stdout)
    wrong = torchrun(tmp_path, SCRIPT, *options, "--fault", "undivided", ranks=2)
    assert wrong.returncode == 1, wrong.stdout
    assert "4 times expected, cosine 1.000000" in wrong.stdout
    other = torchrun(tmp_path, SCRIPT, *options, "--fault", "other-weights", ranks=2)
    assert other.returncode == 1, "torchrun's own; the script ends with 3"
    assert "UNKNOWN" in other.stdout
    assert re.search(r"rank 1: weights that differ from the record's before the step: 3.0.bias first", other.stdout)
    assert "Traceback (most recent call last):\n  File \"" + SCRIPT not in other.stdout

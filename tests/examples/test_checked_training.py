"""A training script under torchrun, one step of which is checked: right, wrong, and what cannot be judged."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = str(Path(__file__).with_name("checked_training.py"))
AGAINST = ("--record", "x", "--check-at", "0", "--steps", "1")


@pytest.fixture(scope="module")
def record(python: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the record of step 0, made on one device."""
    folder = tmp_path_factory.mktemp("record")
    assert python(folder, SCRIPT, "--write", "x").returncode == 0
    return folder


def test_a_right_step_passes_beside_the_model_on_one_device(torchrun: Launch, tmp_path: Path) -> None:
    done = torchrun(tmp_path, SCRIPT, ranks=2)
    assert done.returncode == 0, done.stdout
    assert "PASS 54 comparisons" in done.stdout
    assert re.search(r"gradient +pass +16 compared", done.stdout)
    assert re.search(r"loss +pass +4 compared", done.stdout)
    assert re.search(r"grad-norm +pass +2 compared", done.stdout), "one of each rank"


def test_a_record_judges_a_wrong_step_and_its_update(torchrun: Launch, record: Path) -> None:
    done = torchrun(record, SCRIPT, *AGAINST, "--fault", "dropped", ranks=2)
    assert done.returncode == 1, done.stdout
    assert "FAIL gradient (8 of 16), grad-norm (2 of 2), updated-parameters (8 of 16)" in done.stdout
    assert "where     rank 0, stage 0, parameter 1.2.bias" in done.stdout
    assert f"replay    torchrun --nproc-per-node 2 {SCRIPT} --record x --check-at 0" in done.stdout


def test_a_record_judges_no_step_from_other_weights(torchrun: Launch, record: Path) -> None:
    done = torchrun(record, SCRIPT, *AGAINST, "--fault", "other-weights", ranks=2)
    assert done.returncode == 1, "torchrun's own; the script ends with 3"
    assert "UNKNOWN comparable: rank 1: weights that differ from the record's before the step: 3.0.bias" in done.stdout
    assert f'File "{SCRIPT}"' not in done.stdout, "no traceback"

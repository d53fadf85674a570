"""A training script under torchrun, one step of which is checked: right, wrong, and what cannot be judged."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = str(Path(__file__).with_name("checked_training.py"))
REPLICAS = str(Path(__file__).with_name("checked_replicas.py"))
README = (Path(__file__).parents[2] / "README.md").read_text()


def verdicts(output: str) -> list[str]:
    """What was said of each step that was checked."""
    return re.split(r"(?m)^(?=PASS|FAIL|UNKNOWN)", output)[1:]


def test_beside_the_model_a_right_step_passes_and_a_wrong_one_is_named(torchrun: Launch, tmp_path: Path) -> None:
    options = ("--check-at", "1", "2", "--fault", "dropped", "--fault-from", "2")
    done = torchrun(tmp_path, SCRIPT, *options, ranks=2)
    assert done.returncode == 1, done.stdout
    right, wrong = verdicts(done.stdout)
    assert right.startswith("PASS 54 comparisons")
    assert re.search(r"gradient +pass +16 compared", right)
    assert re.search(r"loss +pass +4 compared", right)
    assert re.search(r"grad-norm +pass +2 compared", right), "one of each rank"
    assert wrong.startswith("FAIL gradient (8 of 16), grad-norm (2 of 2)\n")
    shown = re.findall(r"(?s)```text\n(FAIL gradient.*?)\n```", README)
    assert ["\n".join(map(str.rstrip, wrong.splitlines()))[: len(one)] for one in shown] == shown != []
    assert f"replay    torchrun --nproc-per-node 2 {SCRIPT} --check-at 1 2 --fault dropped" in wrong


def test_a_record_judges_the_update_too_and_no_step_from_other_weights(
    torchrun: Launch, python: Launch, tmp_path: Path
) -> None:
    assert python(tmp_path, SCRIPT, "--write", "x").returncode == 0
    done = torchrun(tmp_path, SCRIPT, "--record", "x", "--check-at", "0", "1", "--steps", "2", ranks=2)
    assert done.returncode == 1, "torchrun's own; the script ends with 3"
    right, later = verdicts(done.stdout)
    assert right.startswith("PASS 70 comparisons")
    assert re.search(r"updated-parameters +pass +16 compared", right)
    assert later.startswith("UNKNOWN comparable: rank 0: weights that differ from the record's before the step: 0.0.we")
    assert "; rank 1: weights that differ" in later
    assert f'File "{SCRIPT}"' not in done.stdout, "no traceback"


def test_a_record_names_what_its_sums_tell_and_no_more(torchrun: Launch, python: Launch, tmp_path: Path) -> None:
    assert python(tmp_path, SCRIPT, "--write", "x").returncode == 0
    for fault, words in (
        ("undivided", "cause     scale: gradients are a multiple .*\n +everywhere: 4, the number of microbatches\n"),
        ("dropped", "cause     unknown: the evidence does not decide\n +open +stage 0: no combination"),
    ):
        options = ("--record", "x", "--check-at", "0", "--steps", "1", "--fault", fault)
        (wrong,) = verdicts(torchrun(tmp_path, SCRIPT, *options, ranks=2).stdout)
        assert re.search(words, wrong), wrong


@pytest.mark.parametrize("model", ["plain", "tied"])
def test_replicas_and_copies_that_are_right_pass(torchrun: Launch, tmp_path: Path, model: str) -> None:
    (verdict,) = verdicts(torchrun(tmp_path, REPLICAS, "--model", model, ranks=4).stdout)
    assert verdict.startswith("PASS"), verdict
    assert re.search(r"loss +pass +4 compared", verdict), "each replica's own two"
    assert re.search(r"gradient +pass +(16|8) compared", verdict), "on every rank that has them"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--fault", "unreduced"),
            "cause     not-reduced: .*\n +stage 0: .*: ranks 0, 1 keep gradients of their",
        ),
        (("--fault", "one"), "cause     not-reduced: .*\n +.*stage 0, parameter 0.0.bias: ranks 0, 1 keep gradients"),
        (
            ("--model", "tied", "--fault", "untied"),
            "cause     tied-not-summed: .*\n +parameter first.weight: ranks 0, 1",
        ),
    ],
)
def test_replicas_and_copies_that_were_not_summed_are_named(
    torchrun: Launch, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    (verdict,) = verdicts(torchrun(tmp_path, REPLICAS, *options, ranks=4).stdout)
    assert verdict.startswith("FAIL gradient ("), verdict
    assert re.search(words, verdict), verdict


def test_replicas_against_a_record_and_what_nobody_said(torchrun: Launch, python: Launch, tmp_path: Path) -> None:
    for model, words in (
        ("plain", "PASS 60 comparisons"),
        ("tied", "UNKNOWN parameters-once: first.weight is in 2 sta"),
    ):
        assert python(tmp_path, REPLICAS, "--model", model, "--write", model).returncode == 0
        done = torchrun(tmp_path, REPLICAS, "--model", model, "--record", model, ranks=4)
        assert verdicts(done.stdout)[0].startswith(words), done.stdout
    (verdict,) = verdicts(torchrun(tmp_path, REPLICAS, "--given", "all", ranks=4).stdout)
    assert verdict.startswith("UNKNOWN loss: whose losses these are nobody says: pass each replica the microbatches")
    assert re.search(r"pass +parameters-once, presence, gradient: 40 compared", verdict)

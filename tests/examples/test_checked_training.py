"""A training script under torchrun, one step of which is checked: right, wrong, and what cannot be judged.

A guide shows one of them. Here each number of ranks is started once, and runs all scripts in turn.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import in_turn
from tests.support.golden import golden
from tests.support.guides import shown
from tests.support.once import once
from tests.support.warm_start import Ended

Launch = Callable[..., Ended]
SCRIPT = str(Path(__file__).with_name("checked_training.py"))
REPLICAS = str(Path(__file__).with_name("checked_replicas.py"))

RECORD, LATER = ("--record", "x"), ("--fault", "dropped", "--fault-from", "2")
TRAINING = {  # on two ranks
    "beside the model": ("--check-at", "1", "2", *LATER),
    "record": (*RECORD, "--check-at", "0", "1", "--steps", "2"),
    "undivided": (*RECORD, "--check-at", "0", "--steps", "1", "--fault", "undivided"),
    "dropped": (*RECORD, "--check-at", "0", "--steps", "1", "--fault", "dropped"),
}
REPLICATED = {  # on four
    "plain": ("--model", "plain"),
    "tied": ("--model", "tied"),
    "unreduced": ("--fault", "unreduced"),
    "one": ("--fault", "one"),
    "untied": ("--model", "tied", "--fault", "untied"),
    "plain record": ("--model", "plain", "--record", "plain"),
    "tied record": ("--model", "tied", "--record", "tied"),
    "all given": ("--given", "all"),
    "total": ("--fault", "total"),
}


class Ended(NamedTuple):
    """How a script ended: the statuses of its ranks, and what was said of each step that was checked."""

    statuses: set[int]
    verdicts: list[str]


def verdicts(output: str) -> list[str]:
    return re.split(r"(?m)^(?=PASS|FAIL|UNKNOWN)", output)[1:]


def compared(verdict: str) -> dict[str, int]:
    """How many things each law that passed has compared."""
    return {law: int(count) for law, count in re.findall(r"(\S+) +pass +(\d+) compared", verdict)}


@pytest.fixture
def training(torchrun: Launch, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    def work() -> list[object]:
        folder = tmp_path_factory.mktemp("training")
        assert in_turn.as_main(SCRIPT, "--write", str(folder / "x")) == (0, "")
        return all_in_turn(torchrun, folder, SCRIPT, TRAINING, ranks=2)

    return of_ranks(TRAINING, once(tmp_path_factory, "training", work))


@pytest.fixture
def replicated(torchrun: Launch, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    def work() -> list[object]:
        folder = tmp_path_factory.mktemp("replicated")
        for model in ("plain", "tied"):
            assert in_turn.as_main(REPLICAS, "--model", model, "--write", str(folder / model)) == (0, "")
        return all_in_turn(torchrun, folder, REPLICAS, REPLICATED, ranks=4)

    return of_ranks(REPLICATED, once(tmp_path_factory, "replicated", work))


def all_in_turn(
    torchrun: Launch, folder: Path, script: str, runs: dict[str, tuple[str, ...]], *, ranks: int
) -> list[object]:
    """For each rank what each run came to."""
    given = json.dumps([(script, *options) for options in runs.values()])
    done = torchrun(folder, in_turn.__file__, given, str(folder), ranks=ranks)
    assert done.returncode == 0, done.stdout
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def of_ranks(runs: dict[str, tuple[str, ...]], ended: list[list[tuple[int, str]]]) -> dict[str, Ended]:
    return {
        name: Ended({status for status, _ in of_run}, verdicts("".join(said for _, said in of_run)))
        for name, of_run in zip(runs, zip(*ended, strict=True), strict=True)
    }


def test_beside_the_model_a_right_step_passes_and_a_wrong_one_is_named(training: dict[str, Ended]) -> None:
    statuses, (right, wrong) = training["beside the model"]
    assert statuses == {1}
    assert right.startswith("PASS 54 comparisons")
    assert {"gradient": 16, "loss": 4, "grad-norm": 2}.items() <= compared(right).items(), "one norm of each rank"
    assert "\n".join(map(str.rstrip, wrong.splitlines())).startswith(shown("dropped: a microbatch"))
    golden(wrong, lines="^FAIL|^  replay")


def test_a_record_judges_the_update_too_and_no_step_from_other_weights(training: dict[str, Ended]) -> None:
    statuses, (right, later) = training["record"]
    assert statuses == {3}
    assert right.startswith("PASS 70 comparisons")
    assert compared(right)["updated-parameters"] == 16
    golden(later.splitlines()[0], numbers=False)


@pytest.mark.sweep
def test_a_record_names_what_its_sums_tell_and_no_more(training: dict[str, Ended]) -> None:
    for fault, words in (
        ("undivided", "cause     scale: gradients are a multiple .*\n +everywhere: 4 = the number of microbatches\n"),
        ("dropped", "cause     unknown: the evidence does not decide\n +open +stage 0: no mix of the reference"),
    ):
        statuses, (wrong,) = training[fault]
        assert statuses == {1}
        assert re.search(words, wrong), wrong


@pytest.mark.sweep
@pytest.mark.parametrize("model", ["plain", "tied"])
def test_replicas_and_copies_that_are_right_pass(replicated: dict[str, Ended], model: str) -> None:
    statuses, (verdict,) = replicated[model]
    assert statuses == {0}
    assert verdict.startswith("PASS"), verdict
    assert compared(verdict)["loss"] == 4, "each replica's own two"
    assert compared(verdict)["gradient"] in (8, 16), "on every rank that has them"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            "unreduced",
            "cause     not-reduced: .*\n +stage 0: rank 0 lacks microbatches 2, 3; rank 1 lacks",
        ),
        (
            "one",
            "cause     not-reduced: .*\n +.*stage 0, parameter 0.0.bias: rank 0 lacks microbatches 2, 3; rank 1 lacks",
        ),
        ("untied", "cause     tied-not-summed: .*\n +parameter first.weight: ranks 0, 1"),
    ],
)
def test_replicas_and_copies_that_were_not_summed_are_named(
    replicated: dict[str, Ended], fault: str, words: str
) -> None:
    statuses, (verdict,) = replicated[fault]
    assert statuses == {1}
    assert verdict.startswith("FAIL gradient ("), verdict
    assert re.search(words, verdict), verdict


@pytest.mark.sweep
def test_replicas_against_a_record_and_what_nobody_said(replicated: dict[str, Ended]) -> None:
    for run, status, words in (
        ("plain record", 0, "PASS 68 comparisons"),
        ("tied record", 3, "UNKNOWN parameters-once: first.weight is in 2 sta"),
    ):
        statuses, (verdict,) = replicated[run]
        assert (statuses, verdict[: len(words)]) == ({status}, words), verdict
    for run in ("total", "all given"):
        statuses, (verdict,) = replicated[run]
        assert statuses == {3}
        golden(verdict, lines=r"^UNKNOWN| pass +\S+,")

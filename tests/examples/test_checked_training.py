"""A training script under torchrun, one step of which is checked: right, wrong, and what cannot be judged.

A guide shows one of them. Here each number of ranks is started once, and runs all scripts in turn.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import in_turn
from tests.support.golden import golden
from tests.support.guides import shown
from tests.support.once import once

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


JOBS = {  # of each script: on how many ranks, its records with the options that write them, and its runs
    "training": (SCRIPT, 2, {"x": ()}, TRAINING),
    "replicated": (REPLICAS, 4, {model: ("--model", model) for model in ("plain", "tied")}, REPLICATED),
}


Ended = tuple[set[int], list[str]]  # the statuses of a script's ranks, and what was said of each step that was checked


def compared(verdict: str) -> dict[str, int]:
    """How many things each law that passed has compared."""
    return {law: int(count) for law, count in re.findall(r"(\S+) +pass +(\d+) compared", verdict)}


@pytest.fixture
def ended(torchrun: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ended]:
    """How a run ended; the first of its job that is asked for starts all of them."""

    def find(run: str) -> Ended:
        script, ranks, records, runs = JOBS[job := "training" if run in TRAINING else "replicated"]

        def work() -> list[object]:
            folder = tmp_path_factory.mktemp(job)
            for record, options in records.items():
                assert in_turn.as_main(script, *options, "--write", str(folder / record)) == (0, "")
            given = json.dumps([(script, *options) for options in runs.values()])
            done = torchrun(folder, in_turn.__file__, given, str(folder), ranks=ranks)
            assert done.returncode == 0, done.stdout
            return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]

        of_ranks = [one[[*runs].index(run)] for one in once(tmp_path_factory, job, work)]
        output = "".join(said for _, said in of_ranks)
        return {status for status, _ in of_ranks}, re.split(r"(?m)^(?=PASS|FAIL|UNKNOWN)", output)[1:]

    return find


def test_beside_the_model_a_right_step_passes_and_a_wrong_one_is_named(ended: Callable[[str], Ended]) -> None:
    statuses, (right, wrong) = ended("beside the model")
    assert statuses == {1}
    assert right.startswith("PASS 54 comparisons")
    assert {"gradient": 16, "loss": 4, "grad-norm": 2}.items() <= compared(right).items(), "one norm of each rank"
    assert "\n".join(map(str.rstrip, wrong.splitlines())).startswith(shown("dropped: a microbatch"))
    golden(wrong, lines="^FAIL|^  replay")


def test_a_record_judges_the_update_too_and_no_step_from_other_weights(ended: Callable[[str], Ended]) -> None:
    statuses, (right, later) = ended("record")
    assert statuses == {3}
    assert right.startswith("PASS 70 comparisons")
    assert compared(right)["updated-parameters"] == 16
    golden(later.splitlines()[0], numbers=False)


@pytest.mark.sweep
def test_a_record_names_what_its_sums_tell_and_no_more(ended: Callable[[str], Ended]) -> None:
    for fault, words in (
        ("undivided", "cause     scale: gradients are a multiple .*\n +everywhere: 4 = the number of microbatches\n"),
        ("dropped", "cause     unknown: the evidence does not decide\n +open +stage 0: no mix of the reference"),
    ):
        statuses, (wrong,) = ended(fault)
        assert statuses == {1}
        assert re.search(words, wrong), wrong


@pytest.mark.sweep
@pytest.mark.parametrize("model", ["plain", "tied"])
def test_replicas_and_copies_that_are_right_pass(ended: Callable[[str], Ended], model: str) -> None:
    statuses, (verdict,) = ended(model)
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
    ended: Callable[[str], Ended], fault: str, words: str
) -> None:
    statuses, (verdict,) = ended(fault)
    assert statuses == {1}
    assert verdict.startswith("FAIL gradient ("), verdict
    assert re.search(words, verdict), verdict


@pytest.mark.sweep
def test_replicas_against_a_record_and_what_nobody_said(ended: Callable[[str], Ended]) -> None:
    for run, status, words in (
        ("plain record", 0, "PASS 68 comparisons"),
        ("tied record", 3, "UNKNOWN parameters-once: first.weight is in 2 sta"),
    ):
        statuses, (verdict,) = ended(run)
        assert (statuses, verdict[: len(words)]) == ({status}, words), verdict
    for run in ("total", "all given"):
        statuses, (verdict,) = ended(run)
        assert statuses == {3}
        golden(verdict, lines=r"^UNKNOWN| pass +\S+,")

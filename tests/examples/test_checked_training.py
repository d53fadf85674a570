"""A training script under torchrun, one step of which is checked: right, wrong, and what cannot be judged.

A guide shows one of them. Here the ranks are started once, and run all of them in turn.
tests/validation/explain/rules/test_rules_shared.py has replicas and copies of one weight.
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

RECORD, LATER = ("--record", "x"), ("--fault", "dropped", "--fault-from", "2")
TRAINING = {
    "beside the model": ("--check-at", "1", "2", *LATER),
    "record": (*RECORD, "--check-at", "0", "1", "--steps", "2"),
    "undivided": (*RECORD, "--check-at", "0", "--steps", "1", "--fault", "undivided"),
    "dropped": (*RECORD, "--check-at", "0", "--steps", "1", "--fault", "dropped"),
}
Ended = tuple[set[int], list[str]]  # the statuses of a script's ranks, and what was said of each step that was checked


def compared(verdict: str) -> dict[str, int]:
    """How many things each law that passed has compared."""
    return {law: int(count) for law, count in re.findall(r"(\S+) +pass +(\d+) compared", verdict)}


@pytest.fixture
def ended(torchrun: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ended]:
    """How a run ended; the first that is asked for starts all of them."""

    def find(run: str) -> Ended:
        of_ranks = [one[[*TRAINING].index(run)] for one in once(tmp_path_factory, "training", work)]
        output = "".join(said for _, said in of_ranks)
        return {status for status, _ in of_ranks}, re.split(r"(?m)^(?=PASS|FAIL|UNKNOWN)", output)[1:]

    def work() -> list[object]:
        folder = tmp_path_factory.mktemp("training")
        assert in_turn.as_main(SCRIPT, "--write", str(folder / "x")) == (0, "")
        given = json.dumps([(SCRIPT, *options) for options in TRAINING.values()])
        done = torchrun(folder, in_turn.__file__, given, str(folder), ranks=2)
        assert done.returncode == 0, done.stdout
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]

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

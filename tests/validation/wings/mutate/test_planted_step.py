"""What becomes of a fault that is planted in a step, by its verdict: no rank is started."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeproof.core.verdict import Verdict
from pipeproof.whitebox.task import WhiteBoxError
from pipeproof.wings.mutate import PlantedStep, mutate_step
from pipeproof.wings.mutate.mutation import Tried
from tests.support.verdicts import FAILED, PASSED

UNKNOWN = replace(PASSED, outcome="unknown", ended="")


def tried(
    verdict: Verdict, *, changes: int | None, name: str = "gradient-lost", ranks: int = 3
) -> tuple[Tried, list[Any]]:
    """What is said of a fault that changes something on one rank alone (None: on none), and where it was planted."""
    asked = []

    def judge(planted: Callable[..., Any]) -> Verdict:
        assert isinstance(planted, PlantedStep)
        asked.append(planted.rank)
        if planted.rank in (None, changes) and changes is not None:
            Path(planted.folder, str(changes)).touch()
        return verdict

    (one,) = mutate_step(lambda model, microbatches: None, judge, ranks=ranks, only=[name])
    return one, asked


@pytest.mark.parametrize(
    ("verdict", "changes", "outcome", "ranks"),
    [
        (FAILED, 2, "caught", [2]),
        (FAILED, 0, "caught", [2, 1, 0]),
        (PASSED, 1, "let pass", [2, 1]),
        (UNKNOWN, 2, "not judged", [2]),
        (replace(UNKNOWN, ended="hang"), 2, "caught", [2]),
        (replace(UNKNOWN, ended="error"), 2, "caught", [2]),
        (PASSED, None, "not planted", [2, 1, 0]),
        (FAILED, None, "not planted", [2, 1, 0]),
    ],
)
def test_a_fault_is_caught_by_a_fail_alone(
    verdict: Verdict, changes: int | None, outcome: str, ranks: list[int]
) -> None:
    one, asked = tried(verdict, changes=changes)
    assert (one.outcome, asked) == (outcome, ranks)
    assert one.rank == (changes if outcome != "not planted" else None)


def test_a_fault_in_sums_is_planted_on_all_ranks_at_once() -> None:
    one, asked = tried(FAILED, changes=0, name="reduction-doubled")
    assert (one.outcome, one.rank, asked) == ("caught", None, [None])


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(WhiteBoxError, match="unknown fault 'gradient-lots': did you mean 'gradient-lost'"):
        tried(PASSED, changes=0, name="gradient-lots")

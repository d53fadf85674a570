"""Which schedules are run: what cannot be is left out of all, with the reason, and refused where it was asked for."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from pipeproof.own.case import CaseError
from pipeproof.own.shapes import Shape, select_names
from pipeproof.pipeline.partition import even
from pipeproof.pipeline.program import Program
from pipeproof.pipeline.schedule import Schedule, ScheduleError
from pipeproof.pipeline.schedules import FAMILIES

Chosen = tuple[Mapping[str, Schedule | Program], Mapping[str, str]]


def select(text: str, *, ranks: int = 4, microbatches: int = 8, layers: int = 8) -> Chosen:
    return select_names(text, Shape(ranks, microbatches), fits=lambda stages: even(layers, stages))


def test_all_is_every_family_but_what_cannot_be() -> None:
    chosen, left_out = select("all")
    assert (list(chosen), left_out) == (list(FAMILIES), {})
    chosen, left_out = select("all", microbatches=3)
    reason = "microbatches is 3: dualpipev on 4 ranks needs at least 8 (twice the ranks)"
    assert left_out == {"dualpipev": reason}
    assert [*chosen, "dualpipev"] == list(FAMILIES)
    assert set(select("all", layers=4)[0]) == {"naive", "gpipe", "1f1b", "zb-h1", "zb-h2"}


@pytest.mark.parametrize(
    ("names", "sizes", "words"),
    [
        ("gpipe,dualpipev", {"microbatches": 3}, "needs at least 8"),
        ("zb-v", {"layers": 4}, "4 layers cannot fill 8 stages"),
        ("all", {"ranks": 0}, r"^ranks is 0: expected at least 1$"),  # each reason is said once
        ("all", {"layers": 1}, r"^no schedule can be: naive, gpipe, .*: 1 layer cannot fill 4 stages"),
    ],
)
def test_what_cannot_be_is_refused(names: str, sizes: dict[str, int], words: str) -> None:
    with pytest.raises((CaseError, ScheduleError), match=words):
        select(names, **sizes)


def test_files_stand_beside_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0")
    found, _ = select(f"1f1b, {path}")
    assert [schedule.name for schedule in found.values() if isinstance(schedule, Schedule)] == ["1f1b", "mine.csv"]

"""Schedules as values: to torch's CSV and back, and what is refused on the way."""

import csv
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.pipeline.action import Action
from pipeproof.pipeline.schedule import schedule_from_csv
from pipeproof.pipeline.schedules import FAMILIES, LOOPED, build, virtuals
from tests.support.golden import golden

GPIPE = "0F0,0F1,,,0B1,0B0\n,1F0,1F1,1B1,1B0,\n"


def test_csv_has_a_row_per_rank() -> None:
    assert build("1f1b", ranks=2, microbatches=2).to_csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@given(name=st.sampled_from(list(FAMILIES)), ranks=st.integers(1, 4), microbatches=st.integers(1, 6), data=st.data())
def test_csv_round_trip(name: str, ranks: int, microbatches: int, data: st.DataObject) -> None:
    virtual = data.draw(st.integers(1, 3)) if name in LOOPED else None
    microbatches = max(microbatches, 2 * ranks) if name == "dualpipev" else microbatches
    schedule = build(name, ranks=ranks, microbatches=microbatches, virtual=virtual)
    assert schedule_from_csv(schedule.to_csv(), name=name) == schedule


def test_blank_cells_are_idle_slots() -> None:
    schedule = schedule_from_csv(GPIPE)
    assert schedule == schedule_from_csv("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0")
    assert (schedule.name, schedule.microbatches, schedule.placement) == ("csv", 2, (0, 1))
    assert schedule.ranks[0] == tuple(map(Action.parse, ("0F0", "0F1", "0B1", "0B0")))


def test_placement_is_read_off_the_cells() -> None:
    vee = schedule_from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    assert vee.placement == (0, 1, 1, 0)
    assert [vee.stages_of(rank) for rank in range(vee.n_ranks)] == [(0, 3), (1, 2)]
    assert (vee.n_ranks, vee.n_stages) == (2, 4)


def test_str_is_a_line_per_rank() -> None:
    golden(str(build("gpipe", ranks=2, microbatches=1)))


@pytest.mark.parametrize("name", FAMILIES)
def test_torch_reads_our_file(name: str, tmp_path: Path) -> None:
    """By torch's own loader, which also infers the placement; and every cell prints as it was written."""
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = build(name, ranks=3, microbatches=6, virtual=virtuals(name, looped=2))
    file = tmp_path / "schedule.csv"
    file.write_text(schedule.to_csv())
    placements: list[dict[int, int]] = []

    def infer(order: dict[int, list[object]]) -> None:
        placements.append(torch._validate_schedule(order, schedule.n_ranks, schedule.n_stages, schedule.microbatches))

    loaded = SimpleNamespace(pipeline_order={}, _validate_and_set_stage_mapping=infer)
    torch.PipelineScheduleMulti._load_csv(loaded, str(file))
    assert placements == [dict(enumerate(schedule.placement))]
    cells = [[str(cell) for cell in row] for row in loaded.pipeline_order.values()]
    assert cells == list(csv.reader(schedule.to_csv().splitlines()))


def test_we_read_torch_s_file() -> None:
    """As torch's ``_dump_csv`` writes it: idle slots as empty cells."""
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    rows = [[torch._Action.from_str(cell) for cell in row] for row in csv.reader(GPIPE.splitlines())]
    text = "\r\n".join(",".join("" if action is None else str(action) for action in row) for row in rows)
    assert schedule_from_csv(text) == schedule_from_csv(GPIPE)


def test_a_schedule_is_frozen() -> None:
    schedule = build("naive", ranks=1, microbatches=1)
    with pytest.raises(AttributeError):
        schedule.microbatches = 2  # type: ignore[misc]

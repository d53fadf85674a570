"""Torch's CSV in both dialects: what is read, what is refused with row and column, and that it comes back."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeproof.pipeline.action import ScheduleError, ShardKind
from pipeproof.pipeline.cells import Cells, read_cells, write_cells
from pipeproof.pipeline.laws import violations
from pipeproof.pipeline.program import Program, lower, read_csv
from pipeproof.pipeline.program_laws import ANYWHERE
from pipeproof.pipeline.program_laws import violations as program_violations
from pipeproof.pipeline.schedule import Schedule, schedule_from_csv
from pipeproof.pipeline.schedules import FAMILIES, build, virtuals
from tests.support.golden import golden


def programs() -> Iterator[Program]:
    for name in FAMILIES:
        yield lower(build(name, ranks=3, microbatches=6, virtual=virtuals(name, looped=2)))


def test_waits_drawn() -> None:
    """A sent output is waited for after its own backward, a sent gradient at the end."""
    program = lower(build("1f1b", ranks=2, microbatches=1)).with_waits
    assert program.to_csv() == "0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0\n1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0\n"


def test_the_two_formats_are_told_apart_by_their_cells() -> None:
    assert isinstance(read_csv("0F0,0B0\n1F0,1B0"), Schedule)
    assert isinstance(read_csv("0F0,0SEND_F0,0B0\n1F0,1B0"), Program)


def test_a_pair_that_overlaps_is_one_cell() -> None:
    text = '0F0,0F1,(1F0;0B1)OVERLAP_F_B,"(1F1;0B0)OVERLAP_F_B"\n'
    cells = read_cells(text)
    assert cells.overlaps == ((0, 2), (0, 4))
    assert [*map(str, cells.rows[0])] == ["0F0", "0F1", "1F0", "0B1", "1F1", "0B0"]
    assert write_cells(cells) == text.replace('"', "")
    assert schedule_from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1").overlaps == ((0, 1),)


def test_cells_about_parameters_are_kept_apart() -> None:
    text = "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0RESHARD,0REDUCE_GRAD,0WAIT_REDUCE_GRAD"
    cells = read_cells(text)
    assert cells.rows == read_cells("0F0,0SEND_F0,0RECV_B0,0B0").rows
    places = [(one.slot, str(one)) for one in cells.shard_actions]  # slots count what is computed
    assert places == [(0, "0UNSHARD"), (2, "0RESHARD"), (2, "0REDUCE_GRAD"), (2, "0WAIT_REDUCE_GRAD")]
    assert write_cells(cells) == f"{text}\n"


def test_cells_about_parameters_come_back_beside_a_pair_that_overlaps() -> None:
    text = "0UNSHARD,1UNSHARD,0F0,0F1,(1F0;0B1)OVERLAP_F_B,1RESHARD,(1F1;0B0)OVERLAP_F_B,0REDUCE_GRAD,1B0\n"
    assert write_cells(read_cells(text)) == text


@pytest.mark.parametrize(
    "cell",
    [
        "0F1junk",
        "0FORWARD3",
        "0B-1",
        "0F",
        "0UNSHARD0",
        "0WAIT_SEND_W0",
        "(0F1;0B0)OVERLAP",
        "(0F1)OVERLAP_F_B",
        "(0F1;0X0)OVERLAP_F_B",
        "(0B0;0F1)OVERLAP_F_B",
        "(0F1;0I0)OVERLAP_F_B",
        "((0F1;0B0)OVERLAP_F_B;0B0)OVERLAP_F_B",
    ],
)
def test_a_wrong_cell_is_named_with_row_and_column(cell: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        read_cells(f"0F0,0B0\n1F0,,{cell}\n")
    golden(str(caught.value))


def test_nothing_is_no_schedule() -> None:
    with pytest.raises(ScheduleError, match="no action at all"):
        read_cells("\n \n")
    assert read_cells("0F0") == Cells(read_cells(" 0F0,,").rows, ())


def test_torch_reads_our_program(tmp_path: Path) -> None:
    """By torch's own loader of ``compute_comms``; the installed torch knows waits or it does not."""
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    for program in programs():
        text = (program.with_waits if hasattr(torch, "_add_wait_send") else program).to_csv()
        file = tmp_path / "program.csv"
        file.write_text(text)
        read: list[tuple[dict[int, list[object]], str]] = []
        loaded = SimpleNamespace(
            pipeline_order={},
            _prepare_schedule_with_comms=lambda order, format, read=read: read.append((order, format)),
        )
        torch._PipelineScheduleRuntime._load_csv(loaded, str(file), format="compute_comms")
        order, form = read.pop()
        assert form == "compute_comms"
        if not program.schedule.overlaps:  # torch prints an overlapping pair otherwise than it writes it
            assert [",".join(map(str, row)) for row in order.values()] == text.splitlines()


def torch_s(name: str, *, messages: bool) -> str:
    """A family as torch itself lowers it for ``fully_shard``: stages are gathered, left again, and reduced."""
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    found = build(name, ranks=4, microbatches=8, virtual=virtuals(name, looped=2))
    order = {}
    for rank, line in enumerate(found.to_csv().splitlines()):
        gathered = torch._add_unshard_reshard(list(map(torch._Action.from_str, line.split(","))))
        order[rank] = torch._add_reduce_grad(gathered, found.microbatches)
    if messages:
        order = torch._add_send_recv(order, found.placement.__getitem__, found.n_stages)
    return "".join(",".join(map(str, row)) + "\n" for row in order.values())


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "dualpipev"])  # torch prints its pairs otherwise
def test_what_torch_lowers_for_shards_keeps_every_law_and_comes_back(name: str) -> None:
    schedule, program = read_csv(torch_s(name, messages=False)), read_csv(torch_s(name, messages=True))
    assert isinstance(schedule, Schedule)
    assert isinstance(program, Program)
    assert violations(schedule) == program_violations(program, laws=ANYWHERE) == ()
    assert {one.kind for one in program.schedule.shard_actions} == {*ShardKind} - {ShardKind.WAIT_REDUCE_GRAD}
    assert schedule.to_csv() == torch_s(name, messages=False)
    assert read_csv(program.to_csv()) == program

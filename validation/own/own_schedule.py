"""User schedule files, read once: ranks receive the content, as they may lack the file."""

from pathlib import Path

from pipeproof.pipeline.files import read_file
from pipeproof.pipeline.laws import check
from pipeproof.pipeline.program import Program
from pipeproof.pipeline.program_laws import check as check_program
from pipeproof.pipeline.program_laws import runnable
from pipeproof.pipeline.schedule import Schedule, ScheduleError
from pipeproof.pipeline.waiting import DEFAULT_TIMEOUT_S
from pipeproof.worlds.launcher import under_torchrun


def own_schedule(path: str | Path) -> Schedule | Program:
    """Read and check a schedule file. Under torchrun rank 0 reads it, and all ranks must call this.

    Raises ``LawBroken``, or ``ScheduleError`` for an unreadable schedule.
    """
    found = _from_rank_0(path) if under_torchrun() else _read(path)
    if isinstance(found, ScheduleError):
        raise found
    return found


def _read(path: str | Path) -> Schedule | Program | ScheduleError:
    """Return a schedule or an error, so that errors can reach other ranks."""
    try:
        found = read_file(path)
        # A program that deadlocks only on ordered transports may run on others.
        return check_program(found, laws=runnable(in_order=False)) if isinstance(found, Program) else check(found)
    except ScheduleError as error:
        return error


def _from_rank_0(path: str | Path) -> Schedule | Program | ScheduleError:
    from pipeproof.worlds.side_store import side_store  # it loads torch

    side = side_store()
    mine = _read(path) if side.rank == 0 else None
    found: list[Schedule | Program | ScheduleError] = side.gather(
        mine, what="reading a schedule", bound_s=DEFAULT_TIMEOUT_S
    )
    return found[0]

"""What the command ``check`` says of a schedule or a program: its laws, and every transport."""

from collections.abc import Iterator

from pipeline.grid import marked
from pipeline.laws import LawBroken, check, report
from pipeline.lower import Program, lower
from pipeline.program_laws import violations
from pipeline.schedule import Schedule
from pipeline.simulate import simulate
from pipeline.transports import deadlocks


def checked(found: Schedule | Program) -> tuple[str, bool]:
    """A line per transport and one in the end, and whether it is free of deadlock under all of them.

    Raises ``LawBroken``, with every violation, where a law other than that is broken.
    """
    program = found if isinstance(found, Program) else lower(check(found))
    broken = violations(program)
    if any(violation.law != "deadlock" for violation in broken):
        raise LawBroken(report(program.schedule.name, broken, program.ranks))
    return "\n".join(_lines(program)), not broken


def _lines(program: Program) -> Iterator[str]:
    schedule, cells = program.schedule, set[tuple[int, int]]()
    for transport, deadlock in deadlocks(program).items():
        yield f"transport {transport.value:9}  {'no deadlock' if deadlock is None else f'DEADLOCK: {deadlock.text}'}"
        cells |= set(map(program.columns.cell, deadlock.entries)) if deadlock else set()
    yield from marked(program.ranks, cells)
    if not cells:
        timeline = simulate(schedule)
        bubble = f"global bubble {timeline.global_bubble:g} of {timeline.makespan:g}"
        yield f"{schedule.name} keeps every law: {schedule.sizes}; {bubble}"

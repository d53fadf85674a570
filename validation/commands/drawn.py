"""What ``show`` draws: schedules that keep every law, two on one axis, and one that breaks a law, in red."""

import argparse
from collections.abc import Iterator, Sequence

from pipeproof.commands.selection import Shape, schedule_in
from pipeproof.pipeline.files import is_csv, read_file
from pipeproof.pipeline.laws import LawBroken, report
from pipeproof.pipeline.laws import violations as of_schedule
from pipeproof.pipeline.lower import Program
from pipeproof.pipeline.program_laws import ANYWHERE
from pipeproof.pipeline.program_laws import violations as of_program
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.schedules import LOOPED, canonical_name
from pipeproof.pipeline.simulate import Times
from pipeproof.reports.drawings import Drawings, Paths
from pipeproof.reports.panel import in_slots
from pipeproof.reports.side_by_side import SideBySide


def named(name: str, shape: Shape) -> Schedule | Program:
    """The family or the file of this name."""
    if not is_csv(name):
        return shape.family(name)
    found = read_file(name)
    shape.agree(name, schedule_in(found))
    return found


def lawful(found: Schedule | Program, paths: Paths) -> Schedule:
    """The schedule of ``found``. One that breaks a law is drawn, what is to blame in red, and then refused."""
    schedule = schedule_in(found)
    broken = of_program(found, laws=ANYWHERE) if isinstance(found, Program) else of_schedule(found)
    if not broken:
        return schedule
    with Drawings(paths, actions=sum(map(len, found.ranks))) as files:
        files.write_panel(in_slots(schedule.name, schedule, found.ranks, broken))
    no_trace = "\nno trace is written, for what breaks a law has no times" if paths.trace else ""
    raise LawBroken(report(schedule.name, broken, found.ranks) + no_trace)


def against(options: argparse.Namespace, times: Times, paths: Paths) -> SideBySide:
    """``show A --against B``: both simulated in one unit, after the files at ``paths`` are written."""
    names = (options.schedule, options.against)
    shapes = _shapes(names, options)
    both = SideBySide.of([lawful(named(*each), paths) for each in zip(names, shapes, strict=True)], times)
    actions = sum(len(timeline.schedule.columns) for timeline in both.timelines.values())
    with Drawings(paths, actions=actions) as files:
        files.write(both.traces, unit=both.unit)
    return both


def _shapes(names: Sequence[str], options: argparse.Namespace) -> Iterator[Shape]:
    """What each of two is built for: a family is as large as the file beside it, where nothing else is said.

    V is for those that can have it; where neither can, both are told so.
    """
    read = [schedule_in(read_file(name)) for name in names if is_csv(name)]
    ranks = read[0].n_ranks if read and options.ranks is None else options.ranks
    microbatches = read[0].microbatches if read and options.microbatches is None else options.microbatches
    looped = [not is_csv(name) and canonical_name(name) in LOOPED for name in names]
    for name, loops in zip(names, looped, strict=True):
        if is_csv(name):
            yield Shape(options.ranks, options.microbatches)
        else:
            yield Shape(ranks, microbatches, options.virtual if loops or not any(looped) else None)

"""The commands about schedules themselves: ``show`` and ``plan``. They start without torch."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from pipeproof.commands.check_command import add_check_command, schedule_data
from pipeproof.commands.ending import WRONG
from pipeproof.commands.option_parser import (
    add,
    add_flag,
    number,
    numbers,
    refuse_unused,
    share,
    shares,
    three_numbers,
    whole,
)
from pipeproof.commands.outputs import Outputs, add_file, add_outputs
from pipeproof.commands.selection import add_layers, add_shape, case_of
from pipeproof.commands.simulation_options import add_virtual_time
from pipeproof.own.case import MODELS, CaseError
from pipeproof.own.shapes import MICROBATCHES, RANKS, Shape, schedule_in
from pipeproof.pipeline.costs import trace_of
from pipeproof.pipeline.files import is_csv, read_file
from pipeproof.pipeline.laws import LawBroken, report
from pipeproof.pipeline.laws import violations as of_schedule
from pipeproof.pipeline.plan import COLUMNS, Needs, plan, row, trade
from pipeproof.pipeline.program import Program
from pipeproof.pipeline.program_laws import ANYWHERE
from pipeproof.pipeline.program_laws import violations as of_program
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.schedules import FAMILIES, LOOPED, canonical_name
from pipeproof.pipeline.timeline import Times, simulate
from pipeproof.pipeline.transports import transport_of
from pipeproof.reports.columns import Column, table
from pipeproof.reports.drawings import Drawings, Paths
from pipeproof.reports.panel import in_slots
from pipeproof.reports.side_by_side import SideBySide
from pipeproof.reports.terminal import Terminal
from pipeproof.reports.timeline_text import draw_grid, summarize
from pipeproof.worlds.kinds import REAL
from pipeproof.worlds.launcher import start_fork_server

_TIMES = "how long F, I and W of a {} take (default 1,1,1)"
_TIMED = ("--steps", "--model", "--layers", "--split", "--world", "--transport", "--latency")


def add_schedule_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the three commands."""
    _add_show(commands.add_parser("show", help="draw a schedule, with its bubbles and memory"))
    add_check_command(commands)
    _add_plan(commands.add_parser("plan", help="compare all schedules: time, bubble, memory, messages; the best first"))


def _add_show(parser: argparse.ArgumentParser) -> None:
    add(parser, "schedule", None, f"one of {', '.join(FAMILIES)}, or a FILE.csv", known=FAMILIES)
    add_shape(parser)
    add(parser, "--times", "F,I,W", _TIMES.format("stage"), three_numbers)
    other = "another schedule, or a FILE.csv: both on one axis, numbers side by side"
    add(parser, "--against", "NAME", other, known=FAMILIES)
    add_file(parser, "--svg", "draw the timeline there")
    add_file(parser, "--png", "draw the timeline there (needs the extra 'plot')")
    add_file(parser, "--trace", "write the timeline there for ui.perfetto.dev, as Chrome's JSON")
    add_outputs(parser, what="the timeline")
    on_ranks = "run it on ranks with a small model, and say its times beside the simulated ones"
    add_flag(parser, "--run", says=on_ranks, dest="real")
    real = parser.add_argument_group("with --run")
    add(real, "--steps", "N", "how many steps are timed", whole, default=5)
    add(real, "--model", "NAME", f"one of {', '.join(MODELS)}", known=MODELS, default="gpt")
    add_layers(real)
    add_virtual_time(real)
    parser.set_defaults(run=_show, loss="mean", seed=0)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    most = "the most that a rank may hold; 1 is what a microbatch leaves on a rank, or the unit of --activations"
    left = "what a microbatch leaves on each layer, e.g. in MiB; --memory is then of --weights too"
    stays = "what stays on each layer, in the same unit: parameters, gradients, the optimizer's state"
    kept = "how much of an activation is held from the I to the W"
    add(parser, "--ranks", "P", "how many ranks", whole, default=RANKS)
    add(parser, "--microbatches", "M", "how many microbatches", whole, default=MICROBATCHES)
    add(parser, "--memory", "N", most, number)
    add(parser, "--times", "F,I,W", _TIMES.format("whole rank"), three_numbers, default=(1.0, 1.0, 1.0))
    add(parser, "--costs", "C,C,...", "the cost of each layer; stages are balanced by it", numbers, default=())
    add(parser, "--activations", "A,A,...", left, numbers, default=())
    add(parser, "--weights", "W,W,...", stays, shares, default=())
    add(parser, "--weight-memory", "SHARE", kept, share, default=1)
    add_outputs(parser, what="the table")
    parser.set_defaults(run=_plan)


def _show(options: argparse.Namespace) -> int:
    paths, times = Paths(options.svg, options.png, options.trace), Times(*(options.times or ()))
    refuse_unused(options, _TIMED, "without --run", where=not options.real)
    if options.against is not None:
        return _show_against(options, times, paths)
    with Terminal().progress(f"show {options.schedule}"):
        found = _find_schedule(options.schedule, Shape(options.ranks, options.microbatches, options.virtual))
        schedule = _lawful(found, paths)
    if options.real:
        return _show_real(options, found, paths)
    with Outputs.of(options).open("show") as files:
        with (
            Terminal().progress(f"show {options.schedule}"),
            Drawings(paths, actions=sum(map(len, schedule.ranks))) as drawings,
        ):
            timeline = simulate(schedule, times)
            drawings.write({schedule.name: trace_of(timeline)})
        Terminal().detail(draw_grid(schedule.name, timeline, Terminal().width))
        Terminal().say(summarize(timeline, times))
        names = ("makespan", "global_bubble", "local_bubble", "peaks", "messages", "starts", "ends")
        data = {name: getattr(timeline, name) for name in names}
        return files.finish(0, schedule=schedule_data(schedule), timeline=data)


def _find_schedule(name: str, shape: Shape) -> Schedule | Program:
    """The family or the file of this name."""
    if not is_csv(name):
        return shape.family(name)
    found = read_file(name)
    shape.agree(name, schedule_in(found))
    return found


def _lawful(found: Schedule | Program, paths: Paths) -> Schedule:
    """The schedule of ``found``. One that breaks a law is drawn, what is to blame in red, and then refused."""
    schedule = schedule_in(found)
    broken = of_program(found, laws=ANYWHERE) if isinstance(found, Program) else of_schedule(found)
    if not broken:
        return schedule
    with Drawings(paths, actions=sum(map(len, found.ranks))) as files:
        files.write_panels([in_slots(schedule.name, schedule, found.ranks, broken)])
    no_trace = "\nno trace is written, for what breaks a law has no times" if paths.trace else ""
    raise LawBroken(report(schedule.name, broken, found.ranks) + no_trace)


def _show_against(options: argparse.Namespace, times: Times, paths: Paths) -> int:
    """Both schedules simulated in one unit, after the files at ``paths`` are written."""
    if options.real:
        raise ValueError("--against with --run: expected one of the two, for a run is of one schedule")
    refuse_unused(options, ["--json"], "with --against")
    names = (options.schedule, options.against)
    with Terminal().progress(f"show {names[0]} --against {names[1]}"):
        shapes = _shapes(names, options)
        both = SideBySide.of([_lawful(_find_schedule(*each), paths) for each in zip(names, shapes, strict=True)], times)
        actions = sum(len(timeline.schedule.columns) for timeline in both.timelines.values())
        with Drawings(paths, actions=actions) as files:
            files.write(both.traces, unit=both.unit)
    for name, timeline in both.timelines.items():
        Terminal().detail(f"{draw_grid(name, timeline, Terminal().width)}\n")
    Terminal().say(both.text(Terminal().width))
    return 0


def _shapes(names: tuple[str, str], options: argparse.Namespace) -> Iterator[Shape]:
    """What each of two is built for: a family is as large as the file beside it, where nothing else is said.

    V applies to schedules with virtual stages; others refuse it.
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


def _show_real(options: argparse.Namespace, found: Schedule | Program, paths: Paths) -> int:
    if options.world == REAL:
        refuse_unused(options, ["--times"], "with --run, which measures times, unless --world is simulated")
        refuse_unused(options, ["--transport", "--latency"], "without --world simulated")
    start_fork_server()
    from pipeproof.commands.measure import Virtual, show_measured

    name = options.schedule if is_csv(options.schedule) else schedule_in(found).name
    case = case_of(options, name, found, options.model, "fp32")
    times = None if options.times is None else Times(*options.times)
    virtual = None if options.world == REAL else Virtual(transport_of(options.transport), options.latency, times)
    return show_measured(case, paths, Outputs.of(options), steps=options.steps, virtual=virtual)


def _plan(options: argparse.Namespace) -> int:
    if len(options.costs) == 1:
        raise CaseError(f"--costs {options.costs[0]:g}: expected the costs of all layers, e.g. 1,1,1,1")
    job = (options.ranks, options.microbatches, options.memory, options.times)
    needs = Needs(*job, options.costs, options.weight_memory, options.activations, options.weights)
    with Outputs.of(options).open("plan") as files:
        with Terminal().progress("plan") as show_progress:
            found = plan(needs, progress=lambda name: show_progress(f"plan: {name}"))
        Terminal().detail(table(_plan_columns(), list(map(row, found)), Terminal().width))
        Terminal().say(trade(found))
        status = 0 if any(not option.fails for option in found) else WRONG
        return files.finish(status, options=[asdict(option) for option in found], advice=trade(found))


def _plan_columns() -> list[Column]:
    """The columns of a plan, and which of them is left out first."""
    drops = dict(zip(COLUMNS, (0, 0, 3, 2, 7, 1, 6, 8, 5, 4), strict=True))
    left = ("schedule", "per rank", "split", "")
    return [Column(name, right=name not in left, drop=drop) for name, drop in drops.items()]

"""The commands about schedules themselves, as options: ``show``, ``check`` and ``plan``. They start without torch."""

import argparse
from collections.abc import Iterator
from typing import Any

from pipeproof.cases.case import CaseError
from pipeproof.commands.drawn import against, lawful, named
from pipeproof.commands.ending import WRONG
from pipeproof.commands.option_parser import number, numbers, share, shares, three_numbers
from pipeproof.commands.selection import (
    MICROBATCHES,
    MODEL_NAMES,
    RANKS,
    STATUSES,
    Shape,
    add_shape,
    case_of,
    schedule_in,
)
from pipeproof.pipeline.costs import trace_of
from pipeproof.pipeline.files import is_csv, read_file
from pipeproof.pipeline.grid import draw, marked
from pipeproof.pipeline.laws import LawBroken, check, report
from pipeproof.pipeline.lower import Program, lower
from pipeproof.pipeline.plan import Needs, plan, table, trade
from pipeproof.pipeline.program_laws import violations
from pipeproof.pipeline.schedule import Schedule, ScheduleError
from pipeproof.pipeline.schedules import FAMILIES
from pipeproof.pipeline.simulate import Timeline, Times, simulate
from pipeproof.pipeline.transports import deadlocks
from pipeproof.reports.drawings import Drawings, Paths
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.launcher import start_fork_server

_UNIT = (1.0, 1.0, 1.0)
# What --run takes where nothing is said.
_REAL = {"steps": 5, "model": "gpt", "layers": 8, "split": "even", "loss": "mean", "seed": 0}


def add_schedule_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the three commands."""
    _add_show(commands.add_parser("show", help="draw a schedule; bubbles and memory"))
    about = "check a schedule or a program in torch's CSV format against every law"
    checker = commands.add_parser("check", help=about, epilog=STATUSES)
    checker.add_argument("file", help="a FILE.csv, or - for standard input")
    checker.set_defaults(run=_check)
    _add_plan(commands.add_parser("plan", help="which schedule: time, bubble, memory and messages of all, best first"))


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("schedule", help=f"one of {', '.join(FAMILIES)}, or a FILE.csv")
    add_shape(parser)
    parser.set_defaults(run=_show)
    parser.add_argument("--times", type=three_numbers, metavar="F,I,W", help="of a stage (default 1,1,1)")
    parser.add_argument("--against", metavar="NAME", help="another schedule: both on one axis, numbers side by side")
    parser.add_argument("--svg", metavar="FILE", help="draw the timeline")
    parser.add_argument("--png", metavar="FILE", help="draw the timeline (needs the extra 'plot')")
    parser.add_argument("--trace", metavar="FILE.json", help="write the timeline for ui.perfetto.dev: Chrome's format")
    parser.add_argument("--run", dest="real", action="store_true", help="time it on ranks too, with a small model")
    real = parser.add_argument_group("with --run", argument_default=argparse.SUPPRESS)
    real.add_argument("--steps", type=int, metavar="N", help="how many are timed (default 5)")
    real.add_argument("--model", metavar="NAME", help=f"{MODEL_NAMES} (default gpt)")
    real.add_argument("--layers", type=int, metavar="L", help="layers of the model (default 8)")
    real.add_argument("--split", help="layers per stage: even, or sizes such as 3,1,2,2")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=RANKS, metavar="P", help="(default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES, metavar="M", help="(default %(default)s)")
    parser.add_argument(
        "--memory",
        type=number,
        help="the most that a rank may hold, in activations of one microbatch on a whole rank, or as --activations",
    )
    parser.add_argument(
        "--times", type=three_numbers, default=_UNIT, metavar="F,I,W", help="of a whole rank (default 1,1,1)"
    )
    parser.add_argument(
        "--layers",
        type=numbers,
        default=(),
        metavar="C,C,...",
        help="cost of every layer: stages are balanced by it",
    )
    parser.add_argument(
        "--activations",
        type=numbers,
        default=(),
        metavar="A,A,...",
        help="what a microbatch leaves on every layer, e.g. in MiB: then --memory is in MiB, and includes the weights",
    )
    parser.add_argument(
        "--weights",
        type=shares,
        default=(),
        metavar="W,W,...",
        help="what stays on every layer, in the same unit: parameters, gradients, the optimizer's state",
    )
    parser.add_argument(
        "--weight-memory",
        type=share,
        default=1.0,
        metavar="SHARE",
        help="of an activation, held from I to W (default 1)",
    )
    parser.set_defaults(run=_plan)


def _show(options: argparse.Namespace) -> int:
    paths = Paths(options.svg, options.png, options.trace)
    if not options.real:
        for name in _REAL.keys() & vars(options).keys():
            raise ValueError(f"--{name} says how ranks run: it needs --run")
    if options.against is not None:
        return _show_against(options, paths)
    with Terminal().progress(f"show {options.schedule}"):
        found = named(options.schedule, Shape(options.ranks, options.microbatches, options.virtual))
        schedule = lawful(found, paths)
    if options.real:
        return _show_real(argparse.Namespace(**(_REAL | vars(options))), found, paths)
    with Terminal().progress(f"show {options.schedule}"):
        text = show(schedule, Times(*(options.times or _UNIT)), paths)
    Terminal().say(f"{schedule.name}: {schedule.sizes}")
    Terminal().say(text)
    return 0


def _show_against(options: argparse.Namespace, paths: Paths) -> int:
    if options.real:
        raise ValueError("--against with --run: expected one of the two, for a run is of one schedule")
    with Terminal().progress(f"show {options.schedule} --against {options.against}"):
        both = against(options, Times(*(options.times or _UNIT)), paths)
    for name, timeline in both.timelines.items():
        Terminal().say(f"{name}: {timeline.schedule.sizes}\n{_grid(timeline)}\n")
    Terminal().say(str(both))
    return 0


def _show_real(options: argparse.Namespace, found: Schedule | Program, paths: Paths) -> int:
    if options.times is not None:
        raise ValueError("--times with --run: expected one of the two, for a run measures times")
    start_fork_server()
    from pipeproof.commands.measure import show_measured

    name = options.schedule if is_csv(options.schedule) else schedule_in(found).name
    return show_measured(case_of(options, name, found, options.model, "fp32"), paths, steps=options.steps)


def _check(options: argparse.Namespace) -> int:
    with Terminal().progress(f"check {options.file}"):
        text, free = checked(read_file(options.file))
    Terminal().say(text)
    return 0 if free else WRONG


def _plan(options: argparse.Namespace) -> int:
    if len(options.layers) == 1:
        raise CaseError(f"--layers {options.layers[0]:g}: expected the costs of all layers, e.g. 1,1,1,1")
    needs = Needs(
        options.ranks,
        options.microbatches,
        options.memory,
        options.times,
        options.layers,
        options.weight_memory,
        options.activations,
        options.weights,
    )
    with Terminal().progress("plan") as show_progress:
        found = plan(needs, progress=lambda name: show_progress(f"plan: {name}"))
    Terminal().say(table(found))
    Terminal().say(trade(found))
    return 0 if any(not option.fails for option in found) else 1


def show(schedule: Schedule, times: Times, paths: Paths) -> str:
    """``schedule`` simulated with ``times``, as text, after the files at ``paths`` are written."""
    with Drawings(paths, actions=sum(map(len, schedule.ranks))) as drawings:
        timeline = simulate(schedule, times)
        text = described(timeline, times)
        drawings.write({schedule.name: trace_of(timeline)})
    return text


def described(timeline: Timeline, times: Times) -> str:
    """The grid, and what it comes to."""
    f, i, w = times.forward, times.backward_input, times.backward_weight
    equal = f"T_F = T_I = T_W = {f:g} per stage" if f == i == w else f"T_F = {f:g}, T_I = {i:g}, T_W = {w:g} per stage"
    return "\n".join(
        [
            _grid(timeline),
            f"makespan {timeline.makespan:g} ({equal}, T_B = T_I + T_W = {i + w:g}, no latency)",
            f"bubble   global {timeline.global_bubble:g} ({timeline.bubble_fraction:.1%}), "
            f"local {timeline.local_bubble:g}",
            "memory   peak activations per rank, in microbatches of one stage: "
            + ", ".join(f"{peak:g}" for peak in timeline.peaks),
            f"messages {timeline.messages}",
        ]
    )


def _grid(timeline: Timeline) -> str:
    try:
        return draw(timeline)
    except ScheduleError as error:  # a grid has whole units only; a picture has any
        return f"({error}; --svg or --png draws it)"


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

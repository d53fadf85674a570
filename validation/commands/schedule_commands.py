"""The commands about schedules themselves, as options: ``show`` and ``plan``. They start without torch."""

import argparse
from dataclasses import asdict
from typing import Any

from pipeproof.cases.case import MODELS, CaseError
from pipeproof.commands.check_command import add_check_command, schedule_data
from pipeproof.commands.drawn import against, lawful, named
from pipeproof.commands.ending import WRONG
from pipeproof.commands.option_parser import (
    add_count,
    number,
    numbers,
    offers,
    share,
    shares,
    three_numbers,
    without_effect,
)
from pipeproof.commands.outputs import Outputs, add_file, add_outputs
from pipeproof.commands.selection import (
    MICROBATCHES,
    RANKS,
    Shape,
    add_layers,
    add_shape,
    case_of,
    schedule_in,
)
from pipeproof.commands.simulation_options import add_virtual_time
from pipeproof.pipeline.costs import trace_of
from pipeproof.pipeline.files import is_csv
from pipeproof.pipeline.grid import draw
from pipeproof.pipeline.lower import Program
from pipeproof.pipeline.plan import COLUMNS, Needs, plan, row, trade
from pipeproof.pipeline.schedule import Schedule, ScheduleError
from pipeproof.pipeline.schedules import FAMILIES
from pipeproof.pipeline.simulate import Timeline, Times, simulate
from pipeproof.pipeline.transports import transport_of
from pipeproof.reports.columns import Column, in_pieces, table
from pipeproof.reports.drawings import Drawings, Paths
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.kinds import REAL
from pipeproof.worlds.launcher import start_fork_server

_UNIT = (1.0, 1.0, 1.0)
_TIMES = "how long F, I and W of a {} take (default 1,1,1)"


def add_schedule_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the three commands."""
    _add_show(commands.add_parser("show", help="draw a schedule, with its bubbles and memory"))
    add_check_command(commands)
    _add_plan(commands.add_parser("plan", help="compare all schedules: time, bubble, memory, messages; the best first"))


def _add_show(parser: argparse.ArgumentParser) -> None:
    offers(parser.add_argument("schedule", help=f"one of {', '.join(FAMILIES)}, or a FILE.csv"), FAMILIES)
    add_shape(parser)
    parser.set_defaults(run=_show)
    parser.add_argument("--times", type=three_numbers, metavar="F,I,W", help=_TIMES.format("stage"))
    other = "another schedule, or a FILE.csv: both on one axis, numbers side by side"
    offers(parser.add_argument("--against", metavar="NAME", help=other), FAMILIES)
    add_file(parser, "--svg", "draw the timeline there")
    add_file(parser, "--png", "draw the timeline there (needs the extra 'plot')")
    add_file(parser, "--trace", "write the timeline there for ui.perfetto.dev, as Chrome's JSON")
    add_outputs(parser, what="the timeline")
    on_ranks = "run it on ranks with a small model, and say its times beside the simulated ones"
    parser.add_argument("--run", dest="real", action="store_true", help=on_ranks)
    real = parser.add_argument_group("with --run")
    add_count(real, "--steps", "N", "how many steps are timed", default=5)
    models = f"one of {', '.join(MODELS)}"
    offers(real.add_argument("--model", default="gpt", metavar="NAME", help=models), MODELS)
    add_layers(real)
    add_virtual_time(real)
    parser.set_defaults(loss="mean", seed=0)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add_count(parser, "--ranks", "P", "how many ranks", default=RANKS)
    add_count(parser, "--microbatches", "M", "how many microbatches", default=MICROBATCHES)
    most = "the most that a rank may hold; 1 is what a microbatch leaves on a rank, or the unit of --activations"
    parser.add_argument("--memory", type=number, metavar="N", help=most)
    parser.add_argument("--times", type=three_numbers, default=_UNIT, metavar="F,I,W", help=_TIMES.format("whole rank"))
    costs = "the cost of each layer; stages are balanced by it"
    parser.add_argument("--layers", type=numbers, default=(), metavar="C,C,...", help=costs)
    left = "what a microbatch leaves on each layer, e.g. in MiB; --memory is then of --weights too"
    parser.add_argument("--activations", type=numbers, default=(), metavar="A,A,...", help=left)
    stays = "what stays on each layer, in the same unit: parameters, gradients, the optimizer's state"
    parser.add_argument("--weights", type=shares, default=(), metavar="W,W,...", help=stays)
    held = "how much of an activation is held from the I to the W"
    parser.add_argument("--weight-memory", type=share, default=1, metavar="SHARE", help=held)
    add_outputs(parser, what="the table")
    parser.set_defaults(run=_plan)


def _show(options: argparse.Namespace) -> int:
    paths = Paths(options.svg, options.png, options.trace)
    if not options.real:
        timed = ("--steps", "--model", "--layers", "--split", "--world", "--transport", "--latency")
        without_effect(options, timed, "without --run")
    if options.against is not None:
        return _show_against(options, paths)
    with Terminal().progress(f"show {options.schedule}"):
        found = named(options.schedule, Shape(options.ranks, options.microbatches, options.virtual))
        schedule = lawful(found, paths)
    if options.real:
        return _show_real(options, found, paths)
    with Outputs.of(options).opened("show") as files:
        with Terminal().progress(f"show {options.schedule}"):
            timeline = show(schedule, Times(*(options.times or _UNIT)), paths)
        Terminal().detail(_shown(schedule.name, timeline))
        Terminal().say(described(timeline, Times(*(options.times or _UNIT))))
        return files.finish(0, schedule=schedule_data(schedule), timeline=_times(timeline))


def _show_against(options: argparse.Namespace, paths: Paths) -> int:
    if options.real:
        raise ValueError("--against with --run: expected one of the two, for a run is of one schedule")
    without_effect(options, ["--json"], "with --against")
    with Terminal().progress(f"show {options.schedule} --against {options.against}"):
        both = against(options, Times(*(options.times or _UNIT)), paths)
    for name, timeline in both.timelines.items():
        Terminal().detail(f"{_shown(name, timeline)}\n")
    Terminal().say(both.text(Terminal().width))
    return 0


def _show_real(options: argparse.Namespace, found: Schedule | Program, paths: Paths) -> int:
    if options.world == REAL:
        without_effect(options, ["--times"], "with --run, which measures times, unless --world is simulated")
        without_effect(options, ["--transport", "--latency"], "without --world simulated")
    start_fork_server()
    from pipeproof.commands.measure import Virtual, show_measured

    name = options.schedule if is_csv(options.schedule) else schedule_in(found).name
    case = case_of(options, name, found, options.model, "fp32")
    times = None if options.times is None else Times(*options.times)
    virtual = None if options.world == REAL else Virtual(transport_of(options.transport), options.latency, times)
    return show_measured(case, paths, Outputs.of(options), steps=options.steps, virtual=virtual)


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
    with Outputs.of(options).opened("plan") as files:
        with Terminal().progress("plan") as show_progress:
            found = plan(needs, progress=lambda name: show_progress(f"plan: {name}"))
        Terminal().detail(table(_planned(), list(map(row, found)), Terminal().width))
        Terminal().say(trade(found))
        status = 0 if any(not option.fails for option in found) else WRONG
        return files.finish(status, options=[asdict(option) for option in found], advice=trade(found))


def _planned() -> list[Column]:
    """The columns of a plan, and which of them is left out first."""
    drops = dict(zip(COLUMNS, (0, 0, 3, 2, 7, 1, 6, 8, 5, 4), strict=True))
    left = ("schedule", "per rank", "split", "")
    return [Column(name, right=name not in left, drop=drop) for name, drop in drops.items()]


def _times(timeline: Timeline) -> dict[str, object]:
    names = ("makespan", "global_bubble", "local_bubble", "peaks", "messages", "starts", "ends")
    return {name: getattr(timeline, name) for name in names}


def show(schedule: Schedule, times: Times, paths: Paths) -> Timeline:
    """``schedule`` simulated with ``times``, after the files at ``paths`` are written."""
    with Drawings(paths, actions=sum(map(len, schedule.ranks))) as drawings:
        timeline = simulate(schedule, times)
        drawings.write({schedule.name: trace_of(timeline)})
    return timeline


def _shown(name: str, timeline: Timeline) -> str:
    """The grid, as wide as the terminal, below its name and sizes."""
    return f"{name}: {timeline.schedule.sizes}\n{in_pieces(_grid(timeline), Terminal().width)}"


def described(timeline: Timeline, times: Times) -> str:
    """What a timeline comes to."""
    f, i, w = times.forward, times.backward_input, times.backward_weight
    equal = f"T_F = T_I = T_W = {f:g} per stage" if f == i == w else f"T_F = {f:g}, T_I = {i:g}, T_W = {w:g} per stage"
    return "\n".join(
        [
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

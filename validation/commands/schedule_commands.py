"""The commands about schedules themselves: ``show``, ``check`` and ``plan``. They start without torch."""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any

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
    whole_numbers,
)
from pipeproof.commands.outputs import Outputs, add_file, add_outputs
from pipeproof.commands.selection import add_layers, add_shape, add_virtual_time, case_of
from pipeproof.own.case import MODELS, CaseError
from pipeproof.own.shapes import MICROBATCHES, RANKS, Shape, schedule_in
from pipeproof.pipeline.checked import Checked, check_laws
from pipeproof.pipeline.costs import trace_of
from pipeproof.pipeline.files import is_csv, read_file
from pipeproof.pipeline.laws import LawBroken, report
from pipeproof.pipeline.laws import violations as of_schedule
from pipeproof.pipeline.mesh import PIPELINE, Groups, Tied
from pipeproof.pipeline.mesh_file import MeshFile, mesh_of, read_axes, read_mesh
from pipeproof.pipeline.plan import COLUMNS, Needs, plan, row, trade
from pipeproof.pipeline.program import Program
from pipeproof.pipeline.program_laws import ANYWHERE
from pipeproof.pipeline.program_laws import violations as of_program
from pipeproof.pipeline.recorded import is_trace, read_traces
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.schedules import FAMILIES, LOOPED, canonical_name
from pipeproof.pipeline.timeline import Times, simulate
from pipeproof.reports.columns import Column, table
from pipeproof.reports.drawings import check_drawings, draw_panels, draw_timelines
from pipeproof.reports.panel import in_slots
from pipeproof.reports.side_by_side import SideBySide
from pipeproof.reports.terminal import Terminal
from pipeproof.reports.timeline_text import draw_grid, summarize
from pipeproof.worlds.kinds import REAL
from pipeproof.worlds.launcher import start_fork_server

_LEFT = ("schedule", "per rank", "split", "")
PLAN_COLUMNS = [  # and which of them is left out first
    Column(name, right=name not in _LEFT, drop=drop)
    for name, drop in zip(COLUMNS, (0, 0, 3, 2, 7, 1, 6, 8, 5, 4), strict=True)
]
_TIMES = "how long F, I and W of a {} take (default 1,1,1)"
_TIMED = ("--steps", "--model", "--layers", "--split", "--world", "--transport", "--latency")


def add_schedule_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the three commands."""
    parser = commands.add_parser("show", help="draw a schedule, with its bubbles and memory")
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

    about = "check a schedule or a program in torch's CSV format, or traces of what ran, against every law"
    parser = commands.add_parser("check", help=about)
    files = "a FILE.csv, or - for standard input; FILE.json: traces of what ran, of each rank of a pipeline"
    add(parser, "file", None, f"{files}; with --symbolic also one of show's names", nargs="+")
    symbols = "show what each stage's gradient is made of, for all models and data, under both ways in which messages"
    add_flag(parser, "--symbolic", says=f"{symbols} meet")
    add_shape(parser)
    around = parser.add_argument_group("with --symbolic")
    mesh = "ranks around the pipeline, e.g. dp=128,pp=16,tp=8, or a FILE.json with the groups and sums that a job has"
    copies = "stages with copies of one parameter, which are summed; may be repeated"
    add(around, "--mesh", "AXIS=N,...", mesh)
    add(around, "--tied", "S,S,...", copies, whole_numbers, action="append", default=[])
    add_outputs(parser, what="what was found")
    parser.set_defaults(run=_check)

    about = "compare all schedules: time, bubble, memory, messages; the best first"
    parser = commands.add_parser("plan", help=about)
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
    outputs: Outputs = options.outputs
    times = Times(*(options.times or ()))
    refuse_unused(options, _TIMED, "without --run", where=not options.real)
    if options.against is not None:
        return _show_against(options, times, outputs)
    with Terminal().progress(f"show {options.schedule}"):
        found = _find_schedule(options.schedule, Shape(options.ranks, options.microbatches, options.virtual))
        schedule = _lawful(found, outputs)
    if options.real:
        if options.world == REAL:
            refuse_unused(options, ["--times"], "with --run, which measures times, unless --world is simulated")
            refuse_unused(options, ["--transport", "--latency"], "without --world simulated")
        start_fork_server()
        from pipeproof.commands.measure import show_measured

        name = options.schedule if is_csv(options.schedule) else schedule.name
        return show_measured(case_of(options, name, found, options.model, "fp32"), options)
    check_drawings(outputs.paths, actions=sum(map(len, schedule.ranks)))
    with Terminal().progress(f"show {options.schedule}"):
        timeline = simulate(schedule, times)
        draw_timelines(outputs.files, {schedule.name: trace_of(timeline)})
    Terminal().detail(draw_grid(schedule.name, timeline, Terminal().width))
    Terminal().say(summarize(timeline, times))
    names = ("makespan", "global_bubble", "local_bubble", "peaks", "messages", "starts", "ends")
    data = {name: getattr(timeline, name) for name in names}
    return outputs.finish(0, schedule=schedule_data(schedule), timeline=data)


def _find_schedule(name: str, shape: Shape) -> Schedule | Program:
    """The family or the file of this name."""
    if not is_csv(name):
        return shape.family(name)
    found = read_file(name)
    shape.agree(name, schedule_in(found))
    return found


def _lawful(found: Schedule | Program, outputs: Outputs) -> Schedule:
    """The schedule of ``found``. One that breaks a law is drawn, what is to blame in red, and then refused."""
    schedule = schedule_in(found)
    broken = of_program(found, laws=ANYWHERE) if isinstance(found, Program) else of_schedule(found)
    if not broken:
        return schedule
    check_drawings(outputs.paths, actions=sum(map(len, found.ranks)))
    draw_panels(outputs.files, [in_slots(schedule.name, schedule, found.ranks, broken)])
    no_trace = "\nno trace is written, for what breaks a law has no times" if outputs.paths["trace"] else ""
    raise LawBroken(report(schedule.name, broken, found.ranks) + no_trace)


def _show_against(options: argparse.Namespace, times: Times, outputs: Outputs) -> int:
    """Both schedules simulated in one unit, after files are written."""
    if options.real:
        raise ValueError("--against with --run: expected one of the two, for a run is of one schedule")
    refuse_unused(options, ["--json"], "with --against")
    names = (options.schedule, options.against)
    with Terminal().progress(f"show {names[0]} --against {names[1]}"):
        # A family is as large as the file beside it, where nothing else is said. V is for those that can have it.
        read = [schedule_in(read_file(name)) for name in names if is_csv(name)]
        ranks = read[0].n_ranks if read and options.ranks is None else options.ranks
        microbatches = read[0].microbatches if read and options.microbatches is None else options.microbatches
        looped = [not is_csv(name) and canonical_name(name) in LOOPED for name in names]
        both = list[Schedule]()
        for name, loops in zip(names, looped, strict=True):
            shape = Shape(ranks, microbatches, options.virtual if loops or not any(looped) else None)
            shape = Shape(options.ranks, options.microbatches) if is_csv(name) else shape
            both.append(_lawful(_find_schedule(name, shape), outputs))
        beside = SideBySide.of(both, times)
        actions = sum(len(timeline.schedule.columns) for timeline in beside.timelines.values())
        check_drawings(outputs.paths, actions=actions)
        draw_timelines(outputs.files, beside.traces, unit=beside.unit)
    for name, timeline in beside.timelines.items():
        Terminal().detail(f"{draw_grid(name, timeline, Terminal().width)}\n")
    Terminal().say(beside.text(Terminal().width))
    return 0


def _plan(options: argparse.Namespace) -> int:
    if len(options.costs) == 1:
        raise CaseError(f"--costs {options.costs[0]:g}: expected the costs of all layers, e.g. 1,1,1,1")
    job = (options.ranks, options.microbatches, options.memory, options.times)
    needs = Needs(*job, options.costs, options.weight_memory, options.activations, options.weights)
    with Terminal().progress("plan") as show_progress:
        found = plan(needs, progress=lambda name: show_progress(f"plan: {name}"))
    Terminal().detail(table(PLAN_COLUMNS, list(map(row, found)), Terminal().width))
    Terminal().say(trade(found))
    status = 0 if any(not option.fails for option in found) else WRONG
    outputs: Outputs = options.outputs
    return outputs.finish(status, options=[asdict(option) for option in found], advice=trade(found))


def _check(options: argparse.Namespace) -> int:
    refuse_unused(options, ["--mesh", "--tied"], "without --symbolic", where=not options.symbolic)
    around: MeshFile | None = None
    if options.mesh is not None:
        is_file = options.mesh.lower().endswith(".json")
        around = read_mesh(options.mesh) if is_file else mesh_of(read_axes(options.mesh))
    found, traces = list[Checked](), all(map(is_trace, options.file))
    with Terminal().progress(f"check {', '.join(options.file)}"):
        for made, groups in (_of_traces if traces else _of_plan)(options, around):
            schedule, copies, mesh = schedule_in(made), [Tied(stages) for stages in options.tied], None
            if around is not None or copies:
                whole_mesh = around or mesh_of({PIPELINE: schedule.n_ranks})
                mesh = whole_mesh.mesh(schedule, known=groups).with_tied(copies, schedule)
            found.append(check_laws(made, symbolic=options.symbolic, mesh=mesh, ran=traces))
    for one in found:
        *details, last = str(one).splitlines()
        for text in details:
            Terminal().tell(text, passed=not one.wrong)
        Terminal().say(last)
    worst = next((one for one in found if one.wrong), found[-1])
    outputs: Outputs = options.outputs
    return outputs.finish(WRONG if worst.wrong else 0, schedule=schedule_data(worst.schedule), **worst.data())


Made = tuple[Schedule | Program, Mapping[str, Groups]]  # and what is known of the groups of ranks around it


def _of_plan(options: argparse.Namespace, around: MeshFile | None) -> Iterator[Made]:
    """The family or the file that is asked for."""
    if len(options.file) > 1:
        raise ValueError(f"check {' '.join(options.file)}: expected one schedule, or the traces of one run, FILE.json")
    (name,), shape = options.file, Shape(options.ranks, options.microbatches, options.virtual)
    if name not in FAMILIES or Path(name).exists():
        made = read_file(name)
        shape.agree(name, schedule_in(made))
        yield made, {}
    elif not options.symbolic:
        cure = f"pipeproof show {name} builds that family and draws it; --symbolic checks it"
        raise ValueError(f"{name} is no file: {cure}")
    else:
        ranks = around.axes.get(PIPELINE) if around and shape.ranks is None else shape.ranks
        yield replace(shape, ranks=ranks).family(name), {}


def _of_traces(options: argparse.Namespace, around: MeshFile | None) -> Iterator[Made]:
    """Each step that ran; in the groups that the job made, where all its ranks tell of them."""
    ran = read_traces(options.file, pipelines=around.pipelines if around else ())
    for one in ran.steps:
        schedule = schedule_in(one)
        Shape(options.ranks, options.microbatches, options.virtual).agree(schedule.name, schedule)
        every = around is not None and ran.ranks == prod(around.axes.values())
        yield one, ran.groups if every else {}


def schedule_data(schedule: Schedule) -> dict[str, object]:
    """A schedule as JSON has it."""
    ranks = [list(map(str, row)) for row in schedule.ranks]
    sizes = {"stages": schedule.n_stages, "microbatches": schedule.microbatches}
    return {"name": schedule.name, "ranks": ranks, **sizes}

"""The command ``check``: every law of a schedule, a program or what ran, and in symbols what gradients are made of."""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeproof.commands.ending import WRONG
from pipeproof.commands.option_parser import add, add_flag, refuse_unused, whole_numbers
from pipeproof.commands.outputs import Outputs, add_outputs
from pipeproof.commands.selection import add_shape
from pipeproof.own.shapes import Shape, schedule_in
from pipeproof.pipeline.checked import Checked, check_laws
from pipeproof.pipeline.files import read_file
from pipeproof.pipeline.mesh import PIPELINE, Groups, Mesh, Tied
from pipeproof.pipeline.mesh_file import MeshFile, mesh_of, read_axes, read_mesh
from pipeproof.pipeline.program import Program
from pipeproof.pipeline.recorded import is_trace, read_traces
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.schedules import FAMILIES
from pipeproof.reports.terminal import Terminal


def add_check_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command."""
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


def _check(options: argparse.Namespace) -> int:
    refuse_unused(options, ["--mesh", "--tied"], "without --symbolic", where=not options.symbolic)
    around: MeshFile | None = None
    if options.mesh is not None:
        is_file = options.mesh.lower().endswith(".json")
        around = read_mesh(options.mesh) if is_file else mesh_of(read_axes(options.mesh))
    with Outputs.of(options).open("check") as files:
        with Terminal().progress(f"check {', '.join(options.file)}"):
            found = [*(_of_traces if all(map(is_trace, options.file)) else _of_plan)(options, around)]
        for one in found:
            *details, last = str(one).splitlines()
            for text in details:
                Terminal().tell(text, passed=not one.wrong)
            Terminal().say(last)
        worst = next((one for one in found if one.wrong), found[-1])
        return files.finish(WRONG if worst.wrong else 0, schedule=schedule_data(worst.schedule), **worst.data())


def _of_plan(options: argparse.Namespace, around: MeshFile | None) -> Iterator["Checked"]:
    """The family or the file that is asked for."""
    if len(options.file) > 1:
        raise ValueError(f"check {' '.join(options.file)}: expected one schedule, or the traces of one run, FILE.json")
    (name,), shape = options.file, Shape(options.ranks, options.microbatches, options.virtual)
    if name not in FAMILIES or Path(name).exists():
        made = read_file(name)
        shape.agree(name, schedule_in(made))
    elif not options.symbolic:
        cure = f"pipeproof show {name} builds that family and draws it; --symbolic checks it"
        raise ValueError(f"{name} is no file: {cure}")
    else:
        ranks = around.axes.get(PIPELINE) if around and shape.ranks is None else shape.ranks
        made = replace(shape, ranks=ranks).family(name)
    yield check_laws(made, symbolic=options.symbolic, mesh=_mesh(options, around, made, _NO_GROUPS))


def _of_traces(options: argparse.Namespace, around: MeshFile | None) -> Iterator["Checked"]:
    """Each step that ran; in the groups that the job made, where all its ranks tell of them."""
    ran = read_traces(options.file, pipelines=around.pipelines if around else ())
    for one in ran.steps:
        schedule = schedule_in(one)
        Shape(options.ranks, options.microbatches, options.virtual).agree(schedule.name, schedule)
        every = around is not None and ran.ranks == prod(around.axes.values())
        mesh = _mesh(options, around, one, ran.groups if every else _NO_GROUPS)
        yield check_laws(one, symbolic=options.symbolic, mesh=mesh, ran=True)


_NO_GROUPS: Mapping[str, Groups] = MappingProxyType({})


def _mesh(
    options: argparse.Namespace, around: MeshFile | None, made: Schedule | Program, known: Mapping[str, Groups]
) -> Mesh | None:
    """The mesh around the pipeline, if any."""
    schedule, copies = schedule_in(made), [Tied(stages) for stages in options.tied]
    if around is None and not copies:
        return None
    around = around or mesh_of({PIPELINE: schedule.n_ranks})
    return around.mesh(schedule, known=known).with_tied(copies, schedule)


def schedule_data(schedule: Schedule) -> dict[str, object]:
    """A schedule as JSON has it."""
    ranks = [list(map(str, row)) for row in schedule.ranks]
    sizes = {"stages": schedule.n_stages, "microbatches": schedule.microbatches}
    return {"name": schedule.name, "ranks": ranks, **sizes}

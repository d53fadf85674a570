"""The command ``check``: every law of a schedule, a program or what ran, and in symbols what gradients are made of."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeproof.commands.ending import WRONG
from pipeproof.commands.option_parser import add, add_flag, refuse_unused, whole_numbers
from pipeproof.commands.outputs import Outputs, add_outputs
from pipeproof.commands.selection import Shape, add_shape, schedule_in
from pipeproof.pipeline.action import Action
from pipeproof.pipeline.columns import Columns
from pipeproof.pipeline.deadlock import Deadlock, deadlocks, least_room
from pipeproof.pipeline.files import read_file
from pipeproof.pipeline.laws import Violation, report
from pipeproof.pipeline.laws import violations as of_schedule
from pipeproof.pipeline.mesh import PIPELINE, Groups, Mesh, Tied
from pipeproof.pipeline.mesh_file import MeshFile, mesh_of, read_axes, read_mesh
from pipeproof.pipeline.mesh_sums import violations as of_mesh
from pipeproof.pipeline.program import Program, lower
from pipeproof.pipeline.program_laws import ANYWHERE, LAWS, violations
from pipeproof.pipeline.recorded import is_trace, read_traces
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.schedules import FAMILIES
from pipeproof.pipeline.sizes import some
from pipeproof.pipeline.symbolic import Terms, terms, wrong_terms
from pipeproof.pipeline.text_grid import mark_cells
from pipeproof.pipeline.timeline import simulate
from pipeproof.pipeline.transports import Transport
from pipeproof.reports.terminal import Terminal

_BY_NAME, _IN_ORDER = "by name", "in order"  # ways in which messages meet


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
    """The mesh around the pipeline; None where nobody speaks of one."""
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


@dataclass(frozen=True)
class Checked:
    """What is wrong with a schedule or a program, and under which transports it deadlocks.

    Under none where a law is broken that comes before deadlocks. ``room``: where they deadlock, the least number of
    messages that a transport must keep from one rank to another so that they do not, if that helps. ``mesh``: what is
    around it, and ``unsummed`` what is wrong there.
    """

    schedule: Schedule
    rows: Sequence[Sequence[Action]]
    violations: Sequence[Violation]
    deadlocks: Mapping[Transport, Deadlock | None]
    columns: Columns
    room: Mapping[Transport, int | None] = field(default_factory=dict)
    proofs: Mapping[str, Terms] = field(default_factory=dict)
    mesh: Mesh | None = None
    unsummed: Sequence[Violation] = ()

    @property
    def wrong(self) -> bool:
        """Whether anything in it breaks a law."""
        return bool(self.violations)

    @property
    def summed(self) -> bool:
        """Whether the sums over the mesh are proven: what is wrong in the pipeline is wrong in them."""
        return self.mesh is not None and all(violation.law == "deadlock" for violation in self.violations)

    def data(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        transports = {transport.value: deadlock and deadlock.text for transport, deadlock in self.deadlocks.items()}
        told: dict[str, Any] = {"violations": [asdict(one) for one in self.violations], "transports": transports}
        told["room"] = {transport.value: room for transport, room in self.room.items()}
        if self.proofs:
            told["symbolic"] = {way: proof.proven for way, proof in self.proofs.items()}
        if self.mesh is not None:
            told["sums"] = self.summed
        return told

    def __str__(self) -> str:
        if self.violations and not self.deadlocks:
            return "\n".join([*self._proven(), report(self.schedule.name, self.violations, self.rows)])
        return "\n".join([*self._proven(), *self._lines()])

    def _proven(self) -> Iterator[str]:
        """A line for each way in which messages meet: what gradients are made of."""
        for way, found in self.proofs.items():
            once = f"{len(found.entries):,} terms: in each stage's gradient each microbatch's own, once"
            wrong = int((~found.right).sum()), int((found.counts != 1).sum())
            told = f"WRONG: {wrong[0]:,} terms are of no one microbatch, {wrong[1]:,} are not there once"
            yield f"terms     {way:9}  {once if found.proven else told}"
        if self.mesh is not None:
            yield f"sums      {self.mesh.sizes}: {self._summed_text(self.mesh)}"

    def _summed_text(self, mesh: Mesh) -> str:
        if not self.summed:
            return "WRONG" if self.unsummed else "not shown, as the pipeline itself breaks a law"
        microbatches = self.schedule.microbatches * mesh.replicas
        told = f"each of {microbatches:,} microbatches once in each gradient of {mesh.ranks:,} ranks"
        copies = f", and {some(len(mesh.tied), 'tied parameter')} summed" if mesh.tied else ""
        return f"{told}, divided by {mesh.divisor:,}{copies}"

    def _lines(self) -> Iterator[str]:
        """A line per transport, and one in the end."""
        cells = set[tuple[int, int]]()
        for transport, deadlock in self.deadlocks.items():
            room = self.room.get(transport)
            kept = f"; with room for {some(room, 'message')} from one rank to another there is none" if room else ""
            told = "no deadlock" if deadlock is None else f"DEADLOCK: {deadlock.text}{kept}"
            yield f"transport {transport.value:9}  {told}"
            cells |= set(map(self.columns.cell, deadlock.entries)) if deadlock else set()
        yield from mark_cells(self.rows, cells)
        if not cells:
            timeline = simulate(self.schedule)
            bubble = f"global bubble {timeline.global_bubble:g} of {timeline.makespan:g}"
            yield f"{self.schedule.name} keeps every law: {self.schedule.sizes}; {bubble}"


def check_laws(
    found: Schedule | Program, *, symbolic: bool = False, mesh: Mesh | None = None, ran: bool = False
) -> Checked:
    """Every law of ``found``; of a schedule first its own, as messages can be made for a sound one only.

    ``symbolic``: what gradients are made of, too, where actions and messages are on the ranks of their stages; and what
    the sums over a ``mesh`` make of them. What ``ran`` is not asked whether it deadlocks.
    """
    if isinstance(found, Schedule) and (broken := of_schedule(found)):
        return Checked(found, found.ranks, broken, {}, found.columns, mesh=mesh)
    program = found if isinstance(found, Program) else lower(found)
    broken = violations(program, laws=ANYWHERE if ran else LAWS)
    proofs: dict[str, Terms] = {}
    if symbolic and not any(violation.law == "placement" for violation in broken):
        proofs = {way: terms(program, by_name=way == _BY_NAME) for way in (_BY_NAME, _IN_ORDER)}
        wrong = next((one for one in proofs.values() if not one.proven), None)
        broken = (*broken, *(() if wrong is None else wrong_terms(program, wrong)))
    unsummed = () if mesh is None else of_mesh(mesh, program.schedule)
    broken = (*broken, *unsummed)
    hangs = {} if ran or any(violation.law != "deadlock" for violation in broken) else deadlocks(program)
    room = {transport: least_room(program, transport) for transport, found in hangs.items() if found}
    return Checked(program.schedule, program.ranks, broken, hangs, program.columns, room, proofs, mesh, unsummed)

"""What holds of a schedule, a program or what ran: every law, deadlocks, and in symbols what gradients are made of."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeproof.pipeline.action import Action
from pipeproof.pipeline.columns import Columns
from pipeproof.pipeline.deadlock import Deadlock, deadlocks, least_room
from pipeproof.pipeline.laws import Violation, report
from pipeproof.pipeline.laws import violations as of_schedule
from pipeproof.pipeline.mesh import Mesh
from pipeproof.pipeline.mesh_sums import violations as of_mesh
from pipeproof.pipeline.program import Program, lower
from pipeproof.pipeline.program_laws import ANYWHERE, LAWS, violations
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.sizes import some
from pipeproof.pipeline.symbolic import Terms, terms, wrong_terms
from pipeproof.pipeline.text_grid import mark_cells
from pipeproof.pipeline.timeline import simulate
from pipeproof.pipeline.transports import Transport

_BY_NAME, _IN_ORDER = "by name", "in order"  # ways in which messages meet


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
        data: dict[str, Any] = {"violations": [asdict(one) for one in self.violations], "transports": transports}
        data["room"] = {transport.value: room for transport, room in self.room.items()}
        if self.proofs:
            data["symbolic"] = {way: proof.proven for way, proof in self.proofs.items()}
        if self.mesh is not None:
            data["sums"] = self.summed
        return data

    def __str__(self) -> str:
        if self.violations and not self.deadlocks:
            return "\n".join([*self._proven(), report(self.schedule.name, self.violations, self.rows)])
        return "\n".join([*self._proven(), *self._lines()])

    def _proven(self) -> Iterator[str]:
        """A line for each way in which messages meet: what gradients are made of."""
        for way, found in self.proofs.items():
            once = f"{len(found.entries):,} terms: in each stage's gradient each microbatch's own, once"
            wrong = int((~found.right).sum()), int((found.counts != 1).sum())
            wrong_terms = f"WRONG: {wrong[0]:,} terms are of no one microbatch, {wrong[1]:,} are not there once"
            yield f"terms     {way:9}  {once if found.proven else wrong_terms}"
        if self.mesh is not None:
            yield f"sums      {self.mesh.sizes}: {self._summed_text(self.mesh)}"

    def _summed_text(self, mesh: Mesh) -> str:
        if not self.summed:
            return "WRONG" if self.unsummed else "not shown, as the pipeline itself breaks a law"
        microbatches = self.schedule.microbatches * mesh.replicas
        text = f"each of {microbatches:,} microbatches once in each gradient of {mesh.ranks:,} ranks"
        copies = f", and {some(len(mesh.tied), 'tied parameter')} summed" if mesh.tied else ""
        return f"{text}, divided by {mesh.divisor:,}{copies}"

    def _lines(self) -> Iterator[str]:
        """A line per transport, and one in the end."""
        cells = set[tuple[int, int]]()
        for transport, deadlock in self.deadlocks.items():
            room = self.room.get(transport)
            kept = f"; with room for {some(room, 'message')} from one rank to another there is none" if room else ""
            text = "no deadlock" if deadlock is None else f"DEADLOCK: {deadlock.text}{kept}"
            yield f"transport {transport.value:9}  {text}"
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

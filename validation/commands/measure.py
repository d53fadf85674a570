"""Running a case to time it: a few steps on ranks, and nothing that observes but the runtime's own clock."""

from dataclasses import dataclass, replace

from pipeproof.commands.campaign import enough_ranks
from pipeproof.commands.ending import NO_VERDICT
from pipeproof.commands.outputs import Outputs
from pipeproof.own.case import Case, CaseError
from pipeproof.own.measured import Measured, measure
from pipeproof.pipeline.timeline import Times
from pipeproof.pipeline.transports import Transport
from pipeproof.reports.drawings import Drawings, Paths
from pipeproof.reports.table import table_of_times
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.launcher import describe_sharing
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.world import World


def describe(found: Measured, width: int | None = None, *, shared_by: int = 0) -> str:
    """Where the time of the typical step went, beside the simulation, and how long both took.

    ``shared_by``: how many ranks had this machine's processors between them.
    """
    measured, predicted = found.typical, found.predicted
    lines = [
        table_of_times(measured.profiles(), predicted.profiles(), width),
        f"makespan: {measured.makespan * 1e3:.1f} ms measured, {predicted.makespan * 1e3:.1f} ms simulated",
    ]
    if said := describe_sharing(shared_by):
        lines.append(f"{said}; the simulator gives each rank its own")
    return "\n".join(lines)


@dataclass(frozen=True)
class Virtual:
    """Simulated ranks, each with a clock of its own: what a message takes on its way, in seconds, and actions.

    ``times``: what each action takes, in seconds; None: as long as the processor needs for it.
    """

    transport: Transport
    latency_s: float = 0.0
    times: Times | None = None

    def world(self) -> World:
        """The ranks."""
        from pipeproof.wings.simulated import SimulatedWorld, Timing

        return SimulatedWorld(transport=self.transport.value, timing=Timing(self.latency_s, self.times is None))

    def __str__(self) -> str:
        actions = "what the processor needs" if self.times is None else "what --times says"
        return f"simulated ranks, each with a clock of its own: actions take {actions}, messages {self.latency_s:g} s"


def show_measured(case: Case, paths: Paths, outputs: Outputs, *, steps: int, virtual: Virtual | None = None) -> int:
    """Time ``case``, say how it went beside the simulation, and draw both; returns the exit status.

    ``virtual``: the ranks are simulated, and so is their time.
    """
    if steps < 1:
        raise CaseError(f"--steps is {steps}: expected at least 1")
    case, terminal = replace(case, ragged=False, unequal=False), Terminal()
    # Messages are drawn too: two ends for each, of which there are at most as many as of actions.
    drawn = Drawings(paths, actions=2 * sum(map(len, case.built.ranks)))
    with outputs.open("show") as files, drawn as drawings, virtual.world() if virtual else World() as world:
        try:
            with terminal.progress(f"{steps} steps of {case}"), enough_ranks():
                measured = measure(case, world, steps=steps, times=None if virtual is None else virtual.times)
        except RankFailed as failure:
            terminal.say(str(failure))
            return files.finish(NO_VERDICT)
        name = case.built.name
        drawings.write({f"{name}, simulated with the measured times": measured.predicted,
                        f"{name}, measured": measured.typical})  # fmt: skip
        terminal.say(str(case) if virtual is None else f"{case}, {virtual}")
        terminal.say(describe(measured, terminal.width, shared_by=0 if virtual is not None else case.ranks))
        spans = {"makespan": measured.typical.makespan, "simulated": measured.predicted.makespan}
        return files.finish(0, measured=spans)

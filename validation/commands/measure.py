"""Running a case to time it: a few steps on ranks, and nothing that observes but the runtime's own clock."""

import argparse
from dataclasses import replace

from pipeproof.commands.ending import NO_VERDICT
from pipeproof.commands.outputs import Outputs
from pipeproof.own.case import Case, CaseError
from pipeproof.own.measured import Measured, measure
from pipeproof.pipeline.timeline import Times
from pipeproof.pipeline.transports import transport_of
from pipeproof.reports.drawings import check_drawings, draw_timelines
from pipeproof.reports.table import table_of_times
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.kinds import REAL
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


def show_measured(case: Case, options: argparse.Namespace) -> int:
    """Time ``case``, say how it went beside the simulation, and draw both; returns the exit status.

    ``options`` are of ``show --run``. Simulated ranks have a clock each: ``times`` is what each action takes, and
    ``latency`` what a message takes on its way, in seconds.
    """
    if options.steps < 1:
        raise CaseError(f"--steps is {options.steps}: expected at least 1")
    case, terminal = replace(case, ragged=False, unequal=False), Terminal()
    outputs: Outputs = options.outputs
    if simulated := options.world != REAL:
        from pipeproof.wings.simulated import SimulatedWorld, Timing

        times = None if options.times is None else Times(*options.times)
        timing = Timing(options.latency, times is None)
        world: World = SimulatedWorld(transport=transport_of(options.transport).value, timing=timing)
        takes = "what the processor needs" if times is None else "what --times says"
        clocks = f"simulated ranks, each with a clock of its own: actions take {takes}, messages {options.latency:g} s"
    else:
        world, times = World(), None
    # Messages are drawn too: two ends for each, of which there are at most as many as of actions.
    check_drawings(outputs.paths, actions=2 * sum(map(len, case.built.ranks)))
    with world:
        try:
            with terminal.progress(f"{options.steps} steps of {case}"):
                measured = measure(case, world, steps=options.steps, times=times)
        except RankFailed as failure:
            terminal.say(str(failure))
            return outputs.finish(NO_VERDICT)
        name, typical, predicted = case.built.name, measured.typical, measured.predicted
        both = {f"{name}, simulated with the measured times": predicted, f"{name}, measured": typical}
        draw_timelines(outputs.files, both)
        terminal.say(f"{case}, {clocks}" if simulated else str(case))
        terminal.say(describe(measured, terminal.width, shared_by=0 if simulated else case.ranks))
        return outputs.finish(0, measured={"makespan": typical.makespan, "simulated": predicted.makespan})

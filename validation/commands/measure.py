"""Running a case to time it: a few steps on real ranks, and nothing that observes but the runtime's own clock."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeproof.cases.case import Case, CaseError
from pipeproof.cases.observe import assemble
from pipeproof.commands.campaign import enough_ranks
from pipeproof.commands.ending import NO_VERDICT
from pipeproof.commands.outputs import Outputs
from pipeproof.pipeline.costs import costs_of, predict
from pipeproof.pipeline.trace import Trace
from pipeproof.reference.data import Shapes, microbatches
from pipeproof.reference.model import DTYPES
from pipeproof.reports.drawings import Drawings, Paths
from pipeproof.reports.table import measured_table
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.processors import shared
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World

# Steps before the timed ones: links learn shapes, allocators warm up.
_WARM_UP = 2
# As long as the models' context admits, so that there is something to compute.
_SHAPES = Shapes(rows=8, tokens=64)


@dataclass(frozen=True)
class Measured:
    """Steps of one schedule on real ranks, ``steps[k]`` the k-th."""

    steps: tuple[Trace, ...]

    @property
    def typical(self) -> Trace:
        """The step whose makespan is the median (of an even number, the longer of the two in the middle)."""
        return sorted(self.steps, key=lambda step: step.makespan)[len(self.steps) // 2]

    @property
    def predicted(self) -> Trace:
        """The schedule simulated with the medians of what its actions and messages cost in all steps."""
        return predict(self.typical.schedule, costs_of(self.steps))

    def text(self, width: int | None = None) -> str:
        """Where the time of the typical step went, beside the simulation, and how long both took."""
        measured, predicted = self.typical, self.predicted
        lines = [
            measured_table(measured.profiles(), predicted.profiles(), width),
            f"makespan: {measured.makespan * 1e3:.1f} ms measured, {predicted.makespan * 1e3:.1f} ms simulated",
        ]
        if said := shared(measured.schedule.n_ranks):
            lines.append(f"{said}; the simulator gives each rank its own")
        return "\n".join(lines)


def show_measured(case: Case, paths: Paths, outputs: Outputs, *, steps: int) -> int:
    """Time ``case``, say how it went beside the simulation, and draw both; returns the exit status."""
    if steps < 1:
        raise CaseError(f"--steps is {steps}: expected at least 1")
    case, terminal = replace(case, ragged=False, unequal=False), Terminal()
    # Messages are drawn too: two ends for each, of which there are at most as many as of actions.
    drawn = Drawings(paths, actions=2 * sum(map(len, case.built.ranks)))
    with outputs.opened("show") as files, drawn as drawings, World() as world:
        try:
            with terminal.progress(f"{steps} steps of {case}"), enough_ranks():
                measured = measure(case, world, steps=steps)
        except RankFailed as failure:
            terminal.say(str(failure))
            return files.finish(NO_VERDICT)
        name = case.built.name
        drawings.write({f"{name}, simulated with the measured times": measured.predicted,
                        f"{name}, measured": measured.typical})  # fmt: skip
        terminal.say(f"{case}\n{measured.text(terminal.width)}")
        spans = {"makespan": measured.typical.makespan, "simulated": measured.predicted.makespan}
        return files.finish(0, measured=spans)


def measure(case: Case, world: World, *, steps: int) -> Measured:
    """Time ``steps`` training steps of ``case`` on ``world``. Raises what the world raises."""
    (first, *_) = world.run(measure_rank, case, steps, ranks=case.ranks)
    return Measured(tuple(first))


def measure_rank(context: RankContext, case: Case, steps: int) -> Sequence[Trace]:
    """One rank's part; a job for ``World.run``. All ranks return the same traces."""
    _, schedule = assemble(context, case)
    batches = microbatches(case.model, count=case.microbatches, shapes=_SHAPES, seed=case.seed)
    pairs = [
        (batch.inputs, batch.target)
        for batch in (batch.cast(DTYPES[case.dtype]).to(context.device) for batch in batches)
    ]
    traces = []
    for step in range(_WARM_UP + steps):
        schedule.train_step(pairs)
        if step >= _WARM_UP:
            traces.append(schedule.trace())
    return traces

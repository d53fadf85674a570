"""Running a case to time it: a few steps on ranks, and nothing that observes but the runtime's own clock."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeproof.commands.campaign import enough_ranks
from pipeproof.commands.ending import NO_VERDICT
from pipeproof.commands.outputs import Outputs
from pipeproof.core.observe.wrappers import AroundStage
from pipeproof.own.case import Case, CaseError
from pipeproof.own.observe import assemble
from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.boundary import Gradients, Tensors
from pipeproof.pipeline.costs import costs_of, predict
from pipeproof.pipeline.stage import Goal, Stage
from pipeproof.pipeline.timeline import Times
from pipeproof.pipeline.trace import Trace
from pipeproof.pipeline.transports import Transport
from pipeproof.reference.data import Shapes, microbatches
from pipeproof.reference.model import DTYPES
from pipeproof.reports.drawings import Drawings, Paths
from pipeproof.reports.table import table_of_times
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.launcher import describe_sharing
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

    def text(self, width: int | None = None, *, shared_by: int = 0) -> str:
        """Where the time of the typical step went, beside the simulation, and how long both took.

        ``shared_by``: how many ranks had this machine's processors between them.
        """
        measured, predicted = self.typical, self.predicted
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
        terminal.say(measured.text(terminal.width, shared_by=0 if virtual is not None else case.ranks))
        spans = {"makespan": measured.typical.makespan, "simulated": measured.predicted.makespan}
        return files.finish(0, measured=spans)


def measure(case: Case, world: World, *, steps: int, times: Times | None = None) -> Measured:
    """Time ``steps`` training steps of ``case`` on ``world``. Raises what the world raises.

    ``times``: how long each action sleeps besides, in seconds.
    """
    (first, *_) = world.run(measure_rank, case, steps, times, ranks=case.ranks)
    return Measured(tuple(first))


class _Sleeping(AroundStage):
    """A stage whose actions take some time more."""

    def __init__(self, inner: Stage, times: Times) -> None:
        super().__init__(inner)
        self._times = times

    def forward(self, microbatch: int, inputs: Tensors, goal: Goal | None) -> Tensors:
        self._sleep(Kind.FORWARD, microbatch)
        return super().forward(microbatch, inputs, goal)

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        self._sleep(Kind.BACKWARD, microbatch)
        return super().backward(microbatch, gradients)

    def backward_input(self, microbatch: int, gradients: Gradients) -> Gradients:
        self._sleep(Kind.BACKWARD_INPUT, microbatch)
        return super().backward_input(microbatch, gradients)

    def backward_weight(self, microbatch: int) -> None:
        self._sleep(Kind.BACKWARD_WEIGHT, microbatch)
        super().backward_weight(microbatch)

    def _sleep(self, kind: Kind, microbatch: int) -> None:
        time.sleep(self._times(Action(self.index, kind, microbatch)))


def measure_rank(context: RankContext, case: Case, steps: int, times: Times | None = None) -> Sequence[Trace]:
    """One rank's part; a job for ``World.run``. All ranks return the same traces."""
    _, schedule = assemble(context, case)
    if times is not None:
        schedule = schedule.wrap(
            lambda parts: replace(parts, stages=tuple(_Sleeping(stage, times) for stage in parts.stages))
        )
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

"""Running a case to time it: a few steps on ranks, and nothing that observes but the runtime's own clock."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeproof.core.observe.wrappers import AroundStage
from pipeproof.own.case import Case
from pipeproof.own.observe import assemble
from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.boundary import Gradients, Tensors
from pipeproof.pipeline.costs import costs_of, predict
from pipeproof.pipeline.stage import Goal, Stage
from pipeproof.pipeline.timeline import Times
from pipeproof.pipeline.trace import Trace
from pipeproof.reference.data import Shapes, microbatches
from pipeproof.reference.model import DTYPES
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
        return self.inner.forward(microbatch, inputs, goal)

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        self._sleep(Kind.BACKWARD, microbatch)
        return self.inner.backward(microbatch, gradients)

    def backward_input(self, microbatch: int, gradients: Gradients) -> Gradients:
        self._sleep(Kind.BACKWARD_INPUT, microbatch)
        return self.inner.backward_input(microbatch, gradients)

    def backward_weight(self, microbatch: int) -> None:
        self._sleep(Kind.BACKWARD_WEIGHT, microbatch)
        self.inner.backward_weight(microbatch)

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

"""Running a case to time it: a few steps on ranks, and nothing that observes but the runtime's own clock."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pipeproof.core.observe.wrappers import AroundStage
from pipeproof.own.case import Case
from pipeproof.own.data import data_for
from pipeproof.own.observe import assemble
from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.costs import costs_of, predict
from pipeproof.pipeline.stage import Stage
from pipeproof.pipeline.timeline import Times
from pipeproof.pipeline.trace import Trace
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World

# Steps before the timed ones: links learn shapes, allocators warm up.
_WARM_UP = 2


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


_ACTIONS = {
    "forward": Kind.FORWARD,
    "backward": Kind.BACKWARD,
    "backward_input": Kind.BACKWARD_INPUT,
    "backward_weight": Kind.BACKWARD_WEIGHT,
}


def _slowed(stage: Stage, times: Times) -> Stage:
    """``stage``, whose actions take some time more."""

    def act(name: str, microbatch: int, *given: object) -> Any:
        time.sleep(times(Action(stage.index, _ACTIONS[name], microbatch)))
        return getattr(stage, name)(microbatch, *given)

    slow = AroundStage(stage)
    vars(slow).update({name: partial(act, name) for name in _ACTIONS})
    return slow


def measure_rank(context: RankContext, case: Case, steps: int, times: Times | None = None) -> Sequence[Trace]:
    """One rank's part; a job for ``World.run``. All ranks return the same traces."""
    _, schedule = assemble(context, case)
    if times is not None:
        schedule = schedule.wrap(
            lambda parts: replace(parts, stages=tuple(_slowed(stage, times) for stage in parts.stages))
        )
    # As long as the models' context admits, so that there is something to compute.
    batches = [batch.to(context.device) for batch in data_for(case, 0, rows=8, tokens=64)]
    pairs = [(batch.inputs, batch.target) for batch in batches]
    traces = []
    for step in range(_WARM_UP + steps):
        schedule.train_step(pairs)
        if step >= _WARM_UP:
            traces.append(schedule.trace())
    return traces

"""One operation of a run on both sides: as the ranks did it, and as the reference does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from pipeproof.core.floors import Floors
from pipeproof.core.updates import Pending
from pipeproof.foreign.assemble import Assembled
from pipeproof.foreign.reference_run import ReferenceRun
from pipeproof.foreign.routing import UNROUTED, Routing
from pipeproof.foreign.task import Continued, Task
from pipeproof.observers.observed import Observed, Passed
from pipeproof.reference.accumulation import PLAIN, Accumulation
from pipeproof.reference.step import Contribution, Reference


@dataclass(frozen=True)
class OperationRun:
    """What the ranks made of ``task``, as it was ``found``, and the reference's ``run`` of it.

    ``run`` divides each loss before its backward. ``accumulation``: how the ranks add up what microbatches give.
    ``scale``: what they multiply losses by, and divide gradients by. ``routing``: which experts they chose.
    """

    task: Task
    found: Assembled
    run: ReferenceRun
    accumulation: Accumulation = PLAIN
    scale: float = 1.0
    routing: Routing = UNROUTED

    @cached_property
    def like(self) -> ReferenceRun:
        """The reference's run, which divides where the ranks do. It is done: its places are known."""
        late = self.scale * (self.task.loss.divisor if self.accumulation.late else 1.0)
        whole = late == 1.0
        like = self.run if whole else self.run.divided_late(self.found.owner, watched=self.found.watched, late=late)
        like.made(self.found.owner)
        return like

    @cached_property
    def made(self) -> tuple[Contribution, ...]:
        """What every microbatch gives in that run."""
        return self.like.made(self.found.owner)

    @cached_property
    def reference(self) -> Reference:
        """The reference in the stages that were found."""
        return self.like.reference(self.found.owner, self.found.copies, accumulation=self.accumulation)

    def passages(self, *, undivided: bool = False) -> list[dict[int, Passed]]:
        """What passed the boundaries of stages.

        undivided: beside the run that divides each loss before its backward, wherever the ranks divide.
        """
        run = self.run if undivided else self.like
        if run.places is not None and not self.found.passed_at(run.places):
            run.note_types()
        return self.found.passages(run.places, run.note_handed_on)

    @property
    def routed(self) -> "OperationRun":
        """The same, with the experts that the ranks chose."""
        return replace(self, routing=Routing.of(self.found, self.made))

    @property
    def following(self) -> "OperationRun":
        """The same, where the reference chooses the experts that the ranks chose; itself, where it did."""
        if not self.routing.differs(self.made):
            return self
        task = replace(self.task, routed=self.routing.told(len(self.made)))
        model, found = task.built(next(self.run.model.parameters()).device.type), self.found
        run = ReferenceRun(task, model, found.replicas, owner=found.owner, surveyed=found.watched)
        return replace(self, task=task, run=run)

    @property
    def explained(self) -> "OperationRun":
        """As ``following``, as far as rounding explains what the ranks chose.

        From the first router of a microbatch on whose choice it does not, the reference goes by its own scores.
        """
        following = self.following
        routing = self.routing.with_wrong(following.made, lambda *at: following.floors.scores(*at))
        return replace(self, routing=routing).following if routing.wrong else following

    @cached_property
    def floors(self) -> Floors:
        """What rounding does to what this operation gives by itself."""
        every, sites = range(len(self.made)), (*self.found.copies, *((at, "") for at in self.found.owner.values()))
        orders = {stage: every for stage, _ in sites}
        expected = self.reference.before_update(self.run.batches, self.made, orders=orders)
        return Floors(self.reference, [Pending(expected, self.run.batches, orders)])

    def continued(self) -> Continued | None:
        """The reference as the next operation begins: with the weights and the buffers that the ranks have.

        For an update rounds, and the order of microbatches shows in averages. None where they did not hand back all
        weights.
        """
        weights = self.run.weights
        if self.found.name == "train":
            left, parameters = self.found.left, dict(self.found.model.named_parameters(remove_duplicate=False))
            weights |= left
            if any(one.requires_grad and name not in left for name, one in parameters.items()):
                return None
        build = self.task.reference
        func = build.func if isinstance(build, Continued) else build
        return Continued(func, self.like.model, weights, {**self.like.buffers, **self.found.left_in_buffers})

    @property
    def moves_buffers(self) -> bool:
        """Whether the reference's forwards have changed any buffer so far."""
        begun = dict(self.task.built("cpu").named_buffers())
        return any(not torch.equal(one.cpu(), begun[name].cpu()) for name, one in self.like.buffers.items())


def observed_of(runs: Sequence[OperationRun], known: Sequence[Sequence[Mapping[int, Passed]]]) -> Observed:
    """What was produced in all of ``runs``; ``known``: for each of them, what passed the boundaries of stages."""
    each = [one.found.observed(passed) for one, passed in zip(runs, known, strict=True)]
    rows = [
        tuple(
            replace(one, routes=run.routing.ranks.get(rank, {})) for run, (one,) in zip(runs, operations, strict=True)
        )
        for rank, operations in enumerate(zip(*(one.ranks for one in each), strict=True))
    ]
    counts = tuple(len(one.made) for one in runs)
    return Observed(each[0].schedule, tuple(rows), each[0].copies, counts)

"""A run's operations on both sides: ranks and reference."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from pipeproof.core.floors import Floors
from pipeproof.core.observe.observed import Observed, Passed
from pipeproof.core.updates import Pending
from pipeproof.reference.accumulation import PLAIN, Accumulation
from pipeproof.reference.step import Contribution, Reference
from pipeproof.whitebox.assemble import Assembled
from pipeproof.whitebox.rank import RankMade
from pipeproof.whitebox.reference_run import ReferenceRun, SecondModel
from pipeproof.whitebox.routing import UNROUTED, Routing
from pipeproof.whitebox.task import Continued, Task


@dataclass(frozen=True)
class OperationRun:
    """One operation: ranks' results ``found`` for ``task``, and the reference's ``run``.

    ``run`` divides each loss before its backward. accumulation: how ranks sum contributions. scale: their loss scale,
    divided out of gradients. routing: their expert choices.
    """

    task: Task
    found: Assembled
    run: ReferenceRun
    accumulation: Accumulation = PLAIN
    scale: float = 1.0
    routing: Routing = UNROUTED

    @cached_property
    def like(self) -> ReferenceRun:
        """The reference's run with the ranks' division order. It is complete: its places are known."""
        late = self.scale * (self.task.loss.divisor if self.accumulation.late else 1.0)
        like = self.run if late == 1.0 else self.run.other(self.found.owner, watched=self.found.watched, late=late)
        like.contributions(self.found.owner)
        return like

    @property
    def undivided(self) -> tuple[Contribution, ...]:
        """Contributions per microbatch, with losses divided before backward."""
        return self.run.contributions(self.found.owner)

    @cached_property
    def made(self) -> tuple[Contribution, ...]:
        """Contributions per microbatch in ``like``."""
        return self.like.contributions(self.found.owner)

    @cached_property
    def reference(self) -> Reference:
        """The reference, split into the ranks' stages."""
        return self.like.reference(self.found.owner, self.found.copies, accumulation=self.accumulation)

    def passages(self, *, undivided: bool = False) -> list[dict[int, Passed]]:
        """Return boundary observations.

        undivided: compare with the run that divides each loss before its backward, even if ranks divide later.
        """
        run = self.run if undivided else self.like
        if run.places is not None and not self.found.has_passed_at(run.places) and run.computed_in is not None:
            for places in run.places:  # it needs another run
                places.note_type(run.computed_in)
        return self.found.passages(run.places, run.note_handed_on)

    @property
    def following(self) -> "OperationRun":
        """Copy whose reference follows the ranks' expert choices; itself if equal."""
        if not self.routing.differs(self.made):
            return self
        task = replace(self.task, routed=self.routing.choices(len(self.made)))
        return replace(self, task=task, run=self.run.other(self.found.owner, watched=self.found.watched, task=task))

    @property
    def explained(self) -> "OperationRun":
        """Like ``following``, but only for choices that rounding explains.

        After a microbatch's first unexplained choice, the reference follows its own scores.
        """
        following = self.following
        routing = self.routing.with_wrong(following.made, lambda *at: following.floors.scores(*at))
        return replace(self, routing=routing).following if routing.wrong else following

    @cached_property
    def floors(self) -> Floors:
        """Floors for this operation alone."""
        every, sites = range(len(self.made)), (*self.found.copies, *((at, "") for at in self.found.owner.values()))
        orders = {stage: every for stage, _ in sites}
        expected = self.reference.before_update(self.run.batches, self.made, orders=orders)
        return Floors(self.reference, [Pending(expected, self.run.batches, orders)])

    def follow(self) -> Continued | None:
        """Return the reference for the next operation, with the ranks' weights and buffers.

        Updates round, and averages depend on microbatch order. None if ranks did not return all weights.
        """
        weights = self.run.weights
        if self.found.name == "train":
            left, parameters = self.found.left, dict(self.found.model.named_parameters(remove_duplicate=False))
            weights |= left
            if any(one.requires_grad and name not in left for name, one in parameters.items()):
                return None
        build = self.task.reference
        func = build.func if isinstance(build, Continued) else build
        left_buffers = {name: buffer for (_, name), buffer in self.found.buffers(self.found.stages).items()}
        return Continued(func, self.like.model, weights, self.like.buffers | left_buffers)


def observe_runs(runs: Sequence[OperationRun], known: Sequence[Sequence[Mapping[int, Passed]]]) -> Observed:
    """Combine ``runs`` into one observation; ``known``: boundary observations per run."""
    each = [one.found.observe(passed) for one, passed in zip(runs, known, strict=True)]
    rows = [
        tuple(
            replace(one, routes=run.routing.ranks.get(rank, {})) for run, (one,) in zip(runs, operations, strict=True)
        )
        for rank, operations in enumerate(zip(*(one.ranks for one in each), strict=True))
    ]
    counts = tuple(len(one.made) for one in runs)
    return Observed(each[0].schedule, tuple(rows), each[0].copies, counts)


@dataclass(frozen=True)
class Course:
    """The task's operations in sequence, while each start is known.

    second: another model for the first operation. halted: why later operations are missing; raised: the reference's
    error, which counts if all operations before it passed.
    """

    title: str
    task: Task
    second: SecondModel
    runs: tuple[OperationRun, ...]
    halted: str = ""
    raised: Exception | None = None

    def each(self, change: Callable[[OperationRun], OperationRun]) -> "Course":
        """Map ``change`` over all operations."""
        return replace(self, runs=tuple(map(change, self.runs)))

    def through(self, made: Sequence[Sequence[RankMade]]) -> "Course":
        """Add all comparable operations; ``made``: joined results by operation.

        A reference error in a later operation is stored: an earlier fault may cause it.
        """
        course = self
        for number in range(1, len(self.task.contract.plan)):
            try:
                following = course._next(number, made[number])
            except Exception as error:  # any type: user code runs here
                return replace(course, raised=error, halted=f"the reference cannot do operation {number + 1}")
            if isinstance(following, str):
                return replace(course, halted=following)
            course = replace(course, runs=(*course.runs, following))
        return course

    def _next(self, number: int, made: Sequence[RankMade]) -> OperationRun | str:
        """Return operation ``number``, or why it cannot be compared."""
        first, last, name = self.runs[0], self.runs[-1], self.task.contract.plan[number]
        begun = last.follow()
        if begun is None:
            return f"the weights after operation {number} were not handed back: hand modules back"
        if name == "eval" and not first.found.alone:
            before = dict(last.task.build("cpu").named_buffers())
            if any(not torch.equal(one.cpu(), before[name].cpu()) for name, one in last.like.buffers.items()):
                return f"operation {number + 1} evaluates, and each replica has buffers of its own microbatches"
        replicas, task = first.found.replicas.of_as_many(self.task.counts[number]), self.task.operation(number, begun)
        model = task.build(first.run.device)
        found = replace(first.found, model=model, made=made, replicas=replicas, first=first.found, name=name)
        run = ReferenceRun(task, model, replicas, owner=first.found.owner, surveyed=found.watched)
        one = OperationRun(task, found, run, first.accumulation.dealt(replicas.each))
        _ = one.made  # raises the reference's errors
        return one

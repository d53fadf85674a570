"""The operations of a run on both sides: as the ranks did them, and as the reference does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from pipeproof.core.floors import Floors
from pipeproof.core.observe.observed import Observed, Passed
from pipeproof.core.updates import Pending
from pipeproof.core.verdict import Verdict
from pipeproof.reference.accumulation import PLAIN, Accumulation
from pipeproof.reference.step import Contribution, Reference
from pipeproof.whitebox.assemble import Assembled
from pipeproof.whitebox.rank import RankMade
from pipeproof.whitebox.reference_run import ReferenceRun, SecondModel
from pipeproof.whitebox.routing import UNROUTED, Routing
from pipeproof.whitebox.task import Continued, Task


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
        like = self.run if late == 1.0 else self.run.other(self.found.owner, watched=self.found.watched, late=late)
        like.made(self.found.owner)
        return like

    @property
    def undivided(self) -> tuple[Contribution, ...]:
        """What every microbatch gives where each loss is divided before its backward."""
        return self.run.made(self.found.owner)

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
        task = replace(self.task, routed=self.routing.chosen(len(self.made)))
        return replace(self, task=task, run=self.run.other(self.found.owner, watched=self.found.watched, task=task))

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


@dataclass(frozen=True)
class Course:
    """The operations of ``task``, one after another, as far as it is known what each began with.

    ``second`` is another model of the first one. ``halted`` says why no later ones follow, ``raised`` what the
    reference raised there.
    """

    title: str
    task: Task
    second: SecondModel
    runs: tuple[OperationRun, ...]
    halted: str = ""
    raised: Exception | None = None

    def each(self, change: Callable[[OperationRun], OperationRun]) -> "Course":
        """The same, with every operation changed."""
        return replace(self, runs=tuple(map(change, self.runs)))

    def through(self, made: Sequence[Sequence[RankMade]]) -> "Course":
        """The same with all operations that can be compared; ``made``: by operation, all ranks' parts as one.

        What the reference raises in a later one is kept: a fault may lead there.
        """
        course = self
        for number in range(1, len(self.task.plan)):
            try:
                following = course._next(number, made[number])
            except Exception as error:  # no one type: it is the user's code that runs
                return replace(course, raised=error, halted=f"the reference cannot do operation {number + 1}")
            if isinstance(following, str):
                return replace(course, halted=following)
            course = replace(course, runs=(*course.runs, following))
        return course

    def concluded(self, verdict: Verdict) -> Verdict:
        """``verdict``; raises what the reference raised, where no operation before that is wrong."""
        if self.raised is not None and verdict.verdict == "pass":
            raise self.raised
        return verdict

    def _next(self, number: int, made: Sequence[RankMade]) -> OperationRun | str:
        """Operation ``number``, or why it cannot be compared."""
        first, last, name = self.runs[0], self.runs[-1], self.task.plan[number]
        begun = last.continued()
        if begun is None:
            return f"the weights after operation {number} were not handed back: hand modules back"
        if name == "eval" and not first.found.alone and last.moves_buffers:
            return f"operation {number + 1} evaluates, and each replica has buffers of its own microbatches"
        replicas, task = first.found.replicas.of_as_many(self.task.counts[number]), self.task.operation(number, begun)
        model = task.built(first.run.device)
        found = replace(first.found, model=model, made=made, replicas=replicas, first=first.found, name=name)
        run = ReferenceRun(task, model, replicas, owner=first.found.owner, surveyed=found.watched)
        one = OperationRun(task, found, run, first.accumulation.dealt(replicas.each))
        _ = one.made  # raises what the reference does
        return one

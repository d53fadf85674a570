"""The operations of a run, one after another, as far as it is known what each began with."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeproof.core.verdict import Verdict
from pipeproof.foreign.assemble import Assembled
from pipeproof.foreign.operation_run import OperationRun
from pipeproof.foreign.rank import RankMade
from pipeproof.foreign.reference_run import ReferenceRun
from pipeproof.foreign.task import Task


@dataclass
class Course:
    """Takes ``runs``, of which the first is there, as far as it can; ``made``: by operation, all ranks' parts as one.

    ``halted`` says why it goes no further, ``raised`` what the reference raised there.
    """

    task: Task
    device: str
    made: Sequence[Sequence[RankMade]]
    runs: list[OperationRun]
    halted: str = ""
    raised: Exception | None = field(default=None, init=False)

    def run(self) -> None:
        """Run the reference through all operations. What it raises in a later one is kept: a fault may lead there."""
        for number in range(1, len(self.task.plan)):
            try:
                one = self._next(number)
            except Exception as error:  # no one type: it is the user's code that runs
                self.raised, self.halted = error, f"the reference cannot do operation {number + 1}"
                return
            if one is None:
                return
            self.runs.append(one)

    def concluded(self, verdict: Verdict) -> Verdict:
        """``verdict``; raises what the reference raised, where no operation before that is wrong."""
        if self.raised is not None and verdict.verdict == "pass":
            raise self.raised
        return verdict

    def _next(self, number: int) -> OperationRun | None:
        """Operation ``number``; None where it cannot be compared."""
        first, last, name = self.runs[0], self.runs[-1], self.task.plan[number]
        begun = last.continued()
        if begun is None:
            self.halted = f"the weights after operation {number} were not handed back: hand modules back"
            return None
        replicas = first.found.replicas.of_as_many(self.task.counts[number])
        if name == "eval" and not first.found.alone and last.moves_buffers:
            self.halted = f"operation {number + 1} evaluates, and each replica has buffers of its own microbatches"
            return None
        task, known = self.task.operation(number, begun), first.found.contents
        model = task.built(self.device)
        found = Assembled(model, known, self.made[number], replicas, first.found.repeated, first.found, name)
        run = ReferenceRun(task, model, replicas, owner=first.found.owner, surveyed=found.watched)
        one = OperationRun(task, found, run, first.accumulation.dealt(replicas.each))
        _ = one.made  # raises what the reference does
        return one

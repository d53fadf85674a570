"""The reference's own run over the microbatches, one at a time, so that it can go on while the ranks are busy."""

from collections import deque
from collections.abc import Collection, Mapping

from torch import nn

from reference.step import Contribution, LossError, Recipe, Reference, Site
from validation.diagnosis.members import Replicas
from validation.foreign.places import Both, Survey
from validation.foreign.task import ReferenceRaised, Task
from validation.judging.judge import one_thread
from validation.judging.verdict import raised


class ReferenceRun:
    """An iterator of which each step makes what ``model`` gives for one more microbatch of ``task``.

    ``owner`` is the stage of every parameter name. While the ranks have yet to tell it, each name is a stage of its own
    (None), and the run is surveyed in case they watch.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        replicas: Replicas,
        *,
        owner: Mapping[str, int] | None = None,
        surveyed: bool = True,
    ) -> None:
        self.batches = task.batches(model)
        self._task, self._model, self._replicas = task, model, replicas
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._survey = Survey(model, replicas=replicas.count) if surveyed else None
        each = {name: number for number, name in enumerate(self._parameters)}
        self._coming = self.reference(each if owner is None else owner).contributing(self.batches)
        self._made: list[Contribution] = []
        self._failure: Exception | None = None

    def __iter__(self) -> "ReferenceRun":
        return self

    def __next__(self) -> None:
        """Make the next microbatch's. What that raises is kept: where the ranks fail too, they are heard first."""
        if self._failure is not None or len(self._made) == len(self.batches):
            raise StopIteration
        try:
            with one_thread():
                self._made.append(self._next())
        except Exception as failure:  # no one type: it is the user's code that runs
            self._failure = failure

    def settled(self, owner: Mapping[str, int], *, watched: bool) -> "ReferenceRun":
        """This run, where it has begun and holds for these owners; else another that does, from the same weights.

        It does not hold where two names of one tensor share a stage: autograd sums what they give in its own order.
        """
        begun = bool(self._made or self._failure)
        uses = {(id(parameter), owner[name]) for name, parameter in self._parameters.items()}
        if begun and len(uses) == len(self._parameters):
            return self
        model = self._task.built(next(self._model.parameters()).device.type) if begun else self._model
        return ReferenceRun(self._task, model, self._replicas, owner=owner, surveyed=watched)

    def reference(self, owner: Mapping[str, int], copies: Collection[Site] = ()) -> Reference:
        """The reference in these stages."""
        return Reference(self._model, owner=owner, recipe=Recipe(loss=self._task.loss), copies=copies)

    def made(self, owner: Mapping[str, int]) -> tuple[Contribution, ...]:
        """What every microbatch gives in these stages. Raises ``ReferenceRaised``."""
        deque(self, maxlen=0)
        failure = self._failure
        if failure is not None:
            known = isinstance(failure, LossError)
            why = f"cannot be differentiated: {failure}" if known else f"raised {raised(failure)}"
            where = f"on microbatch {len(self._made)} the reference {self._task.name}"
            raise ReferenceRaised(f"{where} {why}") from failure
        return tuple(one.under(owner) for one in self._made)

    @property
    def places(self) -> Both | None:
        """Where what passed, if the run was surveyed."""
        return None if self._survey is None else self._survey.places

    def _next(self) -> Contribution:
        number = len(self._made)
        if self._survey is None:
            return next(self._coming)
        return self._survey.watch(number, self.batches[number], lambda: next(self._coming))

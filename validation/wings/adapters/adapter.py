"""What an adapter of a framework is, and the three kinds of check that are made of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar

from torch import nn

from pipeproof.core.verdict import Verdict
from pipeproof.records.checked_step import CheckedStep
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_expectation import StepExpectation
from pipeproof.records.step_record import Pairs
from pipeproof.whitebox.task import MakesOptimizer
from pipeproof.whitebox.validator import WhiteBox
from pipeproof.wings.adapters.drawn import Content, contents
from pipeproof.wings.adapters.framework import AdapterError, Framework
from pipeproof.wings.adapters.job import JobStep, checking
from pipeproof.wings.adapters.recording import StepRecording, recording
from pipeproof.wings.adapters.sight import Observation, observing
from pipeproof.wings.adapters.step import FrameworkStep
from pipeproof.wings.adapters.whole import Named, Whole

Reference = Callable[..., Any] | StepExpectation


class Adapter(ABC):
    """A framework's training step on this rank, by what its user has of it: an engine, a trainer, a schedule."""

    framework: ClassVar[Framework]
    given_as: ClassVar[str] = "microbatches"  # what its users call what they give

    @abstractmethod
    def step(self) -> FrameworkStep:
        """Where its numbers become visible. Raises ``AdapterError`` for what would be judged wrongly."""

    def load(self, step: FrameworkStep, microbatches: Sequence[Any], reference: nn.Module) -> Any:
        """Give ``step`` the weights of ``reference``; the data iterator to train it on."""
        self.framework.load(step.parameters(), reference)
        return iter(microbatches)

    @abstractmethod
    def whole(self, reference: Callable[..., Any], microbatches: Sequence[Any]) -> Whole:
        """The whole model that ``reference`` builds, and what the step claims of it."""

    def against_itself(self, by: StepExpectation, microbatches: Sequence[Any]) -> tuple[StepExpectation, Pairs]:
        """``by`` with what is known of the job, and pairs of what stages and the loss are given."""
        kind = type(self).__name__
        raise AdapterError(f"a step of {kind} is not held against itself: pass a reference that builds the whole model")

    def gathered(self, microbatches: Any, timeout_s: float) -> Any:
        """What all ranks have of ``microbatches``; every rank calls this, before anything else."""
        return microbatches

    def cut(self, microbatches: Sequence[Any]) -> Iterable[Any]:
        """The microbatches proper, of what the user gives."""
        return microbatches

    def contents(self, microbatches: Sequence[Any] | None) -> Sequence[Content]:
        """What is in ``microbatches``, as the job draws it."""
        return contents(microbatches)

    def held_against(self, reference: Reference, microbatches: Any, *, floors: bool, timeout_s: float) -> JobStep:
        """The step and what it is held against."""
        microbatches = self.gathered(microbatches, timeout_s)
        step = self.step()
        against: SingleDevice | StepExpectation
        given = () if microbatches is None else self.framework.listed(microbatches, what=self.given_as)
        if isinstance(reference, StepExpectation):
            against, pairs = self.against_itself(reference, given)
        else:
            whole = self.whole(reference, given)
            against, pairs = whole.beside(floors=floors), whole.pairs
        return JobStep(step, None if microbatches is None else pairs, against, self.contents(microbatches))

    def recorded(self, microbatches: Any, timeout_s: float) -> tuple[FrameworkStep, Iterable[Any] | None]:
        """The step and its microbatches."""
        found = self.gathered(microbatches, timeout_s)
        return self.step(), None if found is None else self.cut(found)


@contextmanager
def observed(adapter: Adapter, microbatches: Sequence[Any], reference: nn.Module) -> Iterator[Observation]:
    """Observe the step that is trained inside this, from the weights of ``reference``."""
    step = adapter.step()
    seen = Observation(step, adapter.load(step, microbatches, reference))
    with observing(seen, step):
        yield seen


def check_step(
    adapter: Adapter, microbatches: Any, *, reference: Reference, floors: bool = True, timeout_s: float
) -> AbstractContextManager[CheckedStep]:
    """A context manager around one step of a running job, which is held against ``reference``. Every rank enters it."""
    made = partial(adapter.held_against, reference, microbatches, floors=floors, timeout_s=timeout_s)
    return checking(made, timeout_s=timeout_s, composed=reference if isinstance(reference, StepExpectation) else None)


def record_step(
    adapter: Adapter, microbatches: Any, path: str, *, timeout_s: float
) -> AbstractContextManager[StepRecording]:
    """A context manager around one step of a running job, which records what it gave. Every rank enters it."""
    made = partial(adapter.recorded, microbatches, timeout_s)
    return recording(made, path, framework=adapter.framework, timeout_s=timeout_s)


def validate(
    framework: Framework,
    step: Callable[[Any, list[Any]], Any],
    whole: Whole,
    *,
    ranks: int | Sequence[int] | Mapping[str, int],
    whitebox: WhiteBox | None,
    optimizer: MakesOptimizer | None = None,
) -> Verdict:
    """The verdict on ``step``, which trains inside ``observed``, beside ``whole``."""
    return framework.judge(whitebox)(
        Named(step, whole.run_by(step)),
        reference=Named(whole.reference, whole.build),
        microbatches=list(whole.microbatches),
        ranks=framework.mesh(ranks),
        loss_fn=whole.loss_in_step,
        optimizer=optimizer,
        contract=whole.contract_in_step(),
    )

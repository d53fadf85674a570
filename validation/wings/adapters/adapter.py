"""The adapter of a framework, and three kinds of check built on it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import nn

from pipeproof.core.observe.initial_weights import step_begins
from pipeproof.core.observe.watching import watch
from pipeproof.core.verdict import Verdict
from pipeproof.records.checked_step import CheckedStep, Unchecked
from pipeproof.records.rank_part import AdapterNames, own_name
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_check import StepCheck
from pipeproof.records.step_expectation import StepExpectation
from pipeproof.records.step_record import Pairs
from pipeproof.whitebox.task import MakesOptimizer, WhiteBoxError
from pipeproof.whitebox.validator import WhiteBox
from pipeproof.wings.adapters.framework import AdapterError, Framework
from pipeproof.wings.adapters.recording import StepRecording, recording
from pipeproof.wings.adapters.step import Content, FrameworkStep, JobSight, Observation, contents
from pipeproof.wings.adapters.whole import Whole, under_name_of

Reference = Callable[..., Any] | StepExpectation


@dataclass(frozen=True)
class JobStep:
    """A framework's step on a rank, the microbatches of this rank's replica, and the expectation.

    given: their content in the form drawn by the job; empty if absent or unobserved.
    """

    step: FrameworkStep
    microbatches: Pairs | None
    against: SingleDevice | StepExpectation
    given: Sequence[Content] = ()


_NONE = FrameworkStep({}, own_name, dict, tuple, lambda _: nullcontext())  # of a rank that has none


class Adapter(ABC):
    """A framework's training step on this rank, from a user's objects: an engine, a trainer, a schedule."""

    framework: ClassVar[Framework]
    given_as: ClassVar[str] = "microbatches"  # the user's name for the argument

    @abstractmethod
    def step(self) -> FrameworkStep:
        """Return the step with access to its numbers. Raises ``AdapterError`` for unsupported use."""

    def load(self, step: FrameworkStep, microbatches: Sequence[Any], reference: nn.Module) -> Any:
        """Load weights of ``reference`` into ``step``; return the data iterator for training."""
        self.framework.load(step.parameters(), reference)
        return iter(microbatches)

    @abstractmethod
    def whole(self, reference: Callable[..., Any], microbatches: Sequence[Any]) -> Whole:
        """Return the whole model built by ``reference``, and the step's claims."""

    def against_itself(self, by: StepExpectation, microbatches: Sequence[Any]) -> tuple[StepExpectation, Pairs]:
        """Return ``by`` with facts about the job, and pairs of inputs for stages and the loss."""
        kind = type(self).__name__
        raise AdapterError(f"a step of {kind} is not held against itself: pass a reference that builds the whole model")

    def gather(self, microbatches: Any, timeout_s: float) -> Any:
        """Gather ``microbatches`` from all ranks; every rank calls this first."""
        return microbatches

    def cut(self, microbatches: Sequence[Any]) -> Iterable[Any]:
        """Return the microbatches proper from the user's argument."""
        return microbatches

    def contents(self, microbatches: Sequence[Any] | None) -> Sequence[Content]:
        """Return the content of ``microbatches`` in the form drawn by the job."""
        return contents(microbatches)

    def job_step(self, reference: Reference, microbatches: Any, *, floors: bool, timeout_s: float) -> JobStep:
        """Return the step and its expectation."""
        microbatches = self.gather(microbatches, timeout_s)
        step = self.step()
        against: SingleDevice | StepExpectation
        given = () if microbatches is None else self.framework.list_microbatches(microbatches, what=self.given_as)
        if isinstance(reference, StepExpectation):
            against, pairs = self.against_itself(reference, given)
        else:
            whole = self.whole(reference, given)
            against, pairs = whole.single_device(floors=floors), whole.pairs
        return JobStep(step, None if microbatches is None else pairs, against, self.contents(microbatches))


@contextmanager
def observe(adapter: Adapter, microbatches: Sequence[Any], reference: nn.Module) -> Iterator[Observation]:
    """Observe the step trained in this block, from weights of ``reference``."""
    step = adapter.step()
    observed = Observation(step, adapter.load(step, microbatches, reference))
    step_begins(step.sum_of)  # with current weights
    with step.watching(observed):
        for module in step.stages.values():
            watch(module, when=step.when)
        yield observed


def check_step(
    adapter: Adapter, microbatches: Any, *, reference: Reference, floors: bool = True, timeout_s: float
) -> AbstractContextManager[CheckedStep]:
    """Check one step of a running job in this block against ``reference``. Every rank enters it."""
    made = partial(adapter.job_step, reference, microbatches, floors=floors, timeout_s=timeout_s)
    return checking(made, timeout_s=timeout_s, composed=reference if isinstance(reference, StepExpectation) else None)


@contextmanager
def checking(
    step: Callable[[], JobStep], *, timeout_s: float, composed: StepExpectation | None = None
) -> Iterator[CheckedStep]:
    """Check the result of ``step``. Its errors become the verdict's, and other ranks do not wait for this one.

    ``composed``: the user's expectation for a composed check, which may skip steps.
    """
    turn = 0 if composed is None else composed.turn()
    if turn is None:
        yield Unchecked()
        return
    why, made = None, JobStep(_NONE, None, composed or SingleDevice(nn.Identity, nn.functional.mse_loss))
    try:
        made = step()
    except WhiteBoxError as error:
        why = str(error)
    except Exception as error:  # all types: the arguments may be anything
        why = f"the check cannot be made of this: {type(error).__name__}: {error}"
    against = made.against if why is not None else made.against.for_framework(made.step.accumulation)
    given, rename = (made.step.stages, made.microbatches), AdapterNames(made.step.name)
    check: CheckedStep
    if isinstance(against, StepExpectation):
        check = against.check_of(*given, rename=rename, timeout_s=timeout_s, turn=turn)
    else:
        check = StepCheck(*given, against=against, rename=rename, timeout_s=timeout_s)
    if why is not None:  # others are informed of the reason
        check.refuse(why)
        with check:
            yield check
        return
    sight = JobSight(check, made.step, count=len(made.microbatches or ()), given=made.given)
    with check, ExitStack() as stack:
        watched = False
        with check.noting():
            stack.enter_context(made.step.watching(sight))
            if isinstance(made.against, StepExpectation):
                stack.enter_context(sight.watching(made.against.optimizers))
            stack.enter_context(_note_begun(made.step, check))
            watched = True
        yield check
        if watched:
            sight.end()


@contextmanager
def _note_begun(step: FrameworkStep, check: CheckedStep) -> Iterator[None]:
    """Show ``check`` each stage's initial gradients at its first call, while open."""
    hooks = dict[int, Any]()

    def first(stage: int, *_: Any) -> None:
        if (hook := hooks.pop(stage, None)) is not None:
            hook.remove()
            with check.noting():
                check.begin(step.sums(stage))

    for stage, module in step.stages.items():
        hooks[stage] = module.register_forward_pre_hook(partial(first, stage))
    try:
        yield
    finally:
        for hook in hooks.values():
            hook.remove()


def record_step(
    adapter: Adapter, microbatches: Any, path: str, *, timeout_s: float
) -> AbstractContextManager[StepRecording]:
    """Record one step of a running job in this block. Every rank enters it."""

    def made() -> tuple[FrameworkStep, Iterable[Any] | None]:
        found = adapter.gather(microbatches, timeout_s)
        return adapter.step(), None if found is None else adapter.cut(found)

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
    """The verdict on ``step``, which trains inside ``observe``, beside ``whole``."""
    return framework.judge(whitebox)(
        under_name_of(step, whole.run_by(step)),
        reference=under_name_of(whole.reference, whole.build),
        microbatches=list(whole.microbatches),
        ranks=framework.mesh(ranks),
        loss_fn=whole.loss_in_step,
        optimizer=optimizer,
        contract=whole.contract_in_step(),
    )

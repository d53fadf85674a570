"""One step of a running job that a framework runs, as its adapter sees it, held against one device or itself."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pipeproof.foreign.frameworks.drawn import NOT_GIVEN, Content
from pipeproof.foreign.frameworks.framework_step import TWO_STEPS, FrameworkStep
from pipeproof.foreign.task import WhiteBoxError
from pipeproof.observers.shards import held_whole
from pipeproof.records.checked_step import CheckedStep
from pipeproof.records.rank_part import AdapterNames, Rename, own_name
from pipeproof.records.record import RecordError
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_check import StepCheck
from pipeproof.records.step_expectation import StepExpectation
from pipeproof.records.step_record import Pairs
from pipeproof.records.unchecked import Unchecked

NORM_IN_PARTS = "it was told as a DTensor in parts, which are not put together: clip by its full_tensor()"
_TOO_MANY = "the block ran {} microbatches, and the check was given {}: put one step into it, or give it all of them"

_STEPPED = (
    "weights are others than the step began with, and gradients were not seen before: pass optimizer= to Composed"
)


class JobSight:
    """Shows ``check`` what is seen of a step; what goes wrong in it is the check's own, and ends no job."""

    def __init__(self, check: CheckedStep, made: "JobStep") -> None:
        self._check, self._step, self._given = check, made.step, made.given
        self._count = len(made.microbatches or ())
        self._steps = 0
        self._hooks: list[RemovableHandle] = []  # before the steps of optimizers

    @contextmanager
    def watching(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """While this is open, gradients are complete at the latest when the first of ``optimizers`` takes its step."""
        self._hooks += [one.register_step_pre_hook(lambda *_: self.complete()) for one in optimizers]
        try:
            yield
        finally:
            self._unhook()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def complete(self) -> None:
        """Compare what the optimizer is about to take, and the losses where this rank has them."""
        self._steps += 1
        self._unhook()  # the check refuses an optimizer that has any
        if self._steps > 1:
            self._check.refuse(TWO_STEPS)
            return
        with self._check.noting():
            gradients = self._step.gradients()
            told = (pair for pair in self._step.parameters() if pair[1] in gradients or not pair[1].requires_grad)
            self._check.gradients({name: gradients.get(one) for name, one in told})  # of what is frozen there is none
            losses = [float(one) for one in self._step.losses()]
            if 0 < 2 * self._count <= len(losses):  # no fault of a framework's runs every microbatch once more
                raise RecordError(_TOO_MANY.format(len(losses), self._count))
            if losses:
                order = self._step.drawn.order(self._given)  # the job may draw them in another
                self._check.report(losses=_as_given(losses, order))

    def norm(self, norm: Any) -> None:
        """Compare the norm that was told."""
        with self._check.noting():
            here = held_whole(norm) if isinstance(norm, Tensor) else norm
            if here is None:  # only all ranks together know it, and one that does not come would hold the job up
                self._check.miss_norm(NORM_IN_PARTS)
            elif self._steps <= 1:
                self._check.report(norm=float(here))

    def end(self) -> None:
        """The step is over: where it was never complete, what there is now is compared, or it is said why not.

        A step of other data than the check was given is no wrong step.
        """
        if self._step.drawn.is_other_than(self._given):
            self._check.refuse(NOT_GIVEN)
        try:
            if self._step.completes_at_its_end(self._steps):
                if self._check.moved(self._step.stages):
                    self._check.refuse(_STEPPED)
                self.complete()
        except WhiteBoxError as unfinished:
            self._check.refuse(str(unfinished))


def _as_given(losses: Sequence[float], order: Sequence[int]) -> Sequence[float]:
    """``losses`` in the order of what was given, which was drawn in this one; each may have been cut into as many."""
    if not order or len(losses) % len(order):
        return losses
    times = len(losses) // len(order)
    return [losses[order.index(k) * times + n] for k in range(len(order)) for n in range(times)]


@dataclass(frozen=True)
class JobStep:
    """A framework's step on a rank, the microbatches of this rank's replica, and what it is held against.

    given: what is in these, as the job draws them; nothing where a rank has none, or that is not seen.
    """

    step: FrameworkStep
    microbatches: Pairs | None
    against: SingleDevice | StepExpectation
    given: Sequence[Content] = ()


@contextmanager
def checking(
    step: Callable[[], JobStep], *, timeout_s: float, composed: StepExpectation | None = None
) -> Iterator[CheckedStep]:
    """The check of what ``step`` gives. What that raises is the verdict's, and no other rank waits for this one.

    ``composed``: what the user gave, where the step is held against itself; then not every step is checked.
    """
    turn = 0 if composed is None else composed.turn()
    if turn is None:
        yield Unchecked()
        return
    made, why = _made(step)
    check = _check_of(made, composed, timeout_s, turn)
    if made is None:
        check.refuse(why)
        with check:
            yield check
        return
    with check, ExitStack() as stack:
        sight, watched = JobSight(check, made), False
        with check.noting():
            stack.enter_context(made.step.watching(sight))
            if isinstance(made.against, StepExpectation):
                stack.enter_context(sight.watching(made.against.optimizers))
            stack.enter_context(_begun(made.step, check))
            watched = True
        yield check
        if watched:
            sight.end()


def _check_of(made: JobStep | None, composed: StepExpectation | None, timeout_s: float, turn: int) -> CheckedStep:
    """The check of a step; where none could be ``made``, one that tells others why."""
    against: SingleDevice | StepExpectation = composed or SingleDevice(nn.Identity, nn.functional.mse_loss)
    stages: Mapping[int, nn.Module] = {}
    microbatches: Pairs | None = None
    name: Rename = own_name
    if made is not None:
        against = made.against.for_framework(made.step.accumulation)
        stages, microbatches, name = made.step.stages, made.microbatches, AdapterNames(made.step.name)
    if isinstance(against, StepExpectation):
        return against.check_of(stages, microbatches, rename=name, timeout_s=timeout_s, turn=turn)
    return StepCheck(stages, microbatches, against=against, rename=name, timeout_s=timeout_s)


@contextmanager
def _begun(step: FrameworkStep, check: CheckedStep) -> Iterator[None]:
    """While this is open, show ``check`` what each stage's gradients are added to, when it is first called."""
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


def _made(step: Callable[[], JobStep]) -> tuple[JobStep | None, str]:
    try:
        return step(), ""
    except WhiteBoxError as error:
        return None, str(error)
    except Exception as error:  # no one type: what is given may be anything
        return None, f"the check cannot be made of this: {type(error).__name__}: {error}"


def pairs_of(microbatches: Sequence[Any] | None, pair: Callable[[int, Any], tuple[Any, Any]]) -> Pairs | None:
    """Microbatches as pairs of inputs and target; ``pair`` makes one of a microbatch and its number."""
    return None if microbatches is None else [pair(number, one) for number, one in enumerate(microbatches)]

"""One step of a running job that a framework runs, as its adapter sees it, held against one device or itself."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from pipeproof.records.checked_step import CheckedStep
from pipeproof.records.rank_part import AdapterNames, Rename, own_name
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_check import StepCheck
from pipeproof.records.step_expectation import StepExpectation
from pipeproof.records.step_record import Pairs
from pipeproof.records.unchecked import Unchecked
from pipeproof.whitebox.task import WhiteBoxError
from pipeproof.wings.adapters.drawn import Content
from pipeproof.wings.adapters.sight import JobSight
from pipeproof.wings.adapters.step import FrameworkStep


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
    sight = JobSight(check, made.step, count=len(made.microbatches or ()), given=made.given)
    with check, ExitStack() as stack:
        watched = False
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

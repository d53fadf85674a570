"""One step of a framework's running job, checked against one device or link by link."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from pipeproof.records.checked_step import CheckedStep, Unchecked
from pipeproof.records.rank_part import AdapterNames, Rename, own_name
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_check import StepCheck
from pipeproof.records.step_expectation import StepExpectation
from pipeproof.records.step_record import Pairs
from pipeproof.whitebox.task import WhiteBoxError
from pipeproof.wings.adapters.drawn import Content
from pipeproof.wings.adapters.sight import JobSight
from pipeproof.wings.adapters.step import FrameworkStep


@dataclass(frozen=True)
class JobStep:
    """A framework's step on a rank, the microbatches of this rank's replica, and the expectation.

    given: their content in the form drawn by the job; empty if absent or unobserved.
    """

    step: FrameworkStep
    microbatches: Pairs | None
    against: SingleDevice | StepExpectation
    given: Sequence[Content] = ()


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
    made, why = None, ""
    try:
        made = step()
    except WhiteBoxError as error:
        why = str(error)
    except Exception as error:  # all types: the arguments may be anything
        why = f"the check cannot be made of this: {type(error).__name__}: {error}"
    against: SingleDevice | StepExpectation = composed or SingleDevice(nn.Identity, nn.functional.mse_loss)
    stages: Mapping[int, nn.Module] = {}
    microbatches: Pairs | None = None
    name: Rename = own_name
    if made is not None:
        against = made.against.for_framework(made.step.accumulation)
        stages, microbatches, name = made.step.stages, made.microbatches, AdapterNames(made.step.name)
    check: CheckedStep
    if isinstance(against, StepExpectation):
        check = against.check_of(stages, microbatches, rename=name, timeout_s=timeout_s, turn=turn)
    else:
        check = StepCheck(stages, microbatches, against=against, rename=name, timeout_s=timeout_s)
    if made is None:  # others are informed of the reason
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

"""Transformers, as users reach it at ``pipeproof.transformers``: models in stages, steps of a running ``Trainer``."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from itertools import count
from typing import Any

from pipeproof.foreign.frameworks.framework import replaced
from pipeproof.foreign.frameworks.transformers import observed, validate
from pipeproof.foreign.frameworks.transformers_stage import Stage
from pipeproof.foreign.frameworks.transformers_trainer import check_trainer, step_of_trainer
from pipeproof.foreign.frameworks.transformers_whole import (
    CausalLoss,
    HfBatch,
    TransformersError,
    Whole,
    divisor,
    packed,
    pair_of,
)
from pipeproof.judging.verdict import Verdict
from pipeproof.records.frameworks.framework_job import JobStep, checking
from pipeproof.records.single_device import LossOfAll, SingleDevice
from pipeproof.records.step_check import CheckError, StepCheck
from pipeproof.records.step_record import Pairs
from pipeproof.reference.copied import copied

__all__ = ["Stage", "TransformersError", "check_step", "observed", "validate"]


class TrainerCheck:
    """The check of one step of a trainer, which begins and ends inside ``trainer.train``."""

    def __init__(self) -> None:
        self._check: StepCheck | None = None

    @property
    def began(self) -> bool:
        """Whether the trainer came to the step."""
        return self._check is not None

    @property
    def verdict(self) -> Verdict:
        """The verdict of all processes together, the same on each. Raises ``CheckError`` before the step is over."""
        if self._check is None:
            raise CheckError("the verdict is known once trainer.train has taken the step, in the with block")
        return self._check.verdict

    def of(self, check: StepCheck) -> None:
        """It is this one."""
        self._check = check


@contextmanager
def check_step(
    trainer: Any,
    *,
    step: int = 0,
    loss: str = "tokens",
    reference: Callable[[], Any] | None = None,
    floors: bool = True,
    timeout_s: float = 300.0,
) -> Iterator[TrainerCheck]:
    """A context manager around ``trainer.train()``: one step of it is checked. Every process enters it.

    After the block, or as soon as the step is over, there is a ``verdict``. The job keeps its weights, optimizer and
    random numbers. It goes on in any case: what is not covered makes the verdict unknown.

    trainer: a ``Trainer`` of a causal language model. step: which of those that are taken in the block, from 0. loss:
    as for ``validate``; what Trainer differentiates is held against that. reference: builds the whole model; None: it
    is a copy of the trainer's. floors and timeout_s are those of ``SingleDevice`` and ``check_step``.
    """
    found = TrainerCheck()
    with ExitStack() as opened:
        numbers = count()

        def begin(microbatches: Sequence[HfBatch]) -> None:
            made = partial(_step, trainer, microbatches, loss, reference, floors)
            found.of(opened.enter_context(checking(made, timeout_s=timeout_s)))
            if (optimizer := getattr(trainer, "optimizer", None)) is not None:
                after = _then(optimizer.step, lambda: opened.pop_all().close())
                opened.enter_context(replaced(optimizer, "step", after))

        def fetch(inner: Callable[..., Any], *given: Any, **named: Any) -> Any:
            fetched = inner(*given, **named)
            if next(numbers) == step:
                begin(fetched[0])
            return fetched

        place = getattr(trainer, "get_batch_samples", None)
        if place is not None:
            opened.enter_context(replaced(trainer, "get_batch_samples", wraps(place)(partial(fetch, place))))
        yield found
        if not found.began:
            with checking(partial(_never, trainer, step), timeout_s=timeout_s) as check:
                found.of(check)


def _then(inner: Callable[..., Any], end: Callable[[], None]) -> Callable[..., Any]:
    @wraps(inner)
    def step(*given: Any, **named: Any) -> Any:
        made = inner(*given, **named)
        end()
        return made

    return step


def _never(trainer: Any, step: int) -> JobStep:
    check_trainer(trainer)
    if not isinstance(step, int) or step < 0:
        raise TransformersError(f"step is {step!r}: expected a number from 0, counted from the first in the block")
    raise TransformersError(f"the block took no step {step}: call trainer.train in it, with max_steps above {step}")


def _step(
    trainer: Any, microbatches: Sequence[HfBatch], loss: str, reference: Callable[[], Any] | None, floors: bool
) -> JobStep:
    by, step = divisor(loss), step_of_trainer(trainer, len(microbatches), loss)
    how, model = packed(microbatches), trainer.model
    build = partial(Whole, partial(copied, model) if reference is None else reference, how.names)

    def of_all(every: Pairs) -> CausalLoss:
        return CausalLoss.of(model, [labels for _, labels in every], loss)

    whole = SingleDevice(build, LossOfAll(of_all), loss_divisor=by, floors=floors)
    return JobStep(step, [pair_of(how, one) for one in microbatches], whole)

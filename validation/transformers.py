"""Transformers: models in stages, steps of a running ``Trainer``."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from itertools import count
from typing import Any, NoReturn, TypeVar

from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.foreign.frameworks.framework import replaced
from pipeproof.foreign.frameworks.framework_step import FrameworkStep
from pipeproof.foreign.frameworks.transformers import observed, validate
from pipeproof.foreign.frameworks.transformers_stage import Stage
from pipeproof.foreign.frameworks.transformers_trainer import check_trainer, step_of_trainer
from pipeproof.foreign.frameworks.transformers_whole import (
    TRANSFORMERS,
    CausalLoss,
    HfBatch,
    TransformersError,
    WholeTransformers,
    divisor,
    packed,
    pair_of,
)
from pipeproof.foreign.loss_of_all import LossOfAll
from pipeproof.records.checked_step import CheckedStep, CheckError
from pipeproof.records.frameworks.framework_job import JobStep, checking
from pipeproof.records.frameworks.recording import StepRecording, recording
from pipeproof.records.record import Record
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_record import Pairs
from pipeproof.reference.copied import copied

__all__ = ["Stage", "TransformersError", "check_step", "imports", "observed", "record_step", "validate"]

imports = TRANSFORMERS.imports

Opened = TypeVar("Opened")


class TrainerCheck:
    """The check of one step of a trainer, which begins and ends inside ``trainer.train``."""

    def __init__(self) -> None:
        self._check: CheckedStep | None = None

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

    def of(self, check: CheckedStep) -> None:
        """It is this one."""
        self._check = check


class TrainerRecording:
    """The recording of one step of a trainer, which begins and ends inside ``trainer.train``."""

    def __init__(self) -> None:
        self._seen: StepRecording | None = None

    @property
    def began(self) -> bool:
        """Whether the trainer came to the step."""
        return self._seen is not None

    @property
    def record(self) -> Record | None:
        """On rank 0, once the step is over, what it gave; None where that could not be recorded."""
        return None if self._seen is None else self._seen.record

    @property
    def problem(self) -> str:
        """Why there is no record, on every rank; empty where there is one, or the step is not over."""
        return "" if self._seen is None else self._seen.problem

    def of(self, seen: StepRecording) -> None:
        """It is this one."""
        self._seen = seen


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

    def begin(made: Callable[[], JobStep]) -> AbstractContextManager[object]:
        check = checking(made, timeout_s=timeout_s)
        return _with_name(check, found.of)

    def of(microbatches: Sequence[HfBatch]) -> AbstractContextManager[object]:
        return begin(partial(_step, trainer, microbatches, loss, reference, floors))

    with _at_step(trainer, step, of):
        yield found
        if not found.began:
            with begin(partial(_never, trainer, step)):
                pass


@contextmanager
def record_step(
    trainer: Any, path: str, *, step: int = 0, loss: str = "tokens", timeout_s: float = 300.0
) -> Iterator[TrainerRecording]:
    """A context manager around ``trainer.train()``: what one step of it gave is written into the file at ``path``.

    trainer, step, loss: as for ``check_step``. All else is as for ``deepspeed.record_step``: the microbatches are those
    that the trainer fetches.
    """
    found = TrainerRecording()

    def begin(made: Callable[[], FrameworkStep], given: Sequence[HfBatch] | None) -> AbstractContextManager[object]:
        seen = recording(made, given, path, framework=TRANSFORMERS, timeout_s=timeout_s)
        return _with_name(seen, found.of)

    def of(microbatches: Sequence[HfBatch]) -> AbstractContextManager[object]:
        return begin(partial(_recorded, trainer, microbatches, loss), microbatches)

    with _at_step(trainer, step, of):
        yield found
        if not found.began:
            with begin(partial(_never, trainer, step), None):
                pass


@contextmanager
def _with_name(opened: AbstractContextManager[Opened], tell: Callable[[Opened], None]) -> Iterator[None]:
    """Open it, and tell what it gives."""
    with opened as one:
        tell(one)
        yield


@contextmanager
def _at_step(
    trainer: Any, step: int, begin: Callable[[Sequence[HfBatch]], AbstractContextManager[object]]
) -> Iterator[None]:
    """While this is open, what ``begin`` makes of the microbatches of step ``step`` is open around that step."""
    with ExitStack() as opened:
        numbers = count()

        def fetch(inner: Callable[..., Any], *given: Any, **named: Any) -> Any:
            fetched = inner(*given, **named)
            if next(numbers) == step:
                opened.enter_context(begin(fetched[0]))
                if (optimizer := getattr(trainer, "optimizer", None)) is not None:
                    after = _then(optimizer.step, lambda: opened.pop_all().close())
                    opened.enter_context(replaced(optimizer, "step", after))
            return fetched

        place = getattr(trainer, "get_batch_samples", None)
        if place is not None:
            opened.enter_context(replaced(trainer, "get_batch_samples", wraps(place)(partial(fetch, place))))
        yield


def _then(inner: Callable[..., Any], end: Callable[[], None]) -> Callable[..., Any]:
    @wraps(inner)
    def step(*given: Any, **named: Any) -> Any:
        made = inner(*given, **named)
        end()
        return made

    return step


def _never(trainer: Any, step: int) -> NoReturn:
    check_trainer(trainer)
    if not isinstance(step, int) or step < 0:
        raise TransformersError(f"step is {step!r}: expected a number from 0, counted from the first in the block")
    raise TransformersError(f"the block took no step {step}: call trainer.train in it, with max_steps above {step}")


def _recorded(trainer: Any, microbatches: Sequence[HfBatch], loss: str) -> FrameworkStep:
    divisor(loss)
    return step_of_trainer(trainer, len(microbatches), loss)


def _step(
    trainer: Any, microbatches: Sequence[HfBatch], loss: str, reference: Callable[[], Any] | None, floors: bool
) -> JobStep:
    by, step = divisor(loss), step_of_trainer(trainer, len(microbatches), loss)
    how, model = packed(microbatches), trainer.model
    build = partial(WholeTransformers, partial(copied, model) if reference is None else reference, how.names)

    def of_all(every: Pairs) -> CausalLoss:
        return CausalLoss.of(model, [labels for _, labels in every], loss)

    whole = SingleDevice(build, LossOfAll(of_all), contract=Contract(loss_divisor=by), floors=floors)
    return JobStep(step, [pair_of(how, one) for one in microbatches], whole)

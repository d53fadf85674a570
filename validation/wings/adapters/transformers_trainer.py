"""A step of transformers' ``Trainer``, on one process or in DDP: its loss, gradients and norm."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor

from pipeproof.core.observe.shards import InShards
from pipeproof.core.verdict import Verdict
from pipeproof.records.checked_step import CheckedStep, CheckError
from pipeproof.records.record import Record
from pipeproof.reference.copied import deep_copy
from pipeproof.wings.adapters import adapter
from pipeproof.wings.adapters.framework import AdapterError, around
from pipeproof.wings.adapters.recording import StepRecording
from pipeproof.wings.adapters.step import Content, FrameworkStep, Sight
from pipeproof.wings.adapters.transformers_whole import TRANSFORMERS, check_model, divisor, whole_of
from pipeproof.wings.adapters.whole import Whole

# By what the trainer calls them.
_COVERED: Mapping[str, Any] = {
    "label_smoother": None,
    "compute_loss_func": None,
    "neftune_noise_alpha": None,
    "is_deepspeed_enabled": False,
    "is_fsdp_enabled": False,
    "is_tp_enabled": False,
}
_COVERED_ARGUMENTS: Mapping[str, Any] = {"fp16": False, "bf16": False}


class TrainerStep:
    """A check or recording of one trainer step, which begins and ends inside ``trainer.train``."""

    def __init__(self) -> None:
        self.observed: CheckedStep | StepRecording | None = None  # None until the trainer comes to the step

    @property
    def verdict(self) -> Verdict:
        """The verdict of all processes together, the same on each. Raises ``CheckError`` before the step is over."""
        if not isinstance(self.observed, CheckedStep):
            raise CheckError("the verdict is known once trainer.train has taken the step, in the with block")
        return self.observed.verdict

    @property
    def record(self) -> Record | None:
        """The step's record on rank 0 after its end; None if it failed."""
        return self.observed.record if isinstance(self.observed, StepRecording) else None

    @property
    def problem(self) -> str:
        """Reason for a missing record, on every rank; empty if there is one, or the step is not over."""
        return self.observed.problem if isinstance(self.observed, StepRecording) else ""


def check_step(
    trainer: Any,
    *,
    step: int = 0,
    loss: str = "tokens",
    reference: Callable[[], Any] | None = None,
    floors: bool = True,
    timeout_s: float = 300.0,
) -> AbstractContextManager[TrainerStep]:
    """Check one step of ``trainer.train()`` in this block. Every process enters it.

    After the step there is a ``verdict``. The job keeps its weights, optimizer and random numbers, and always goes on:
    unsupported use makes the verdict unknown.

    trainer: a ``Trainer`` of a causal language model. step: its number in the block, from 0. loss: as for ``validate``,
    for comparison with Trainer's own. reference: builds the whole model; None: a copy of the trainer's. floors and
    timeout_s: see ``SingleDevice`` and ``check_step``.
    """
    build = partial(deep_copy, getattr(trainer, "model", None)) if reference is None else reference
    begin = partial(adapter.check_step, reference=build, floors=floors, timeout_s=timeout_s)
    return _at_step(trainer, step, loss, begin)


def record_step(
    trainer: Any, path: str, *, step: int = 0, loss: str = "tokens", timeout_s: float = 300.0
) -> AbstractContextManager[TrainerStep]:
    """Record one step of ``trainer.train()`` in this block, into the file at ``path``.

    trainer, step, loss: as for ``check_step``. Otherwise like ``deepspeed.record_step``, on microbatches fetched by the
    trainer.
    """
    return _at_step(trainer, step, loss, partial(adapter.record_step, path=path, timeout_s=timeout_s))


@contextmanager
def _at_step(
    trainer: Any, number: int, loss: str, begin: Callable[..., AbstractContextManager[Any]]
) -> Iterator[TrainerStep]:
    """Open the result of ``begin`` around the trainer's step with this number."""
    found = TrainerStep()
    with ExitStack() as opened:
        numbers = count()

        def fetch(inner: Callable[..., Any], *given: Any, **named: Any) -> Any:
            fetched = inner(*given, **named)
            if next(numbers) == number:
                microbatches = fetched[0]
                own = Trained(trainer, number, loss, len(microbatches))
                found.observed = opened.enter_context(begin(own, microbatches))
                if (optimizer := getattr(trainer, "optimizer", None)) is not None:
                    opened.enter_context(around(optimizer, "step", last))
            return fetched

        def last(step: Callable[..., Any], *given: Any, **named: Any) -> Any:
            made = step(*given, **named)
            opened.pop_all().close()
            return made

        if hasattr(trainer, "get_batch_samples"):
            opened.enter_context(around(trainer, "get_batch_samples", fetch))
        yield found
        if found.observed is None:
            with begin(Trained(trainer, number, loss), None) as found.observed:
                pass


@dataclass(frozen=True)
class Trained(adapter.Adapter):
    """A trainer and its step with this number; ``loss``: see ``validate``.

    microbatches: the step's number of them; None: the trainer did not reach it.
    """

    trainer: Any
    number: Any
    loss: str
    microbatches: int | None = None
    framework = TRANSFORMERS

    def step(self) -> FrameworkStep:
        check_trainer(self.trainer)
        if not isinstance(self.number, int) or self.number < 0:
            raise AdapterError(
                f"step is {self.number!r}: expected a number from 0, counted from the first in the block"
            )
        if self.microbatches is None:
            raise AdapterError(
                f"the block took no step {self.number}: call trainer.train in it, with max_steps above {self.number}"
            )
        divisor(self.loss)
        model, losses = self.trainer.model, list[Tensor]()
        # Losses are averaged over all processes.
        factor = self.microbatches if self.loss == "mean" else 1 / self.trainer.accelerator.num_processes
        return FrameworkStep(
            {0: model},
            lambda _, name: TRANSFORMERS.in_whole(name),
            lambda: {one: one.grad for one in model.parameters() if one.requires_grad},
            lambda: [float(one) * factor for one in losses],
            partial(_watching, self.trainer, losses),
            unfinished=AdapterError("the trainer's optimizer took no step after the microbatches were fetched"),
        )

    def whole(self, reference: Callable[..., Any], microbatches: Sequence[Any]) -> Whole:
        return whole_of(reference, microbatches, self.loss, model=self.trainer.model)

    def contents(self, microbatches: Sequence[Any] | None) -> Sequence[Content]:
        return ()  # the check uses the drawn data itself


@contextmanager
def _watching(trainer: Any, losses: list[Tensor], sight: Sight) -> Iterator[None]:
    """Note losses at backward, and notify ``sight`` of clipping and the optimizer's step, while open."""
    accelerator, moments = trainer.accelerator, list[str]()

    def tell(where: str) -> None:
        if not moments:
            sight.complete()
        moments.append(where)

    def backward(inner: Callable[..., Any], loss: Any, *given: Any, **named: Any) -> Any:
        losses.append(loss.detach().clone())
        return inner(loss, *given, **named)

    def clip(inner: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if not accelerator.sync_gradients:  # gradients of later microbatches are to come
            return inner(*given, **named)
        tell("clipping")
        norm = inner(*given, **named)
        if len(moments) == 1 and norm is not None:
            sight.norm(norm)
        return norm

    def step(inner: Callable[..., Any], *given: Any, **named: Any) -> Any:
        tell("step")
        return inner(*given, **named)

    with (
        around(accelerator, "backward", backward),
        around(accelerator, "clip_grad_norm_", clip),
        around(trainer.optimizer, "step", step),
    ):
        yield


def check_trainer(trainer: Any) -> None:
    """Raise for unsupported use."""
    TRANSFORMERS.expect("trainer", trainer, TRANSFORMERS.module().Trainer, "a Trainer of transformers'")
    names = vars(trainer)
    TRANSFORMERS.covers({name: names[name] for name in _COVERED if name in names}, _COVERED)
    TRANSFORMERS.covers({name: getattr(trainer.args, name) for name in _COVERED_ARGUMENTS}, _COVERED_ARGUMENTS)
    if trainer.args.n_gpu > 1:
        raise AdapterError(
            f"the trainer has {trainer.args.n_gpu} GPUs in one process: start one process for each, by torchrun"
        )
    check_model(trainer.model)
    if cut := next((name for name, one in trainer.model.named_parameters() if isinstance(one, InShards)), None):
        raise AdapterError(
            f"{cut} is in shards: check_step compares whole gradients, so check this trainer without FSDP, in DDP"
        )

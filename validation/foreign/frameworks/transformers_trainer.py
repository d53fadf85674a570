"""A step of transformers' ``Trainer``, on one process or in DDP: what it differentiates, its gradients and its norm."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn

from pipeproof.foreign.frameworks.framework import replaced
from pipeproof.foreign.frameworks.framework_step import FrameworkStep, Sight
from pipeproof.foreign.frameworks.transformers import name_in_whole
from pipeproof.foreign.frameworks.transformers_whole import TRANSFORMERS, TransformersError, check_model
from pipeproof.foreign.handed_back import Gradient
from pipeproof.observers.shards import InShards

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


def step_of_trainer(trainer: Any, microbatches: int, loss: str) -> FrameworkStep:
    """The trainer's step on this process, of so many microbatches; ``loss`` is that of ``validate``.

    Raises ``TransformersError`` for what is not covered.
    """
    check_trainer(trainer)
    model, losses = trainer.model, list[Tensor]()
    # What a process differentiates is averaged over all of them.
    factor = microbatches if loss == "mean" else 1 / trainer.accelerator.num_processes

    def gradients() -> dict[nn.Parameter, Gradient]:
        return {one: one.grad for one in model.parameters() if one.requires_grad}

    return FrameworkStep(
        {0: model},
        name_in_whole,
        gradients,
        lambda: [float(one) * factor for one in losses],
        partial(_watching, trainer, losses),
        unfinished=TransformersError("the trainer's optimizer took no step after the microbatches were fetched"),
    )


@contextmanager
def _watching(trainer: Any, losses: list[Tensor], sight: Sight) -> Iterator[None]:
    """While this is open, note what is differentiated, and tell ``sight`` when gradients are clipped or taken."""
    accelerator, told = trainer.accelerator, list[str]()

    def tell(where: str) -> None:
        if not told:
            sight.complete()
        told.append(where)

    def backward(inner: Callable[..., Any], loss: Any, *given: Any, **named: Any) -> Any:
        losses.append(loss.detach().clone())
        return inner(loss, *given, **named)

    def clip(inner: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if not accelerator.sync_gradients:  # gradients of later microbatches are to come
            return inner(*given, **named)
        tell("clipping")
        norm = inner(*given, **named)
        if len(told) == 1 and norm is not None:
            sight.norm(norm)
        return norm

    def step(inner: Callable[..., Any], *given: Any, **named: Any) -> Any:
        tell("step")
        return inner(*given, **named)

    with ExitStack() as stack:
        for place, name, by in (
            (accelerator, "backward", backward),
            (accelerator, "clip_grad_norm_", clip),
            (trainer.optimizer, "step", step),
        ):
            inner = getattr(place, name)
            stack.enter_context(replaced(place, name, wraps(inner)(partial(by, inner))))
        yield


def check_trainer(trainer: Any) -> None:
    """Raise ``TransformersError`` for what would be judged wrongly."""
    if not isinstance(trainer, TRANSFORMERS.module().Trainer):
        raise TransformersError(f"trainer is a {type(trainer).__name__}: expected a Trainer of transformers'")
    names = vars(trainer)
    TRANSFORMERS.covers({name: names[name] for name in _COVERED if name in names}, _COVERED)
    TRANSFORMERS.covers({name: getattr(trainer.args, name) for name in _COVERED_ARGUMENTS}, _COVERED_ARGUMENTS)
    if trainer.args.n_gpu > 1:
        raise TransformersError(
            f"the trainer has {trainer.args.n_gpu} GPUs in one process: start one process for each, by torchrun"
        )
    check_model(trainer.model)
    if cut := next((name for name, one in trainer.model.named_parameters() if isinstance(one, InShards)), None):
        raise TransformersError(
            f"{cut} is in shards: check_step compares whole gradients, so check this trainer without FSDP, in DDP"
        )

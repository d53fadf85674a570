"""What a rank sees of two stages' calls in one process, and what passes there, beside the reference."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.observed import Passed
from pipeproof.core.observe.watching import Watcher
from pipeproof.reference.data import Batch
from pipeproof.whitebox.crossings import find_passages
from pipeproof.whitebox.tensor_index import Both, TensorIndex
from tests.support.steps import loss_fn

MICROBATCHES, STAGES = 4, 2
Calls = dict[int, list[Call]]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))


def drawn(seed: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def batches(*, equal: bool = False) -> list[Batch]:
    """``equal``: of equal inputs and different targets."""
    return [Batch((drawn(0 if equal else m),), drawn(100 + m), 4) for m in range(MICROBATCHES)]


def places(given: Sequence[Batch]) -> Both:
    whole = model()
    survey = TensorIndex(whole)
    for microbatch, batch in enumerate(given):
        survey.watch(microbatch, batch, partial(_train, whole, batch))
    return survey.places


def calls(
    given: Sequence[Batch],
    order: Sequence[int],
    *,
    times: Callable[[int], float] = lambda m: 1.0,
    between: Callable[[int, Tensor], None] = lambda m, x: None,
) -> Calls:
    """Both stages' calls of a step that takes microbatches in this order.

    ``times``: its gradients' factor by microbatch; ``between``: what becomes of its input before the backward.
    """
    watcher, whole = Watcher(), model()
    for stage in whole:
        watcher.watch(stage)
    for m in order:
        x = given[m].inputs[0].clone()
        _train(whole, Batch((x,), given[m].target, 4), times(m), partial(between, m, x))
    return {stage: list(watcher.calls(module) or ()) for stage, module in enumerate(whole)}


def _train(whole: nn.Module, batch: Batch, times: float = 1.0, between: Callable[[], None] = lambda: None) -> None:
    loss = loss_fn(whole(*batch.inputs), batch.target) / MICROBATCHES
    between()
    (times * loss).backward()  # type: ignore[no-untyped-call]  # in torch


def flowing(observed: Calls, given: Sequence[Batch] | None = None) -> dict[int, Passed]:
    return find_passages([observed], MICROBATCHES, places(given or batches()))[0]

"""Faults at torchtitan's real places: a step of the tiny Llama with one of them."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.distributed import pipeline_parallel
from torchtitan.distributed import utils as dist_utils

from pipeproof import StepResult
from tests.frameworks.engines import tiny_titan
from tests.frameworks.engines.tiny_titan import Data
from tests.frameworks.engines.torchtitan_layout import TorchtitanLayout as Layout
from tests.frameworks.fault import Fault, method, patched, planted


def not_divided(stack: ExitStack) -> None:
    """The loss function is not told of the tokens."""
    patched(stack, tiny_titan, "forward_backward_step", lambda right, trainer, data, tokens: right(trainer, data, None))


def own_tokens(stack: ExitStack) -> None:
    """A replica's tokens are not summed with those of the others."""
    patched(stack, dist_utils, "dist_sum_tensor", lambda right, tokens, mesh: tokens)


def mean_of_means(stack: ExitStack) -> None:
    """Every microbatch is divided by its own tokens, and by the number of microbatches."""

    def loss(right: Any, own: CrossEntropyLoss, pred: Tensor, labels: Tensor, **named: Any) -> Any:
        tokens = 4 * (labels != IGNORE_INDEX).sum()
        return right(own, pred, labels, tokens)

    method(stack, CrossEntropyLoss, "__call__", loss)


def ignored_counted(stack: ExitStack) -> None:
    """Labels that the loss ignores count as tokens."""
    patched(
        stack,
        tiny_titan,
        "valid_tokens",
        lambda right, trainer, labels: torch.tensor(sum(one.numel() for one in labels)),
    )


def given(stack: ExitStack, wrong: Callable[[SimpleNamespace, Data], Data]) -> None:
    """Have a rank train on what ``wrong`` makes of its data; the tokens are counted before."""

    def forward_backward_step(right: Any, trainer: SimpleNamespace, data: Data, tokens: Tensor) -> None:
        right(trainer, wrong(trainer, data), tokens)

    patched(stack, tiny_titan, "forward_backward_step", forward_backward_step)


def other_positions(stack: ExitStack) -> None:
    """The last stage has the positions of the microbatch after."""

    def rotated(trainer: SimpleNamespace, data: Data) -> Data:
        if not trainer.pp_has_last_stage:
            return data
        moved = [*data[1:], data[0]]
        return [
            ({**one, "positions": other["positions"]}, labels)
            for (one, labels), (other, _) in zip(data, moved, strict=True)
        ]

    given(stack, rotated)


def positions_lost(stack: ExitStack) -> None:
    """Keyword arguments come to the first stage alone."""

    def first_alone(trainer: SimpleNamespace, data: Data) -> Data:
        return data if trainer.pp_has_first_stage else [({"input": one["input"]}, labels) for one, labels in data]

    given(stack, first_alone)


def other_labels(stack: ExitStack) -> None:
    """The last stage has the labels of the microbatch after."""
    given(
        stack,
        lambda trainer, data: [(one, data[(k + 1) % len(data)][1]) for k, (one, _) in enumerate(data)],
    )


def labels_not_shifted(stack: ExitStack) -> None:
    """Labels are the words themselves, not those that come next."""

    def same(trainer: SimpleNamespace, data: Data) -> Data:
        return [(one, torch.where(labels == IGNORE_INDEX, labels, one["input"])) for one, labels in data]

    given(stack, same)


def last_dropped(stack: ExitStack) -> None:
    """The batch has one microbatch less than was read."""

    def scheduled(right: Any, *, local_batch_size: int, **named: Any) -> Any:
        return right(local_batch_size=local_batch_size - tiny_titan.ROWS, **named)

    patched(stack, pipeline_parallel, "_build_pipeline_schedule", scheduled)
    given(stack, lambda trainer, data: data[:-1])


def scaled_by_schedule(stack: ExitStack) -> None:
    """The schedule divides by the number of microbatches, too."""

    def scheduled(right: Any, **named: Any) -> Any:
        schedule = right(**named)
        schedule.scale_grads = True
        return schedule

    patched(stack, pipeline_parallel, "_build_pipeline_schedule", scheduled)


def split(stack: ExitStack, wrong: Callable[[list[list[str]]], list[list[str]]]) -> None:
    """Have stages hold the modules that ``wrong`` makes of the right ones."""
    name = "_generate_llm_fqn_per_model_part"
    patched(stack, pipeline_parallel, name, lambda right, *sizes: wrong(right(*sizes)))


def layer_lost(stack: ExitStack) -> None:
    """The last stage begins one layer too late."""
    split(stack, lambda parts: [*parts[:-1], parts[-1][1:]])


def layer_twice(stack: ExitStack) -> None:
    """The last stage begins one layer too early: what the first ends with runs twice."""
    split(stack, lambda parts: [*parts[:-1], [parts[-2][-1], *parts[-1]]])


def norm_of_one_stage(stack: ExitStack) -> None:
    """The norm is not summed over stages."""
    patched(
        stack,
        dist_utils,
        "clip_grad_norm_",
        lambda right, *given, pp_mesh, **named: right(*given, pp_mesh=None, **named),
    )


def other_weights(stack: ExitStack) -> None:
    """The last stage draws its own output layer."""

    def train_step(right: Any, layout: Layout, trainer: SimpleNamespace, data: Data) -> None:
        if trainer.pp_has_last_stage:
            torch.manual_seed(1)
            with torch.no_grad():
                drawn: Any = trainer.model_parts[-1].lm_head.weight
                getattr(drawn, "_local_tensor", drawn).normal_(std=0.25)
        right(layout, trainer, data)

    patched(stack, tiny_titan, "train_step", train_step)


def sharded(stack: ExitStack, wrong: Callable[[FSDPModule], None]) -> None:
    """Do ``wrong`` to every part that FSDP has."""

    def made(right: Any, *given: Any) -> SimpleNamespace:
        trainer: SimpleNamespace = right(*given)
        for part in trainer.model_parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    wrong(module)
        return trainer

    patched(stack, tiny_titan, "made", made)


def mean_over_replicas(stack: ExitStack) -> None:
    """Gradients are divided by the number of replicas, though the tokens of all are divided by already."""
    sharded(stack, lambda module: module.set_gradient_divide_factor(2.0))


def scattered(stack: ExitStack, wrong: Callable[[Tensor, int], Tensor]) -> None:
    """Have ranks reduce what ``wrong`` makes of all shards and of a rank, or keep it where it is one shard."""

    def scatter(right: Any, *, output: Tensor, input: Tensor, group: Any, **named: Any) -> Any:
        made = wrong(input.view(group.size(), -1), group.rank())
        if made.numel() == input.numel():
            return right(output=output, input=made.flatten(), group=group, **named)
        output.copy_(made)
        return None

    patched(stack, torch.distributed, "reduce_scatter_single", scatter)


def shards_off_by_one(stack: ExitStack) -> None:
    """Every rank is given the sum of the next rank's shard."""
    scattered(stack, lambda rows, rank: rows.roll(-1, 0))


def shard_not_reduced(stack: ExitStack) -> None:
    """Ranks keep their own part of the sum in their shards."""
    scattered(stack, lambda rows, rank: rows[rank])


LAST = "rank 1, stage 1"
EVERY = "microbatches 0, 1, 2, 3"
ATTENTION = "attention.qkv_linear.wqkv.weight"  # of a layer, its first parameter
FAULTS = {
    "not-divided": Fault(not_divided, Layout(), "scale"),
    "own-tokens": Fault(own_tokens, Layout(dp=2), "scale", (EVERY,)),
    "mean-of-means": Fault(mean_of_means, Layout(), "unequal-weights"),
    "ignored-counted": Fault(ignored_counted, Layout(), "scale"),
    "other-positions": Fault(other_positions, Layout(), "swapped-data", (f"{LAST}, {EVERY}, action 1F0",)),
    "other-labels": Fault(other_labels, Layout(), "swapped-data", (EVERY,)),
    "labels-not-shifted": Fault(labels_not_shifted, Layout(), "computation", (f"{LAST}, {EVERY}, action 1B0",)),
    "last-dropped": Fault(last_dropped, Layout(), "dropped", ("microbatch 3",)),
    "scaled-by-schedule": Fault(scaled_by_schedule, Layout(), "scale"),
    "layer-lost": Fault(layer_lost, Layout(), "partition", (f"parameter model.layers.2.{ATTENTION}",)),
    "layer-twice": Fault(layer_twice, Layout(), "partition", (f"stage 1, parameter model.layers.1.{ATTENTION}",)),
    "norm-of-one-stage": Fault(norm_of_one_stage, Layout(clipped=True), "norm", ("everywhere",)),
    "other-weights": Fault(
        other_weights,
        Layout(schedule="Interleaved1F1B", vp=2),
        "randomness",
        ("rank 1, stage 3, parameter model.lm_head.weight",),
    ),
    "mean-over-replicas": Fault(mean_over_replicas, Layout(dp=2), "scale"),
}
PLANTS = {name: one.plant for name, one in FAULTS.items()} | {
    "positions-lost": positions_lost,
    "shards-off-by-one": shards_off_by_one,
    "shards-not-reduced": shard_not_reduced,
}


def step(fault: str, layout: Layout, model: nn.Module, microbatches: Sequence[Any]) -> StepResult:
    """The step of ``tiny_titan``, wrong."""
    return planted(PLANTS[fault], tiny_titan.step, layout, model, microbatches)

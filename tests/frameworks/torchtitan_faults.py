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
from tests.frameworks.fault import Fault, Plant, in_place_of, patched, planted


@in_place_of(tiny_titan, "forward_backward_step")
def not_divided(right: Any, trainer: SimpleNamespace, data: Data, tokens: Tensor) -> None:
    """The loss function is not told of the tokens."""
    right(trainer, data, None)


@in_place_of(dist_utils, "dist_sum_tensor")
def own_tokens(right: Any, tokens: Tensor, mesh: Any) -> Tensor:
    """A replica's tokens are not summed with those of the others."""
    return tokens


@in_place_of(CrossEntropyLoss, "__call__")
def mean_of_means(right: Any, own: CrossEntropyLoss, pred: Tensor, labels: Tensor, **named: Any) -> Any:
    """Every microbatch is divided by its own tokens, and by the number of microbatches."""
    tokens = 4 * (labels != IGNORE_INDEX).sum()
    return right(own, pred, labels, tokens)


@in_place_of(tiny_titan, "valid_tokens")
def ignored_counted(right: Any, trainer: SimpleNamespace, labels: list[Tensor]) -> Tensor:
    """Labels that the loss ignores count as tokens."""
    return torch.tensor(sum(one.numel() for one in labels))


def given(wrong: Callable[[SimpleNamespace, Data], Data]) -> Plant:
    """Have a rank train on what ``wrong`` makes of its data; the tokens are counted before."""
    trained = in_place_of(tiny_titan, "forward_backward_step")
    return trained(lambda right, trainer, data, tokens: right(trainer, wrong(trainer, data), tokens))


@given
def other_positions(trainer: SimpleNamespace, data: Data) -> Data:
    """The last stage has the positions of the microbatch after."""
    if not trainer.pp_has_last_stage:
        return data
    moved = [*data[1:], data[0]]
    return [
        ({**one, "positions": other["positions"]}, labels)
        for (one, labels), (other, _) in zip(data, moved, strict=True)
    ]


@given
def positions_lost(trainer: SimpleNamespace, data: Data) -> Data:
    """Keyword arguments come to the first stage alone."""
    return data if trainer.pp_has_first_stage else [({"input": one["input"]}, labels) for one, labels in data]


@given
def other_labels(trainer: SimpleNamespace, data: Data) -> Data:
    """The last stage has the labels of the microbatch after."""
    return [(one, data[(k + 1) % len(data)][1]) for k, (one, _) in enumerate(data)]


@given
def labels_not_shifted(trainer: SimpleNamespace, data: Data) -> Data:
    """Labels are the words themselves, not those that come next."""
    return [(one, torch.where(labels == IGNORE_INDEX, labels, one["input"])) for one, labels in data]


def last_dropped(stack: ExitStack) -> None:
    """The batch has one microbatch less than was read."""

    def scheduled(right: Any, *, local_batch_size: int, **named: Any) -> Any:
        return right(local_batch_size=local_batch_size - tiny_titan.ROWS, **named)

    patched(stack, pipeline_parallel, "_build_pipeline_schedule", scheduled)
    given(lambda trainer, data: data[:-1])(stack)


@in_place_of(pipeline_parallel, "_build_pipeline_schedule")
def scaled_by_schedule(right: Any, **named: Any) -> Any:
    """The schedule divides by the number of microbatches, too."""
    schedule = right(**named)
    schedule.scale_grads = True
    return schedule


@in_place_of(pipeline_parallel, "_generate_llm_fqn_per_model_part")
def layer_lost(right: Any, *sizes: Any) -> list[list[str]]:
    """The last stage begins one layer too late."""
    *others, last = right(*sizes)
    return [*others, last[1:]]


@in_place_of(pipeline_parallel, "_generate_llm_fqn_per_model_part")
def layer_twice(right: Any, *sizes: Any) -> list[list[str]]:
    """The last stage begins one layer too early: what the first ends with runs twice."""
    *others, last = right(*sizes)
    return [*others, [others[-1][-1], *last]]


@in_place_of(dist_utils, "clip_grad_norm_")
def norm_of_one_stage(right: Any, *given: Any, pp_mesh: Any, **named: Any) -> Any:
    """The norm is not summed over stages."""
    return right(*given, pp_mesh=None, **named)


@in_place_of(tiny_titan, "train_step")
def other_weights(right: Any, layout: Layout, trainer: SimpleNamespace, data: Data) -> None:
    """The last stage draws its own output layer."""
    if trainer.pp_has_last_stage:
        torch.manual_seed(1)
        with torch.no_grad():
            drawn: Any = trainer.model_parts[-1].lm_head.weight
            getattr(drawn, "_local_tensor", drawn).normal_(std=0.25)
    right(layout, trainer, data)


@in_place_of(tiny_titan, "made")
def mean_over_replicas(right: Any, *given: Any) -> SimpleNamespace:
    """Gradients are divided by the number of replicas, though the tokens of all are divided by already."""
    trainer: SimpleNamespace = right(*given)
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(2.0)
    return trainer


def scattered(wrong: Callable[[Tensor, int], Tensor]) -> Plant:
    """Have ranks reduce what ``wrong`` makes of all shards and of a rank, or keep it where it is one shard."""

    @in_place_of(torch.distributed, "reduce_scatter_single")
    def scatter(right: Any, *, output: Tensor, input: Tensor, group: Any, **named: Any) -> Any:
        made = wrong(input.view(group.size(), -1), group.rank())
        if made.numel() == input.numel():
            return right(output=output, input=made.flatten(), group=group, **named)
        output.copy_(made)
        return None

    return scatter


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
    "shards-off-by-one": scattered(lambda rows, rank: rows.roll(-1, 0)),  # the sum of the next rank's shard
    "shards-not-reduced": scattered(lambda rows, rank: rows[rank]),  # a rank's own part of the sum
}


def step(fault: str, layout: Layout, model: nn.Module, microbatches: Sequence[Any]) -> StepResult:
    """The step of ``tiny_titan``, wrong."""
    return planted(PLANTS[fault], tiny_titan.step, layout, model, microbatches)

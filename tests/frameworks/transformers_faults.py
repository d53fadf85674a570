"""Faults at the places where people cut models of transformers' into stages: a step of a tiny one with one of them."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof import StepResult
from pipeproof.wings.adapters import transformers_stage
from tests.frameworks import tiny_hf
from tests.frameworks.fault import Fault, Plant, in_place_of, left_out, planted
from tests.frameworks.tiny_hf import IGNORED, Data, Layout


def first_alone(name: str) -> Plant:
    """Have inputs of this name come to the first stage alone."""

    @in_place_of(tiny_hf, "inputs_of")
    def plant(right: Any, job: SimpleNamespace, one: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = right(job, one)
        return {own: given for own, given in found.items() if 0 in job.numbers or own != name}

    return plant


def given(wrong: Callable[[SimpleNamespace, Data], Data]) -> Plant:
    """Have a rank train on what ``wrong`` makes of its data; the tokens are counted before."""
    return in_place_of(tiny_hf, "forward_backward")(lambda right, job, data: right(job, wrong(job, data)))


@given
def other_inputs(job: SimpleNamespace, data: Data) -> Data:
    """The last stage has the mask and the position ids of the microbatch after."""
    if 0 in job.numbers:
        return data
    moved = [*data[1:], data[0]]
    names = ("attention_mask", "position_ids")
    return [{**one, **{name: other[name] for name in names}} for one, other in zip(data, moved, strict=True)]


@given
def other_labels(job: SimpleNamespace, data: Data) -> Data:
    """The last stage has the labels of the microbatch after."""
    return [{**one, "labels": data[(k + 1) % len(data)]["labels"]} for k, one in enumerate(data)]


@given
def shifted_twice(job: SimpleNamespace, data: Data) -> Data:
    """Labels are shifted before the model's loss shifts them."""
    return [{**one, "labels": nn.functional.pad(one["labels"][:, 1:], (0, 1), value=IGNORED)} for one in data]


@in_place_of(tiny_hf, "loss_fn")
def not_shifted(right: Any, layout: Layout, model: Any, tokens: int, logits: Tensor, labels: Tensor) -> Tensor:
    """The loss is a cross entropy of the user's, which shifts nothing."""
    words = logits.flatten(0, 1)
    return nn.functional.cross_entropy(words, labels.flatten(), ignore_index=IGNORED, reduction="sum") / tokens


@in_place_of(tiny_hf, "loss_fn")
def mean_of_means(right: Any, layout: Layout, model: Any, tokens: int, logits: Tensor, labels: Tensor) -> Tensor:
    """Every microbatch is divided by its own tokens, and by the number of microbatches."""
    loss: Tensor = right(layout, model, int((labels[:, 1:] != IGNORED).sum()), logits, labels)
    return loss / 4


def counted(count: Callable[[Tensor], Tensor]) -> Plant:
    """Have the tokens of labels be so many."""
    tokens = in_place_of(tiny_hf, "valid_tokens")
    return tokens(lambda right, job, data: sum(int(count(one["labels"])) for one in data))


@counted
def ignored_counted(labels: Tensor) -> Tensor:
    """Labels that the loss ignores count as tokens."""
    return torch.tensor(labels[:, 1:].numel())


@counted
def first_counted(labels: Tensor) -> Tensor:
    """The first label of a row counts as a token, though the loss shifts it away."""
    return (labels != IGNORED).sum()


@counted
def own_tokens(labels: Tensor) -> Tensor:
    """A replica's tokens are not summed with those of the others."""
    return (labels[:, 1:] != IGNORED).sum()


@in_place_of(tiny_hf, "made")
def divided_twice(right: Any, *arguments: Any) -> SimpleNamespace:
    """torch's schedule divides by the number of microbatches, though the loss is divided by all tokens."""
    job: SimpleNamespace = right(*arguments)
    job.schedule.scale_grads = True
    return job


def cut_as(wrong: Callable[[int, int], tuple[int, int]]) -> Plant:
    """Have stages hold other layers, by the number of the first and of the last one."""

    @in_place_of(tiny_hf, "cut")
    def cut(right: Any, layout: Layout, model: Any, number: int) -> nn.Module:
        each = layout.layers // layout.stages
        layers = wrong(number * each, (number + 1) * each)
        return tiny_hf.transformers.Stage(model, number, layout.stages, layers=layers)

    return cut


@cut_as
def layer_lost(first: int, last: int) -> tuple[int, int]:
    """The last stage begins one layer too late."""
    return first + (first > 0), last


@cut_as
def layer_twice(first: int, last: int) -> tuple[int, int]:
    """The last stage begins one layer too early: what the first ends with runs twice."""
    return first - (first > 0), last


@in_place_of(transformers_stage._LeftOut, "forward")
def scaled_again(right: Any, own: nn.Module, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    """A later stage's model scales what it is given as it scales an embedding."""
    return hidden


@in_place_of(tiny_hf, "cut")
def other_kinds(right_cut: Any, layout: Layout, model: Any, number: int) -> nn.Module:
    """A later stage's layers are numbered from 0, so that each has the mask of another kind of layer."""
    stage = right_cut(layout, model, number)
    if number > 0:
        body = stage._body[0]
        kinds = body.config.layer_types
        body.config = type(body.config).from_dict(body.config.to_dict())
        body.config._attn_implementation = layout.attention
        body.config.layer_types = kinds[-1:] + kinds[:-1]
    return stage


@in_place_of(tiny_hf, "cut")
def cache_kept(right: Any, layout: Layout, model: Any, number: int) -> nn.Module:
    """The last stage keeps one cache for all microbatches."""
    from transformers import DynamicCache

    stage: Any = right(layout, model, number)
    if number == layout.stages - 1:
        body, cache = stage._body[0], DynamicCache(config=model.config)
        inner = body.forward

        def forward(**named: Any) -> Any:
            made = inner(**{**named, "use_cache": True, "past_key_values": cache})
            for one in (one for one in cache.layers if one.keys is not None):
                one.keys, one.values = one.keys.detach(), one.values.detach()
            return made

        body.forward = forward
    return stage


@in_place_of(tiny_hf, "clip")
def norm_of_one_stage(right: Any, job: SimpleNamespace) -> None:
    """Every stage clips by its own norm."""
    nn.utils.clip_grad_norm_([one for stage in job.stages for one in stage.parameters()], 1.0)


@in_place_of(tiny_hf, "train_step")
def other_weights(right: Any, job: SimpleNamespace, data: Data) -> None:
    """The last stage draws its own head."""
    if job.layout.stages - 1 in job.numbers:
        with torch.no_grad():
            torch.manual_seed(1)
            job.model.lm_head.weight.normal_(std=0.02)
    right(job, data)


LAST = "rank 1, stage 1"
EVERY = "microbatches 0, 1, 2, 3"
FAULTS = {
    "other-inputs": Fault(other_inputs, Layout(), "swapped-data", (f"{LAST}, {EVERY}, action 1F0",)),
    "other-labels": Fault(other_labels, Layout(), "swapped-data", (EVERY,)),
    "shifted-twice": Fault(shifted_twice, Layout(rows="plain"), "computation", (f"{LAST}, {EVERY}, action 1B0",)),
    "not-shifted": Fault(not_shifted, Layout(), "computation", (f"{LAST}, {EVERY}, action 1B0",)),
    "mean-of-means": Fault(mean_of_means, Layout(), "unequal-weights"),
    "ignored-counted": Fault(ignored_counted, Layout(), "scale"),
    "first-counted": Fault(first_counted, Layout(rows="plain"), "scale"),
    "divided-twice": Fault(divided_twice, Layout(), "scale"),
    "tied-not-summed": Fault(
        left_out(tiny_hf, "reduce"), Layout(tied=True), "tied-not-summed", ("parameter model.embed_tokens.weight",)
    ),
    "layer-lost": Fault(layer_lost, Layout(), "partition", ("parameter model.layers.2.input_layernorm.weight",)),
    "layer-twice": Fault(
        layer_twice, Layout(), "partition", ("stage 1, parameter model.layers.1.input_layernorm.weight",)
    ),
    "other-kinds": Fault(
        other_kinds,
        Layout(model="gemma2", attention="eager"),
        "computation",
        (f"{LAST}, {EVERY}, action 1F0",),
    ),
    "norm-of-one-stage": Fault(norm_of_one_stage, Layout(clipped=True), "norm", ("everywhere",)),
    "other-weights": Fault(other_weights, Layout(), "randomness", (f"{LAST}, parameter lm_head.weight",)),
}
# Caught at the last stage, whose output is like nothing that the reference has: without a name.
UNNAMED = {
    "mask-lost": (first_alone("attention_mask"), Layout(rows="masked")),
    "positions-lost": (first_alone("position_ids"), Layout(rows="packed")),
    "scaled-again": (scaled_again, Layout(model="granite")),
    "cache-kept": (cache_kept, Layout(rows="plain")),
}
PLANTS = {name: one.plant for name, one in FAULTS.items()} | {name: plant for name, (plant, _) in UNNAMED.items()}
PLANTS["own-tokens"] = own_tokens


def step(fault: str, layout: Layout, model: nn.Module, microbatches: Sequence[Any]) -> StepResult:
    """The step of ``tiny_hf``, wrong."""
    return planted(PLANTS[fault], tiny_hf.step, layout, model, microbatches)

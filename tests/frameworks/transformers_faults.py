"""Faults at the places where people cut models of transformers' into stages: a step of a tiny one with one of them."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from pipeproof import StepResult
from pipeproof.wings.adapters import transformers_stage
from tests.frameworks import tiny_hf
from tests.frameworks.fault import Fault, patched, planted
from tests.frameworks.tiny_hf import IGNORED, Data, Layout


def kept_from_later_stages(stack: ExitStack, *names: str) -> None:
    """Have these come to the first stage alone."""

    def inputs_of(right: Any, job: SimpleNamespace, one: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = right(job, one)
        return {name: given for name, given in found.items() if 0 in job.numbers or name not in names}

    patched(stack, tiny_hf, "inputs_of", inputs_of)


def mask_lost(stack: ExitStack) -> None:
    """The attention mask comes to the first stage alone."""
    kept_from_later_stages(stack, "attention_mask")


def positions_lost(stack: ExitStack) -> None:
    """Position ids come to the first stage alone."""
    kept_from_later_stages(stack, "position_ids")


def given(stack: ExitStack, wrong: Callable[[SimpleNamespace, Data], Data]) -> None:
    """Have a rank train on what ``wrong`` makes of its data; the tokens are counted before."""
    patched(stack, tiny_hf, "forward_backward", lambda right, job, data: right(job, wrong(job, data)))


def other_inputs(stack: ExitStack) -> None:
    """The last stage has the mask and the position ids of the microbatch after."""

    def rotated(job: SimpleNamespace, data: Data) -> Data:
        if 0 in job.numbers:
            return data
        moved = [*data[1:], data[0]]
        names = ("attention_mask", "position_ids")
        return [{**one, **{name: other[name] for name in names}} for one, other in zip(data, moved, strict=True)]

    given(stack, rotated)


def other_labels(stack: ExitStack) -> None:
    """The last stage has the labels of the microbatch after."""
    given(
        stack, lambda job, data: [{**one, "labels": data[(k + 1) % len(data)]["labels"]} for k, one in enumerate(data)]
    )


def shifted_twice(stack: ExitStack) -> None:
    """Labels are shifted before the model's loss shifts them."""

    def shifted(job: SimpleNamespace, data: Data) -> Data:
        return [{**one, "labels": nn.functional.pad(one["labels"][:, 1:], (0, 1), value=IGNORED)} for one in data]

    given(stack, shifted)


def not_shifted(stack: ExitStack) -> None:
    """The loss is a cross entropy of the user's, which shifts nothing."""

    def loss_fn(right: Any, layout: Layout, model: Any, tokens: int, logits: Tensor, labels: Tensor) -> Tensor:
        words = logits.flatten(0, 1)
        return nn.functional.cross_entropy(words, labels.flatten(), ignore_index=IGNORED, reduction="sum") / tokens

    patched(stack, tiny_hf, "loss_fn", loss_fn)


def mean_of_means(stack: ExitStack) -> None:
    """Every microbatch is divided by its own tokens, and by the number of microbatches."""

    def loss_fn(right: Any, layout: Layout, model: Any, tokens: int, logits: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = right(layout, model, int((labels[:, 1:] != IGNORED).sum()), logits, labels)
        return loss / 4

    patched(stack, tiny_hf, "loss_fn", loss_fn)


def counted(stack: ExitStack, count: Callable[[Tensor], Tensor]) -> None:
    """Have the tokens of labels be so many."""
    patched(stack, tiny_hf, "valid_tokens", lambda right, job, data: sum(int(count(one["labels"])) for one in data))


def ignored_counted(stack: ExitStack) -> None:
    """Labels that the loss ignores count as tokens."""
    counted(stack, lambda labels: torch.tensor(labels[:, 1:].numel()))


def first_counted(stack: ExitStack) -> None:
    """The first label of a row counts as a token, though the loss shifts it away."""
    counted(stack, lambda labels: (labels != IGNORED).sum())


def own_tokens(stack: ExitStack) -> None:
    """A replica's tokens are not summed with those of the others."""
    counted(stack, lambda labels: (labels[:, 1:] != IGNORED).sum())


def divided_twice(stack: ExitStack) -> None:
    """torch's schedule divides by the number of microbatches, though the loss is divided by all tokens."""
    made = tiny_hf.made

    def scaled(right: Any, *arguments: Any) -> SimpleNamespace:
        job: SimpleNamespace = made(*arguments)
        job.schedule.scale_grads = True
        return job

    patched(stack, tiny_hf, "made", scaled)


def tied_not_summed(stack: ExitStack) -> None:
    """The copies of the embedding keep what each stage gave."""
    patched(stack, tiny_hf, "reduce", lambda right, job: None)


def cut_as(stack: ExitStack, wrong: Callable[[int, int], tuple[int, int]]) -> None:
    """Have stages hold other layers, by the number of the first and of the last one."""

    def cut(right: Any, layout: Layout, model: Any, number: int) -> nn.Module:
        each = layout.layers // layout.stages
        layers = wrong(number * each, (number + 1) * each)
        return tiny_hf.transformers.Stage(model, number, layout.stages, layers=layers)

    patched(stack, tiny_hf, "cut", cut)


def layer_lost(stack: ExitStack) -> None:
    """The last stage begins one layer too late."""
    cut_as(stack, lambda first, last: (first + (first > 0), last))


def layer_twice(stack: ExitStack) -> None:
    """The last stage begins one layer too early: what the first ends with runs twice."""
    cut_as(stack, lambda first, last: (first - (first > 0), last))


def scaled_again(stack: ExitStack) -> None:
    """A later stage's model scales what it is given as it scales an embedding."""
    stack.enter_context(
        mock.patch.object(transformers_stage._LeftOut, "forward", lambda own, hidden, *more, **named: hidden)
    )


def other_kinds(stack: ExitStack) -> None:
    """A later stage's layers are numbered from 0, so that each has the mask of another kind of layer."""

    def cut(right_cut: Any, layout: Layout, model: Any, number: int) -> nn.Module:
        stage = right_cut(layout, model, number)
        if number > 0:
            body = stage._body[0]
            kinds = body.config.layer_types
            body.config = type(body.config).from_dict(body.config.to_dict())
            body.config._attn_implementation = layout.attention
            body.config.layer_types = kinds[-1:] + kinds[:-1]
        return stage

    patched(stack, tiny_hf, "cut", cut)


def cache_kept(stack: ExitStack) -> None:
    """The last stage keeps one cache for all microbatches."""
    from transformers import DynamicCache

    def cut(right: Any, layout: Layout, model: Any, number: int) -> nn.Module:
        stage = right(layout, model, number)
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

    patched(stack, tiny_hf, "cut", cut)


def norm_of_one_stage(stack: ExitStack) -> None:
    """Every stage clips by its own norm."""

    def clip(right: Any, job: SimpleNamespace) -> None:
        nn.utils.clip_grad_norm_([one for stage in job.stages for one in stage.parameters()], 1.0)

    patched(stack, tiny_hf, "clip", clip)


def other_weights(stack: ExitStack) -> None:
    """The last stage draws its own head."""

    def train_step(right: Any, job: SimpleNamespace, data: Data) -> None:
        if job.layout.stages - 1 in job.numbers:
            with torch.no_grad():
                torch.manual_seed(1)
                job.model.lm_head.weight.normal_(std=0.02)
        right(job, data)

    patched(stack, tiny_hf, "train_step", train_step)


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
        tied_not_summed, Layout(tied=True), "tied-not-summed", ("parameter model.embed_tokens.weight",)
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
    "mask-lost": (mask_lost, Layout(rows="masked")),
    "positions-lost": (positions_lost, Layout(rows="packed")),
    "scaled-again": (scaled_again, Layout(model="granite")),
    "cache-kept": (cache_kept, Layout(rows="plain")),
}
PLANTS = {name: one.plant for name, one in FAULTS.items()} | {name: plant for name, (plant, _) in UNNAMED.items()}
PLANTS["own-tokens"] = own_tokens


def step(fault: str, layout: Layout, model: nn.Module, microbatches: Sequence[Any]) -> StepResult:
    """The step of ``tiny_hf``, wrong."""
    return planted(PLANTS[fault], tiny_hf.step, layout, model, microbatches)

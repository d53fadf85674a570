"""Runs that are right, in unusual ways: whatever a verdict says against them is an alarm."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import truth_layers as layers
import truth_steps as steps
from torch import Tensor, nn
from truth_check import Run
from truth_faults import STEPS
from truth_models import COUNT, RANKS, ROWS, WIDTH, Block, Build, Pairs, build_model, data_of, loss_fn, of, seeded, some
from truth_steps import Step, plain, recomputed

from pipeproof.core.contract import Contract

LIFO = ", last in first out"
BF16 = {"build": layers.of_dtype(torch.bfloat16), "data": data_of(dtype=torch.bfloat16)}
REPLICAS = [0, 1, 0, 1]


def right(
    name: str, step: Step | None = None, build: Build | None = None, *, data: Pairs | None = None, **more: Any
) -> Run:
    """A run without a fault: of the plain runtime and model, but for what is said."""
    given = {"microbatches": data_of() if data is None else data, "ranks": RANKS, "loss_fn": loss_fn, **more}
    return Run(f"right: {name}", step or plain(), given={"reference": seeded(build or of()), **given})


def rights() -> Iterator[Run]:
    """Every variant."""
    for runtime, options in (
        ("iterators", {}),
        ("instructions", {}),
        ("instructions", {"recompute": True}),
        ("two-way", {}),
        ("classes", {}),
        ("classes", {"afab": False}),
        ("chunks", {}),
    ):
        yield right(f"{runtime} {options or ''}".strip(), partial(STEPS[runtime], **options), build_model)
    for name, step in _ways().items():
        yield right(name, step)
    yield from _sizes()
    yield from _models()
    yield from _around()


def _ways() -> Mapping[str, Step]:
    """Orders, ways to call a stage, and what else a step does."""
    return {
        **{f"backwards {order}": plain(order=order) for order in ("1f1b", "fifo", "lifo", "shuffled")},
        "input gradients first, weights later": plain(halves=True),
        "shares added last to first": plain(summed="kept", order="lifo"),
        "buffers used again, copied out of": plain(buffers="copied"),
        "loss scaled and back": plain(scale=1024.0),
        "loss scaled by 1000 and back": plain(scale=1000.0),
        "divided in the end": plain(late=True),
        "called by .forward": plain(call=lambda stage, given: stage.forward(*given)),
        "recomputed around the stage": plain(call=recomputed(False)),
        "recomputed around the stage, reentrant": plain(call=recomputed(True)),
        "watched inside what is recomputed": plain(call=recomputed(False)),
        "watched inside what is recomputed, reentrant": plain(call=recomputed(True)),
        "evaluation mode without dropout": plain(call=steps.in_evaluation),
        "called with a clone": plain(call=lambda stage, given: stage(*(x.clone() for x in given))),
        "a call for a metric": plain(between=steps.measured),
        "a call for a metric, with a graph": plain(between=steps.measured_with_graph),
        "shapes tried out first": plain(before=steps.shapes_of_zeros),
        "warmed up and cleared": plain(before=steps.warmed_up),
        "gradients begin as zeros": plain(before=steps.zeros_first),
        "gradients are views of one buffer": plain(before=steps.flat_gradients),
        **{f"split {split}": plain(split=split) for split in ((3, 1, 2, 2), (1, 4, 1, 2), (5, 1, 1, 1))},
        "hooks on parameters and stages": plain(before=steps.with_hooks),
        "an empty stage": plain(split=(3, 0, 3, 2)),
        "handed back by name, then clipped": steps.handed_by_name,
        "the whole step's loss on every rank": steps.whole_loss,
        "only a block of each stage watched": partial(steps.first_block_watched, alone=True),
        "watched twice": partial(steps.first_block_watched, alone=False),
        "the second step": steps.second_step,
        "other names": steps.renamed,
        "weights copied, other names": partial(steps.renamed, copied=True),
    }


def _sizes() -> Iterator[Run]:
    """Numbers of ranks and microbatches, and what microbatches are."""
    for number, name in enumerate(("one rank", "two ranks", "three ranks"), 1):
        yield right(name, ranks=number)
    yield right("one microbatch", data=data_of(count=1))
    yield right("fewer microbatches than ranks", plain(order="lifo"), data=data_of(count=3))
    yield right("forty microbatches", data=data_of(count=40))
    ragged = some(4, 2, 7, 1, 5, 3, 6, 4)
    yield right("unequal microbatches", data=ragged)
    elements = float(sum(target.numel() for _, target in ragged))
    yield right(
        "unequal microbatches, divided by all elements",
        plain(loss_fn=summed, divisor=elements),
        data=ragged,
        loss_fn=summed,
        contract=Contract(loss_divisor=elements),
    )
    yield right("inputs that are views", data=[(x.t().contiguous().t(), y) for x, y in data_of()])
    yield right("inputs that are expanded", data=[(x[:1].expand(ROWS, WIDTH), y) for x, y in data_of()])
    yield right("inputs that want gradients", data=[(x.requires_grad_(), y) for x, y in data_of()])
    yield right("two equal microbatches", data=[*data_of()[:4], *data_of()[:4]])


def summed(output: Tensor, target: Tensor) -> Tensor:
    """A sum, to be divided by the number of all elements."""
    return loss_fn(output, target) * target.numel()


STREAMS: Mapping[str, Build] = {
    "two streams": of(layers.carry, layers.joined),
    "nested tuples and a number": of(layers.nested, layers.unnested),
    "a dictionary": of(layers.named, layers.unnamed),
    "a mask and positions go along": of(layers.masked, layers.first),
    "numbers, nothing and complex buffers": of(layers.scaled),
    "straight-through rounding": of(layers.quantised),
    "autocast": of(layers.autocast),
    "saved tensors offloaded": of(layers.offloads),
    "norms in fp32, the rest in bf16": of(layers.mixed),
    "a stream beside, one handed on twice": of(layers.beside, layers.ended),
    "an output that nothing reads": of(layers.looked_at, layers.first),
    "in place on its own output": of(layers.adds_in_place),
    "one relu ends every layer": layers.one_relu,
    "weight norm": layers.normed,
    "dropout of nothing": of(lambda: nn.Sequential(Block(), nn.Dropout(0.0))),
}
MODELS: Mapping[str, Build] = {
    "frozen first stage": layers.frozen(0, 1),
    "frozen first two stages": layers.frozen(0, 1, 2, 3),
    "frozen middle stage": layers.frozen(4, 5),
    "frozen last stage": layers.frozen(6, 7),
    "no bias is trained": layers.frozen(biases=True),
    "a parameter that nothing uses": of(layers.unused),
    "weights write their gradients": of(layers.writes),
    "views, not contiguous": of(layers.transposed, layers.straight),
    "in place": of(layers.in_place),
    "a block applied twice": of(layers.twice),
    "buffers of bools and bytes": of(layers.with_buffers),
    "recomputes itself": of(layers.recomputed(reentrant=False)),
    "recomputes itself, reentrant": of(layers.recomputed(reentrant=True)),
    "casts by name": of(layers.casts_by_name),
    "batch norms": of(layers.with_norms),
    "attention": of(layers.attention),
    "tied within a stage": layers.tied(2, 3),
    **STREAMS,
}


def _models() -> Iterator[Run]:
    """Layers of every kind, and of every type."""
    for name, build in MODELS.items():
        yield right(name, plain(), build)
    for name, build in STREAMS.items():
        yield right(f"{name}{LIFO}", plain(order="lifo"), build)
    for name, dtype in {"bf16": torch.bfloat16, "fp64": torch.float64, "fp16": torch.float16}.items():
        yield right(name, plain(), layers.of_dtype(dtype), data=data_of(dtype=dtype))
    yield right(f"bf16{LIFO}", plain(order="lifo"), **BF16)
    yield right("bf16, shuffled", plain(order="shuffled"), **BF16)
    yield right("halves in bf16", plain(halves=True), **BF16)
    yield right("bf16, gradients added in fp32", steps.main_gradients, **BF16)
    yield right("two inputs", build=of(layers.sideways), data=data_of(sides=True))
    yield right("pictures", build=of(layers.picture), data=data_of((2, 3, 6, 6)))
    yield right("recurrent", build=of(layers.recurrent), data=data_of((2, 5, WIDTH)))
    yield right("a loss of the model's own", plain(loss_fn=None), of(layers.targeted, layers.with_loss), loss_fn=None)
    for name, sparse in {"tokens": False, "tokens, sparse gradients": True}.items():
        more = {"data": tokens(), "loss_fn": cross_entropy}
        yield right(name, plain(loss_fn=cross_entropy), layers.language(sparse=sparse), **more)


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """The mean over the targets that count."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=0)


def tokens() -> Pairs:
    """Numbers of tokens, and those that come next."""
    draw = torch.Generator().manual_seed(2)
    ids = [torch.randint(layers.TOKENS, (ROWS, 7), generator=draw) for _ in range(COUNT)]
    return [(each[:, :-1], each[:, 1:]) for each in ids]


def mean_of_all(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def hair_off(stage: nn.Module, given: tuple[Any, ...]) -> Any:
    """Rounds otherwise, in a forward and in what comes of it."""
    return stage(*(x * (1 + 2**-23) for x in given))


def _around() -> Iterator[Run]:
    """Rounding, weights in several places, and replicas."""
    behind = plain(loss_fn=mean_of_all, call=hair_off)
    yield right("a sum behind a norm, a hair off", behind, of(Block, layers.sums_to_nothing), loss_fn=mean_of_all)
    yield right("linear layers before batch norms, a hair off", plain(call=hair_off), of(layers.before_norm))
    yield right("weights stored, as the plain reference", steps.weights_stored, of(layers.plainly))
    yield right("tied copies in two stages", steps.tied_copies, layers.tied(0, 7))
    by_name = partial(steps.tied_copies, renamed=True)
    yield right("a tied copy by another name", by_name, layers.tied(0, 7))
    contract = Contract(names=steps.in_the_reference)
    yield right("a tied copy by another name, told", by_name, layers.tied(0, 7), contract=contract)
    yield right("one block is every layer", steps.all_share_a_block, layers.shared_by_all)
    yield right("replicas, reduced by hand", steps.replicated, ranks=REPLICAS)
    yield right("replicas in DDP", partial(steps.replicated, by="ddp"), ranks=REPLICAS)
    yield right("rows in shards over replicas", partial(steps.replicated, by="shards"), ranks=REPLICAS)

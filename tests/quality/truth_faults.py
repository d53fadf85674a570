"""Faults in five foreign runtimes, and what is true of each run that has one. In three of them stage s is on rank s."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import runtime_chunks
import runtime_classes
import runtime_instructions
import runtime_iterators
import runtime_two_way
from truth_check import COUNTS, Run, Truth
from truth_models import COUNT, RANKS, build_model, data_of, loss_fn

ALL = tuple(range(COUNT))
HERE, THERE = ALL[: COUNT // 2], ALL[COUNT // 2 :]  # of the two directions
PAIRED = ("mispaired", "swapped-gradients", "swapped-activations")
TAKEN = ("mispaired", "swapped-activations")  # a stage took another tensor than the one that came


STEPS = {
    "iterators": runtime_iterators.step,
    "instructions": runtime_instructions.step,
    "two-way": runtime_two_way.step,
    "classes": runtime_classes.step,
    "chunks": runtime_chunks.step,
}


def planted(runtime: str, name: str, truth: Truth, **options: Any) -> Run:
    """A run with a fault of a runtime."""
    title = f"{runtime}: {name}" + "".join(f", {option}={value}" for option, value in options.items())
    given = {"reference": build_model, "microbatches": data_of(), "ranks": RANKS, "loss_fn": loss_fn}
    counts = COUNTS._replace(stages=2 * RANKS) if runtime == "chunks" else COUNTS
    return Run(title, partial(STEPS[runtime], fault=name, **options), truth, given, counts)


def _truth(kinds: str | tuple[str, ...], wrong: str, stages: Iterable[int] = (), /, **more: Any) -> Truth:
    """At ``stages``, and on the ranks of the same numbers unless ``ranks`` says which."""
    at = tuple(stages)
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    return Truth(kinds, frozenset(wrong.split()), stages=at, **{"ranks": at, **more})


def forward(kinds: str | tuple[str, ...], *stages: int, wrong: str = "", **more: Any) -> Truth:
    """What went wrong in forwards: losses and gradients follow."""
    return _truth(kinds, f"boundary loss gradients {wrong}", stages, **{"between": True, **more})


def backward(kinds: str | tuple[str, ...], *stages: int, wrong: str = "", **more: Any) -> Truth:
    """What went wrong in backwards, at or between ``stages``: losses are right, and gradients of later stages."""
    affected = tuple(range(max(stages, default=RANKS - 1) + 1))
    return _truth(kinds, f"boundary gradients {wrong}", stages, **{"affected": affected, "between": True, **more})


def sums(kinds: str | tuple[str, ...], *stages: int, wrong: str = "sums", **more: Any) -> Truth:
    """What went wrong with gradients that were computed right: only these stages' are wrong."""
    return _truth(kinds, f"gradients {wrong}", stages, **{"affected": stages or None, **more})


def other(kind: str | tuple[str, ...], wrong: str, *ranks: int, **more: Any) -> Truth:
    """What is wrong around gradients that are right."""
    return _truth(kind, wrong, (), **{"ranks": ranks, **more})


UNDIVIDED = backward("scale", 3, wrong="scale", somewhere=True, factors=(8.0,))
BELOW_RECEIVER = {"affected": (0, 1)}

ITERATORS = {
    "static receive buffer": backward(
        "overwritten", 2, wrong="swapped memory", microbatches=ALL[:7], alike=("swapped-activations", "mispaired")
    ),
    "static receive buffers": backward(
        "overwritten", 1, 2, wrong="swapped memory", microbatches=ALL[:7], alike=("swapped-activations", "mispaired")
    ),
    "activations in bf16": forward("rounded", 1, 2, alike=("computation",)),
    "activation lost a bit": forward("altered", 1, 2, microbatches=(4,), alike=("computation",)),
    "activation not finite": forward("not-finite", 1, 2, microbatches=(3,), somewhere=True),
    "activations overtake": forward(
        "wrong-message", 1, 2, wrong="swapped", microbatches=(2, 3), alike=("swapped-activations", "swapped-data")
    ),
    "gradient halved on its way": backward("scale", 1, 2, wrong="scale", factors=(0.5,), **BELOW_RECEIVER),
    "one gradient is zero": backward(
        ("uninitialised", "altered"), 1, 2, wrong="dropped", microbatches=(1,), alike=("dropped",), **BELOW_RECEIVER
    ),
    "buffer of weights": sums("extra-term", 1),
    "copied, not added": sums("dropped", 1, microbatches=ALL[:7]),
    "first not added": sums("dropped", 1, microbatches=(0,)),
    "fifth added twice": sums("doubled", 2, microbatches=(5,)),
    "norms reduced twice": sums("scale", 2, wrong="reduction", parameter=r"^4\.norm\.weight$", factors=(2.0,)),
    "flat buffer off by one": sums(("altered", "misplaced"), 1, wrong="reduction", parameter=r"^2\.linear\.bias$"),
    "stage negated": sums("sign", 2, wrong="reduction", factors=(-1.0,)),
    "bias left out": sums("missing", 1, wrong="reduction", parameter=r"^2\.linear\.bias$"),
    "loss not divided": UNDIVIDED,
    "queue popped at the wrong end": backward(PAIRED, 1, wrong="swapped"),
    "losses last first": other("report", "report", 3),
    "norm of each rank": other("norm", "norm"),
    "norms added": other("norm", "norm"),
    "layers of the next rank": other("partition", "partition held loss gradients", 1),
    "weights in bf16": forward("rounded", 1, wrong="weights"),
    "a microbatch taken twice": sums(
        "dropped", wrong="loss sums order", microbatches=(3,), also=(sums("doubled", microbatches=(2,)),)
    ),
    "labels one behind": forward("swapped-data", 0, 3, wrong="swapped", somewhere=True),
}

INSTRUCTIONS = {
    "inputs exchanged": forward("swapped-data", 0, 3, wrong="swapped", microbatches=(0, 1), somewhere=True),
    "labels exchanged": forward("swapped-data", 0, 3, wrong="swapped", microbatches=(4, 5), somewhere=True),
    "receive buffer not cloned": backward(
        "overwritten", 2, wrong="swapped memory", microbatches=ALL[:7], alike=("swapped-activations", "mispaired")
    ),
    "partition not gathered": forward(("altered", "uninitialised"), 1, 2, microbatches=(1,), alike=("computation",)),
    "older activation": forward(TAKEN, 1, wrong="swapped", microbatches=(5,), alike=("swapped-data",)),
    "gradient read before it came": backward(
        ("uninitialised", "altered"), 1, wrong="dropped", microbatches=(2,), alike=("dropped",)
    ),
    "buffer ids exchanged": backward(PAIRED, 1, wrong="swapped", microbatches=(2, 3)),
    "last one without weights": sums("dropped", 0, wrong="sums order", microbatches=(7,)),
    "sum started anew": sums("dropped", 1, microbatches=(0, 1, 2)),
    "accumulation steps forgotten": UNDIVIDED,
    "second layer not called": forward(("computation", "partition"), 2, alike=("missing",)),
    "layer called twice": forward(("computation", "partition"), 1),
    "gradients in fp16": backward("rounded", 1, 2, alike=("computation",), **BELOW_RECEIVER),
    "mean over one replica too many": sums("scale", 2, wrong="reduction", factors=(0.5,)),
    "norm cleared": sums("zero", 2, wrong="reduction", parameter=r"^4\.norm\.weight$"),
    "sums in bf16": sums("rounded", 1, wrong="reduction"),
    "averaged with the neighbour": sums("extra-term", 0, 1, wrong="reduction", parameter=r"norm\.weight$"),
    "norm without the last rank": other("norm", "norm", 3),
    "loss reported divided": other("report", "report", 3),
    "weights drawn again": forward("randomness", 2, wrong="weights", parameter=r"linear\.weight$"),
}

TWO_WAY = {
    "one buffer for a direction": backward(
        "overwritten", 2, ranks=(1,), wrong="swapped memory", microbatches=(4, 5, 6), alike=("swapped-activations",)
    ),
    "other chunk's input": forward(TAKEN, 2, ranks=(2,), microbatches=(1,), alike=("computation",)),
    "activations rounded one way": forward("rounded", 1, 2, microbatches=THERE, alike=("computation",)),
    "newest graph first": backward(PAIRED, 1, ranks=(1,), wrong="swapped", microbatches=HERE),
    "newest graph first there": backward(PAIRED, 1, ranks=(2,), wrong="swapped", microbatches=THERE),
    "second half not added": sums("dropped", 2, ranks=(1,), microbatches=THERE),
    "first one run twice": sums("doubled", 0, ranks=(0,), wrong="sums order", microbatches=(0,)),
    "gradient halved one way": backward(
        "scale", 1, 2, wrong="scale", microbatches=THERE, factors=(0.5,), **BELOW_RECEIVER
    ),
    "targets of the other direction": forward(
        "swapped-data", 3, ranks=(0,), wrong="swapped", microbatches=THERE, somewhere=True
    ),
    "divided by its own half": backward(
        "scale", 3, ranks=(0,), wrong="scale", microbatches=THERE, factors=(2.0,), alike=("doubled",), somewhere=True
    ),
    "one copy negated": sums("sign", 0, ranks=(3,), wrong="reduction", microbatches=THERE, factors=(-1.0,)),
    "a pair that does not meet": sums("not-reduced", 1, ranks=(1, 2), wrong="replicas reduction"),
    "bias that does not meet": sums(
        "not-reduced", 2, ranks=(1, 2), wrong="replicas reduction", parameter=r"^4\.linear\.bias$"
    ),
    "one copy halved after they met": sums("scale", 0, ranks=(3,), wrong="replicas reduction", factors=(0.5,)),
    "one copy cleared after they met": sums("zero", 1, ranks=(1,), wrong="replicas reduction"),
    "mean of the pair": sums("scale", wrong="reduction scale", factors=(0.5,)),
    "both copies in the norm": other("norm", "norm"),
    "losses of one direction": other("report", "report", 0, 3, somewhere=True),
    "copies that drifted apart": forward("altered", 1, ranks=(2,), wrong="weights"),
}

CLASSES = {
    "layers in the other order": forward(("computation", "partition"), 2),
    "last layer forgotten": other(("partition", "missing"), "partition held loss gradients", 1),
    "layer without its residual": forward("computation", 1),
    "other epsilon": forward("computation", 2),
    "always the first targets": forward("swapped-data", 0, 3, wrong="swapped", microbatches=ALL[1:], somewhere=True),
    "received twice": forward(TAKEN, 2, wrong="swapped", microbatches=(3,), alike=("swapped-data",)),
    "one stage hands on bf16": forward("rounded", 0, 1, alike=("computation",)),
    "loss of sums": forward(("scale", "computation"), 3, wrong="scale", somewhere=True, factors=(64.0,)),
    "steps of accumulation forgotten": UNDIVIDED,
    "stash last in first out": backward(PAIRED, 1, wrong="swapped"),
    "cleared in the middle": sums("dropped", 2, microbatches=(0, 1, 2, 3)),
    "gradient plus noise": backward(
        ("altered", "extra-term"), 1, 2, microbatches=(2,), alike=("computation",), **BELOW_RECEIVER
    ),
    "gradients doubled on arrival": backward("scale", 0, 1, wrong="scale", factors=(2.0,), affected=(0,)),
    "last microbatch negated": sums("sign", 1, wrong="sums scale", microbatches=(7,), factors=(-1.0,)),
    "weight transposed": sums(("altered", "misplaced"), 2, wrong="reduction", parameter=r"^4\.linear\.weight$"),
    "biases zeroed": sums("zero", 0, wrong="reduction", parameter=r"bias$"),
    "clipped before it was handed back": sums(("scale", "clip"), wrong="scale"),
    "losses in fp16": other(("report", "rounded"), "report", 3),
}

CHUNKS = {
    "inputs of chunks exchanged": forward(TAKEN, 1, 5, ranks=(1,), wrong="swapped", microbatches=(3, 4)),
    "gradients of chunks exchanged": backward(PAIRED, 1, 5, ranks=(1,), wrong="swapped", microbatches=(3, 4)),
    "all inputs of chunks exchanged": forward(TAKEN, 1, 5, ranks=(1,), wrong="swapped"),
    "all gradients of chunks exchanged": backward(PAIRED, 1, 5, ranks=(1,), wrong="swapped"),
    "chunk's newest first": backward(PAIRED, 6, ranks=(2,), wrong="swapped"),
    "first chunk halved": sums("scale", 2, ranks=(2,), wrong="reduction", factors=(0.5,)),
}

TABLES = {
    "iterators": ITERATORS,
    "instructions": INSTRUCTIONS,
    "two-way": TWO_WAY,
    "classes": CLASSES,
    "chunks": CHUNKS,
}
FAULTS = (
    *(planted(runtime, name, truth) for runtime, table in TABLES.items() for name, truth in table.items()),
    *(
        planted("instructions", name, INSTRUCTIONS[name], recompute=True)
        for name in ("sum started anew", "buffer ids exchanged")
    ),
    *(
        planted("classes", name, CLASSES[name], afab=False)
        for name in ("stash last in first out", "cleared in the middle")
    ),
    *(
        planted("chunks", name, replace(CHUNKS[name], ranks=(at,), stages=(at, at + RANKS)), at=at)
        for name in ("inputs of chunks exchanged", "all inputs of chunks exchanged")
        for at in (2, 3)
    ),
)

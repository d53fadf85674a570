"""Faults of parallelism around and inside a stage, and what is true of each run that has one."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from axis_faults import step
from truth_check import RIGHT, Counts, Run, Truth
from truth_faults import other, sums

from pipeproof.core.replicas import Replicas
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from pipeproof.wings.primitives.stacked import validate_stack
from pipeproof.wings.primitives.stacks import Stack

COUNT = 4  # microbatches
STACKS = {
    "ddp": Stack({"dp": 2}, ("ddp",)),
    "ddp of 4": Stack({"dp": 4}, ("ddp",)),
    "zero 3": Stack({"fsdp": 2}, ("zero-3",)),
    "hsdp": Stack({"dp_replicate": 2, "dp_shard": 2}, ("hsdp",)),
    "tp": Stack({"tp": 2}, ("tp",)),
    "sp": Stack({"sp": 2}, ("sp",)),
    "ep": Stack({"ep": 2}, ("ep",)),
    "ep of 4": Stack({"ep": 4}, ("ep",)),
    "cp": Stack({"cp": 2}, ("cp",)),
    "cp of 4": Stack({"cp": 4}, ("cp",)),
    "dp tp": Stack({"dp": 2, "tp": 2}, ("tp", "ddp")),
    "dp sp": Stack({"dp": 2, "sp": 2}, ("sp", "ddp")),
    "dp cp": Stack({"dp": 2, "cp": 2}, ("cp", "ddp")),
    "pp dp tp": Stack({"pp": 2, "dp": 2, "tp": 2}, ("tp", "ddp")),
    "pp ep": Stack({"pp": 2, "ep": 2}, ("ep",)),
    "pp cp": Stack({"pp": 2, "cp": 2}, ("cp",)),
}


def of_stack(whitebox: WhiteBox, step: Callable[..., Any], *, stack: Stack) -> Verdict:
    """What is said of a step of a stack."""
    return validate_stack(stack, whitebox, step=step)


def along(name: str, fault: str, truth: Truth = RIGHT) -> Run:
    """A fault in a stack of primitives, or what is right in one: nothing in particular where it has no name."""
    stack, right = STACKS[name], f"right, {fault}" if fault else "right"
    counts = Counts(
        math.prod(stack.sizes.values()), stack.sizes.get("pp", 1), COUNT, Replicas.along(stack.sizes, COUNT).count
    )
    title = f"{name}: {fault if truth.kinds else right}"
    return Run(title, partial(step, stack=stack, fault=fault), truth, {"stack": stack}, counts, by=of_stack)


def apart(parameter: str = "", *stages: int, **more: object) -> Truth:
    """Ranks keep their own part of what is to be reduced."""
    return sums("not-reduced", *stages, wrong="replicas reduction", parameter=parameter, **more)


def factor(by: float, parameter: str = "", **more: object) -> Truth:
    return sums("scale", wrong="reduction scale", parameter=parameter, factors=(by,), **more)


def in_forward(*kinds: str, hidden: bool = False) -> Truth:
    """The loss and all gradients follow; ``hidden``: what the stage puts out is in parts, and not compared."""
    return sums(("computation", *kinds), wrong="computation loss" if hidden else "computation loss boundary")


def in_backward(kinds: tuple[str, ...], parameter: str, *stages: int, **more: object) -> Truth:
    """The loss is right, and gradients of what is before it follow."""
    wrong = "computation replicas" if "not-reduced" in kinds else "computation"
    return sums((*kinds, "computation"), *stages, wrong=wrong, parameter=parameter, **more)


def norms(*names: str) -> dict[str, Truth]:
    return dict.fromkeys(names, other("norm", "norm"))


SAME_DATA = sums(("dropped", "doubled"), wrong="sums loss dropped doubled messages")
AUXILIARY = in_backward(("extra-term", "scale"), r"^2\.(norm|mixture\.router)")
EXPERTS = r"\.experts\."
FAULTS: Mapping[str, Mapping[str, Truth]] = {
    "ddp": {
        "never reduced": apart(),
        "reduced before the last microbatch": apart(),
        "sum over replicas": factor(2.0),
        "divided by replicas twice": factor(0.5),
        "mean summed again": factor(2.0),
        "one weight ignored": apart(r"^1\.feedforward\.up\.weight$"),
        "same data for all": SAME_DATA,
        "gradients of rank 0": sums(
            ("dropped", "doubled", "unequal-weights", "not-reduced"), wrong="reduction dropped"
        ),
        "one replica counts twice": sums(("doubled", "scale"), microbatches=(1, 3), factors=(2.0,), wrong="doubled"),
        "reduced in bf16": sums("rounded", wrong="reduction"),
        **norms("norm of each rank, twice"),
    },
    "ddp of 4": {"sum over replicas": factor(4.0), "never reduced": apart(), "same data for all": SAME_DATA},
    "zero 3": {
        "sum of shards": factor(2.0),
        "shards divided twice": factor(0.5),
        "shards never reduced": sums(("missing", "not-reduced"), wrong="reduction replicas"),
        "same data in all shards": SAME_DATA,
        "shards reduced before the last": sums(("dropped", "not-reduced"), wrong="reduction", microbatches=(2, 3)),
        "shards exchanged": sums("misplaced", wrong="reduction"),
        "shards reduced in bf16": sums("rounded", wrong="reduction"),
        **norms("norm of each rank", "norm takes shards for copies"),
    },
    "hsdp": {
        "copies of shards not reduced": apart(),
        "copies of shards wait": sums(("missing", "not-reduced"), wrong="reduction replicas"),
        "same data in all shards and copies": SAME_DATA,
        "same data in the shards of a copy": SAME_DATA,
        "one rank halves its shards": sums("scale", wrong="reduction scale replicas", ranks=(1,), factors=(0.5,)),
        **norms("norm over the world"),
    },
    "tp": {
        "input gradients not reduced": in_backward(("not-reduced",), r"^2\.norm"),
        "queries' input gradients not reduced": in_backward(("not-reduced",), r"^2\.attention_norm"),
        "mean of input gradients": in_backward(("scale",), r"^2\.norm", factors=(0.5,)),
        "outputs not reduced": in_forward(hidden=True),
        "outputs reduced twice": in_forward(hidden=True),
        "bias of each rank": in_forward(hidden=True),
        "norms reduced again": factor(2.0, "norm"),
        "all times tp": factor(2.0),
        "shards of a weight exchanged": sums(
            ("altered", "misplaced"), wrong="weights loss", parameter=r"^1\.feedforward\.up"
        ),
        **norms("norm over the world", "norm of each rank"),
    },
    "sp": {
        "norms in parts": apart("norm"),
        "norms averaged": factor(0.5, "norm"),
        "gathered without reduction": in_backward((), r"^2\.norm"),
        **norms("norm over the world"),
    },
    "ep": {
        "experts times ranks": factor(2.0, EXPERTS),
        "experts averaged": factor(0.5, EXPERTS),
        "experts reduced as replicas": sums("extra-term", wrong="reduction", parameter=EXPERTS),
        "router not reduced": apart("router"),
        "norms not reduced": apart("norm"),
        "shared expert not reduced": apart("shared"),
        "sent back in another order": in_forward(),
        "last experts first": in_forward(),
        "half the capacity": in_forward(),
        "no gradient from experts": in_backward((), r"^2\.norm"),
        "auxiliary gradient times ranks": AUXILIARY,
        "auxiliary loss times ranks": in_forward("extra-term", "scale"),
        **norms("norm without experts", "norm over the world"),
    },
    "ep of 4": {"experts times ranks": factor(4.0, EXPERTS), "router not reduced": apart("router")},
    "cp": {
        "parts not reduced": apart(),
        "positions not reduced": apart("positions"),
        "mean over parts": factor(0.5),
        "parts reduced twice": factor(2.0),
        "keys' gradients not reduced": in_backward((), r"^2\.attention\.(keys|values)"),
        "positions of rank 0": in_forward(),
        "mask of the neighbour": in_forward(),
        "keys in reverse": in_forward(),
        "targets of the neighbour": in_forward("swapped-data"),
        "losses of its own part": other("report", "report loss"),
        **norms("norm over the world"),
    },
    "cp of 4": {"mean over parts": factor(0.25), "parts not reduced": apart()},
    "dp tp": {
        "input gradients not reduced": in_backward(("not-reduced",), r"^2\.norm"),
        "never reduced by hand": apart(),
        **norms("norm counts copies along tp", "norm of each rank"),
        "same data for all": SAME_DATA,
    },
    "dp sp": {"norms in parts": apart("norm"), "norms averaged": factor(0.5, "norm")},
    "dp cp": {
        "parts not reduced": apart(),
        "never reduced": apart(),
        "targets of the neighbour": in_forward("swapped-data"),
    },
    "pp dp tp": {
        "mean of input gradients": in_backward(("scale",), r"^2\.norm", factors=(0.5,)),
        "outputs reduced twice": in_forward(hidden=True),
        "one weight on one line of dp": apart(r"^1\.feedforward\.up\.weight$", 0, ranks=(0, 2)),
        "first stage not reduced": apart("", 0, ranks=(0, 1, 2, 3)),
        "input gradients not reduced in the second stage": in_backward(
            ("not-reduced",), r"^2\.norm", 1, ranks=(4, 5, 6, 7)
        ),
        "norms reduced again": factor(2.0, "norm"),
        **norms("norm over the world"),
    },
    "pp ep": {
        "sent back in another order": in_forward(),
        "auxiliary gradient times ranks": AUXILIARY,
        "experts times ranks": factor(2.0, EXPERTS),
        "router not reduced": apart("router"),
        **norms("norm without experts"),
    },
    "pp cp": {
        "positions of rank 0": in_forward(),
        "first stage's parts not reduced": apart("", 0, ranks=(0, 1)),
        "keys' gradients not reduced": in_backward((), r"^2\.attention\.(keys|values)"),
        "mean over parts": factor(0.5),
    },
}


SOUND: Mapping[str, tuple[str, ...]] = {
    "ddp": (
        "small buckets",
        "gradients are views of buckets",
        "divided first",
        "reduced in fp64",
        "added in reverse",
        "reduced in every backward",
        "norm of ranks' norms",
    ),
    "ddp of 4": ("small buckets", "added in reverse"),
    "zero 3": ("shards divided first", "shards reduced in every backward", "shards kept whole", "norm of ranks' norms"),
    "tp": ("outputs added in fp64", "input gradients reduced by hand", "norm of ranks' norms"),
    "sp": ("norms added up by hand",),
    "ep": ("experts: one buffer, in reverse",),
    "ep of 4": ("experts: one buffer, in reverse",),
    "cp": ("parts: one buffer, in reverse", "zig-zag parts", "keys in reverse, with their positions"),
    "cp of 4": ("zig-zag parts",),
    "pp dp tp": ("outputs added in fp64",),
    "pp ep": ("experts: one buffer, in reverse", "norm of ranks' norms"),
    "pp cp": ("zig-zag parts", "parts: one buffer, in reverse"),
}


def axes() -> Iterator[Run]:
    """Every fault, and what is right."""
    for stack, faults in FAULTS.items():
        for name, truth in faults.items():
            yield along(stack, name, truth)
    for stack in STACKS:
        for name in ("", *SOUND.get(stack, ())):
            yield along(stack, name)

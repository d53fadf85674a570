"""Faults of parallelism around and inside a stage, and what is true of each run that has one."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from axis_faults import step
from truth_check import Counts, Truth
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


RIGHT = Truth()


@dataclass(frozen=True)
class Along:
    """A fault in a stack of primitives; without a name it is right."""

    stack: str
    fault: str
    truth: Truth = RIGHT

    @property
    def title(self) -> str:
        how = f", {self.fault}" if self.fault and not self.truth.kinds else self.fault
        return f"{self.stack}: {how if self.truth.kinds else f'right{how}'}"

    @property
    def counts(self) -> Counts:
        """How many there are of each."""
        sizes = STACKS[self.stack].sizes
        replicas = Replicas.along(sizes, COUNT).count
        return Counts(math.prod(sizes.values()), sizes.get("pp", 1), COUNT, replicas)

    def verdict(self, whitebox: WhiteBox, *, watched: bool) -> Verdict:
        """What is said of a step with this fault."""
        stack = STACKS[self.stack]
        return validate_stack(stack, whitebox, step=partial(step, stack=stack, fault=self.fault, watched=watched))


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


SAME_DATA = sums(("dropped", "doubled"), wrong="sums loss dropped doubled messages")
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
        "norm of each rank, twice": other("norm", "norm"),
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
        "norm of each rank": other("norm", "norm"),
        "norm takes shards for copies": other("norm", "norm"),
    },
    "hsdp": {
        "copies of shards not reduced": apart(),
        "copies of shards wait": sums(("missing", "not-reduced"), wrong="reduction replicas"),
        "same data in all shards and copies": SAME_DATA,
        "same data in the shards of a copy": SAME_DATA,
        "one rank halves its shards": sums("scale", wrong="reduction scale replicas", ranks=(1,), factors=(0.5,)),
        "norm over the world": other("norm", "norm"),
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
        "norm over the world": other("norm", "norm"),
        "norm of each rank": other("norm", "norm"),
    },
    "sp": {
        "norms in parts": apart("norm"),
        "norms averaged": factor(0.5, "norm"),
        "gathered without reduction": in_backward((), r"^2\.norm"),
        "norm over the world": other("norm", "norm"),
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
        "auxiliary gradient times ranks": in_backward(
            (
                "extra-term",
                "scale",
            ),
            r"^2\.(norm|mixture\.router)",
        ),
        "auxiliary loss times ranks": in_forward("extra-term", "scale"),
        "norm without experts": other("norm", "norm"),
        "norm over the world": other("norm", "norm"),
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
        "norm over the world": other("norm", "norm"),
    },
    "cp of 4": {"mean over parts": factor(0.25), "parts not reduced": apart()},
    "dp tp": {
        "input gradients not reduced": in_backward(("not-reduced",), r"^2\.norm"),
        "never reduced by hand": apart(),
        "norm counts copies along tp": other("norm", "norm"),
        "norm of each rank": other("norm", "norm"),
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
        "norm over the world": other("norm", "norm"),
    },
    "pp ep": {
        "sent back in another order": in_forward(),
        "auxiliary gradient times ranks": in_backward(("extra-term", "scale"), r"^2\.(norm|mixture\.router)"),
        "experts times ranks": factor(2.0, EXPERTS),
        "router not reduced": apart("router"),
        "norm without experts": other("norm", "norm"),
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


def axes() -> Iterator[Along]:
    """Every fault, and what is right."""
    for stack, faults in FAULTS.items():
        for name, truth in faults.items():
            yield Along(stack, name, truth)
    for stack in STACKS:
        for name in ("", *SOUND.get(stack, ())):
            yield Along(stack, name)

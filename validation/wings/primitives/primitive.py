"""Table of parallelisms: savings and costs, their formulas, and implementations.

Bytes are for bf16 weights, gradients summed in fp32, and Adam in fp32: 2 + 4 + 12 a parameter. Tests compare the
formulas with ``pipeproof advise``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from importlib.resources import files

Axes = tuple[str, ...]

SYMBOLS: Mapping[str, str] = {
    "n": "ranks along its axis",
    "P": "parameters of a device without it",
    "E": "parameters of its experts alone",
    "p": "parameters of its largest layer",
    "A": "bytes of activations without it",
    "L": "layers of a device",
    "k": "tokens of a microbatch on a device",
    "h": "the hidden width",
    "g": "the width of all keys",
    "e": "experts that a token visits",
    "m": "microbatches of a step",
    "v": "stages on a rank",
}


class Level(IntEnum):
    """The level of a primitive's work; the innermost is applied first."""

    INSIDE = 0  # a layer
    AROUND = 1  # a layer
    OVER = 2  # stages: replicas
    BETWEEN = 3  # stages: the pipeline


@dataclass(frozen=True)
class Primitive:
    """One kind of parallelism. ``saves`` and ``costs``: a formula in ``SYMBOLS``, and its unit.

    ``axes``: of the mesh, with their numbers of ranks; a primitive without axes works on every rank separately.
    """

    name: str
    title: str
    axes: Axes
    level: Level
    saves: tuple[str, str]
    costs: tuple[str, str]
    implementation: str
    source: str


_ZERO = "Rajbhandari et al., ZeRO, 2020"
_STATE = "bytes of weights, gradients and optimizer"


def _by_name(*primitives: Primitive) -> Mapping[str, Primitive]:
    return {one.name: one for one in primitives}


# In the order in which the field adds them.
PRIMITIVES = _by_name(
    Primitive(
        "recompute",
        "activations computed again",
        (),
        Level.AROUND,
        saves=("A (1 - 1/L) - 2 k h L", "bytes of activations: of each layer only its input stays"),
        costs=("1/3", "of a step's computing in addition: one more forward"),
        implementation="torch.utils.checkpoint, both kinds; selective, around blocks or attention",
        source="Chen et al., Training deep nets with sublinear memory cost, 2016",
    ),
    Primitive(
        "ddp",
        "data parallel",
        ("dp",),
        Level.OVER,
        saves=("0", "bytes; each rank has 1/n of the batch"),
        costs=("8 P (1 - 1/n)", "bytes a step, sent while the last backward runs"),
        implementation="torch DistributedDataParallel",
        source="Li et al., PyTorch Distributed, 2020",
    ),
    Primitive(
        "zero-1",
        "the optimizer in shards",
        ("dp",),
        Level.OVER,
        saves=("12 P (1 - 1/n)", "bytes of the optimizer"),
        costs=("6 P (1 - 1/n)", "bytes a step: gradients once, and weights after the update"),
        implementation="torch DistributedDataParallel, ZeroRedundancyOptimizer",
        source=_ZERO,
    ),
    Primitive(
        "zero-2",
        "gradients and optimizer in shards",
        ("fsdp",),
        Level.OVER,
        saves=("16 P (1 - 1/n) - 4 p", "bytes of gradients and optimizer"),
        costs=("(4 m + 2) P (1 - 1/n)", "bytes a step: gradients in every microbatch, weights once"),
        implementation="torch fully_shard(reshard_after_forward=False)",
        source=_ZERO,
    ),
    Primitive(
        "zero-3",
        "weights in shards, too",
        ("fsdp",),
        Level.OVER,
        saves=("18 P (1 - 1/n) - 8 p", _STATE),
        costs=("8 m P (1 - 1/n)", "bytes a step: gradients once and weights twice in every microbatch"),
        implementation="torch fully_shard",
        source=_ZERO,
    ),
    Primitive(
        "hsdp",
        "shards inside a node, replicas over nodes",
        ("dp_replicate", "dp_shard"),
        Level.OVER,
        saves=("18 P (1 - 1/n) - 8 p", f"{_STATE}; n is dp_shard"),
        costs=("8 m P (1 - 1/n)", "bytes a step inside a node, and an all-reduce of P / n gradients over nodes"),
        implementation="torch fully_shard on a mesh of two axes",
        source="Zhao et al., PyTorch FSDP, 2023",
    ),
    Primitive(
        "tp",
        "tensor parallel",
        ("tp",),
        Level.INSIDE,
        saves=("18 P (1 - 1/n)", f"{_STATE}, and of activations what lies inside attention and feedforward"),
        costs=("16 k h (1 - 1/n)", "bytes a layer and microbatch: four all-reduces, and computing waits"),
        implementation="torch parallelize_module, loss_parallel; by hand",
        source="Shoeybi et al., Megatron-LM, 2019",
    ),
    Primitive(
        "sp",
        "tensor and sequence parallel",
        ("sp",),
        Level.INSIDE,
        saves=("18 P (1 - 1/n) + A (1 - 1/n)", f"{_STATE}, and of all activations"),
        costs=("16 k h (1 - 1/n)", "bytes a layer and microbatch: gathers and scatters, as many bytes as tp"),
        implementation="torch parallelize_module with SequenceParallel; by hand",
        source="Korthikanti et al., Reducing activation recomputation, 2022",
    ),
    Primitive(
        "pp",
        "pipeline parallel",
        ("pp",),
        Level.BETWEEN,
        saves=("18 P (1 - 1/n)", _STATE),
        costs=("(n - 1) / (v m)", "of a step's work is waiting under 1F1B; 4 k h v bytes a microbatch are sent"),
        implementation="PipelineSchedule, every schedule",
        source="Narayanan et al., Efficient large-scale language model training, 2021",
    ),
    Primitive(
        "ep",
        "expert parallel",
        ("ep",),
        Level.INSIDE,
        saves=("18 E (1 - 1/n)", f"{_STATE} of experts"),
        costs=("8 e k h (1 - 1/n)", "bytes a layer and microbatch: tokens to their experts and back, twice"),
        implementation="all_to_all_single: router, capacity, shared expert, auxiliary loss",
        source="Lepikhin et al., GShard, 2020; Fedus et al., Switch Transformers, 2021",
    ),
    Primitive(
        "cp",
        "context parallel",
        ("cp",),
        Level.INSIDE,
        saves=("A (1 - 1/n)", "bytes of activations"),
        costs=("8 k g (n - 1)", "bytes a layer and microbatch: keys and values of all, and their gradients"),
        implementation="keys and values gathered, or ring attention; in order or zig-zag",
        source="Liu et al., Ring Attention, 2023",
    ),
)
# Further parts for a stack: other implementations of the primitives above.
VARIANTS: Mapping[str, str] = {
    "recompute-reentrant": "recompute",
    "recompute-selective": "recompute",
    "recompute-attention": "recompute",
    "recompute-attention-reentrant": "recompute",
    "ddp-every": "ddp",
    "ddp-static": "ddp",
    "ddp-unused": "ddp",
    "zero-3-every": "zero-3",
    "tp-by-hand": "tp",
    "sp-by-hand": "sp",
    "cp-zigzag": "cp",
    "ring": "cp",
    "ring-zigzag": "cp",
}
ALIASES: Mapping[str, str] = {"dp": "ddp", "fsdp": "zero-3"}


def primitive_of(name: str) -> Primitive:
    """Return a primitive from the table; for a variant, its base."""
    return PRIMITIVES[VARIANTS.get(name, name)]


@dataclass(frozen=True)
class Figures:
    """Results of validating a primitive alone on the smallest mesh, over seeds of weights and data.

    parameters: number of gradients compared for each seed. worst: their largest relative error; floor: its rounding.
    """

    ranks: int
    seeds: int
    passed: int
    parameters: int
    worst: float
    floor: float
    torch: str


def figures() -> Mapping[str, Figures]:
    """Return the measurements of ``ci/primitives`` in ``figures.json``, by primitive."""
    text = files(__package__).joinpath("figures.json").read_text(encoding="utf-8")
    return {name: Figures(**one) for name, one in json.loads(text).items()}

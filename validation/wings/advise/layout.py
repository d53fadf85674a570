"""A layout: how a job's ranks are divided among the kinds of parallelism, and what is legal."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from pipeproof.wings.advise.transformer import Transformer


class Recompute(StrEnum):
    """Results that a backward recomputes (Korthikanti et al., 2022).

    NONE: nothing. SELECTIVE: nearly free ones, here norms and activation functions; attention never keeps its matrix of
    scores. FULL: a whole layer from its input.
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


@dataclass(frozen=True)
class Job:
    """A training job: a global ``batch`` of sequences with ``sequence`` tokens, in bf16 with Adam.

    ``gradient_bytes``: 4 where gradients are summed in fp32, 2 in bf16. ``optimizer_bytes``: fp32 master weights and
    two moments of Adam are 12 a parameter (Rajbhandari et al., ZeRO, 2020).
    """

    model: Transformer
    batch: int
    sequence: int
    gradient_bytes: int = 4
    optimizer_bytes: int = 12


class Pipeline(NamedTuple):
    """Parameters of a schedule, besides microbatches."""

    schedule: str
    ranks: int
    virtual: int


@dataclass(frozen=True)
class Layout:
    """Ranks = tp * cp * pp * dp, neighbours in the order tp, cp, dp, pp: tp within a node first.

    ``ep``: over how many of the dp * cp ranks the experts are spread. ``zero``: what data-parallel ranks share: 1 the
    optimizer, 2 gradients too, 3 weights too. ``virtual``: stages per rank. ``micro``: sequences in a microbatch.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    zero: int = 0
    recompute: Recompute = Recompute.NONE
    schedule: str = "1f1b"
    virtual: int = 1
    micro: int = 1

    @property
    def ranks(self) -> int:
        """Number of devices."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline alone."""
        return Pipeline(self.schedule, self.pp, self.virtual)

    @property
    def shards(self) -> int:
        """Number of ranks with the same dense parameters."""
        return self.dp * self.cp

    @property
    def expert_shards(self) -> int:
        """Number of ranks with the same experts."""
        return max(1, self.shards // self.ep)

    @property
    def sizes(self) -> str:
        """Sizes above one: ``tp 8, pp 16, dp 128``."""
        named = {"tp": self.tp, "cp": self.cp, "pp": self.pp, "dp": self.dp, "ep": self.ep}
        return ", ".join(f"{name} {size}" for name, size in named.items() if size > 1) or "one device"

    @property
    def words(self) -> str:
        """All but the schedule: ``tp 8, pp 16, dp 128, ZeRO-1, selective recompute``."""
        zero = f", ZeRO-{self.zero}" if self.zero else ""
        again = f", {self.recompute} recompute" if self.recompute is not Recompute.NONE else ""
        return f"{self.sizes}{zero}{again}"

    def microbatches(self, job: Job) -> int:
        """How many a pipeline gets in a step."""
        return job.batch // (self.dp * self.micro)


def problems(layout: Layout, job: Job) -> Iterator[str]:
    """Yield reasons against ``layout``, each with the rule and a cure."""
    model = job.model
    for what, size, whole, cure in (
        ("tp", layout.tp, ("heads", model.heads), "use a divisor"),
        ("tp", layout.tp, ("feed_forward", model.feed_forward), "use a divisor"),
        (
            "2 * cp",
            2 * layout.cp if layout.cp > 1 else 1,
            ("sequence", job.sequence),
            "each rank takes two pieces; use a divisor",
        ),
        ("dp * micro", layout.dp * layout.micro, ("batch", job.batch), "use a divisor, or another batch"),
    ):
        if whole[1] % size:
            yield f"{what} {size} does not divide {whole[0]} {whole[1]}: {cure}"
    if layout.tp > model.keys and layout.tp % model.keys:
        yield f"tp {layout.tp} is no multiple of {model.keys} heads of keys and values"
    if layout.pp * layout.virtual > model.layers:
        stages = layout.pp * layout.virtual
        yield f"{model.layers} layers cannot fill {stages} stages: use fewer ranks, or fewer stages per rank"
    experts = model.experts
    if layout.ep > 1 and experts is None:
        yield f"ep {layout.ep}: {model.name} has no experts"
    elif experts is not None and experts.count % layout.ep:
        yield f"ep {layout.ep} does not divide {experts.count} experts: use a divisor"
    if layout.shards % layout.ep:
        yield f"ep {layout.ep} does not divide dp * cp {layout.shards}: experts are spread over these ranks"

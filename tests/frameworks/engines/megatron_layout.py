"""How a step of Megatron-core is laid out."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tests.frameworks.engines.framework_layout import FrameworkLayout, offers

_CHUNKED = "is for virtual stages: give v2 or more"
_REPLICATED = "is for replicas: give dp2 or more"


@dataclass(frozen=True)
class MegatronLayout(FrameworkLayout):
    """tied: embedding and output layer share a weight. three: the loss function returns three results.

    per_token: ``calculate_per_token_loss``. first, last: ``num_layers_in_first_pipeline_stage`` and ``_last_``; 0: not
    said. with_embedding, with_loss: ``account_for_embedding_in_pipeline_split`` and ``_loss_``. recompute: its
    granularity. deallocate: ``deallocate_pipeline_outputs``. p2p_overlap: ``overlap_p2p_comm``; flush: in warm-up and
    flush too. unbatched: without ``batch_p2p_comm``, as p2p_overlap is anyhow. group:
    ``microbatch_group_size_per_vp_stage``; 0: not said. overlap: ``overlap_grad_reduce``; aligned: with
    ``grad_sync_func``. buckets: their size; 0: not said. averaged: ``average_in_collective``. distributed:
    ``use_distributed_optimizer``. optimizer: it steps; unclipped: without clipping. bf16: weights and activations are,
    gradients are not. scaled: losses are multiplied by ``loss_scale`` before their backwards, and the optimizer divides
    by it. second: a step is trained before the one that is judged.
    """

    tied: bool = False
    per_token: bool = False
    three: bool = False
    optimizer: bool = False
    overlap: bool = False
    p2p_overlap: bool = False
    distributed: bool = False
    first: int = 0
    last: int = 0
    with_embedding: bool = False
    with_loss: bool = False
    recompute: str = "none"
    deallocate: bool = False
    flush: bool = False
    unbatched: bool = False
    group: int = 0
    aligned: bool = False
    buckets: int = 0
    averaged: bool = False
    unclipped: bool = False
    bf16: bool = False
    scaled: bool = False
    second: bool = False

    framework: ClassVar[str] = "megatron"
    most_virtual: ClassVar[int] = 3
    offered: ClassVar[Mapping[str, tuple[Any, ...]]] = offers(
        # The first decides how many microbatches there may be.
        "group tied three per_token with_embedding with_loss first last recompute deallocate p2p_overlap "
        "flush unbatched distributed overlap aligned buckets averaged optimizer unclipped bf16 scaled "
        "second",
        group=(0, 2, 3, 4, 5),
        first=(0, 1, 2, 3),
        last=(0, 1, 2, 3),
        recompute=("none", "full", "selective"),
        buckets=(0, 500, 2000),
    )

    @property
    def whole(self) -> "MegatronLayout":
        """The same model, for the reference."""
        return MegatronLayout(
            pp=1,
            layers=self.layers,
            seed=self.seed,
            tied=self.tied,
            bf16=self.bf16,
            per_token=self.per_token,
            three=self.three,
        )

    @property
    def order(self) -> str:
        """What its schedule is called."""
        return "no pipelining" if self.pp == 1 else "interleaved" if self.vp > 1 else "1f1b"

    @property
    def dtype(self) -> str:
        """Of weights and activations."""
        return "bf16" if self.bf16 else "fp32"

    def refusals(self, microbatches: int) -> Iterator[tuple[bool, str]]:
        """What Megatron-core, or its adapter, cannot have."""
        yield self.vp > 1 and self.pp == 1, "Megatron has virtual stages on 2 ranks and more: give v1"
        yield self.recompute not in self.offered["recompute"], f"recompute is {self.recompute}: none, full or selective"
        yield self.per_token and not self.three, "per-token wants a loss function of three results: give three too"
        yield from self._of_stages()
        yield from self._of_messages(microbatches)
        yield from self._of_replicas()

    def _of_stages(self) -> Iterator[tuple[bool, str]]:
        ends, accounted = bool(self.first or self.last), self.with_embedding or self.with_loss
        yield (ends or accounted) and self.pp == 1, "stages of their own sizes are for 2 ranks and more"
        yield ends and accounted, "first and last do not go with with-embedding and with-loss"
        for name, own in (("first", self.first), ("last", self.last)):
            yield bool(own % self.vp), f"{name}={own} is no whole number of layers for each of {self.vp} virtual stages"
        yield (
            self.vp > 1 and self.pp == bool(self.first) + bool(self.last),
            "first and last leave no rank between them, and Megatron divides by that number where stages are virtual",
        )
        slots = self.layers + self.with_embedding + self.with_loss - self.first - self.last
        ranks = self.pp - bool(self.first) - bool(self.last)
        each = ranks * self.vp
        counted = ", embedding and loss counted," if accounted else ""
        uneven = slots != 0 if not ranks else slots <= 0 or bool(slots % each)
        yield uneven, f"{slots} layers{counted} are left for {each} stages: each has to have as many"
        # A stage without layers is Megatron's own affair, and is allowed there; the two ends have at least a module.

    def _of_messages(self, microbatches: int) -> Iterator[tuple[bool, str]]:
        group, chunked = self.group or self.pp, self.vp > 1
        yield bool(self.group) and not chunked, f"group={self.group} {_CHUNKED}"
        yield self.p2p_overlap and not chunked, f"p2p-overlap {_CHUNKED}"
        yield self.flush and not self.p2p_overlap, "flush goes with p2p-overlap: give both"
        yield self.unbatched and (self.p2p_overlap or self.pp == 1), "unbatched says nothing here: leave it out"
        yield (
            chunked and not self.pp <= group <= microbatches,
            f"Megatron wants groups of {self.pp} microbatches at least, and of all {microbatches} at most: not {group}",
        )
        over = microbatches % group
        yield (
            chunked and 0 < over < self.pp,
            f"the last group would have {over} microbatches: Megatron wants 0, or {self.pp} and more",
        )

    def _of_replicas(self) -> Iterator[tuple[bool, str]]:
        several = self.dp > 1
        yield self.overlap and not several, f"overlap {_REPLICATED}"
        yield self.distributed and not several, f"distributed {_REPLICATED}"
        yield self.aligned and not (self.overlap and self.vp > 1), "aligned goes with overlap and virtual stages"
        yield bool(self.buckets) and not (self.overlap or self.distributed), "buckets go with overlap or distributed"
        yield self.averaged and (not several or self.per_token), "averaged is for replicas, and not with per-token"
        yield self.unclipped and not self.optimizer, "unclipped is for an optimizer: give optimizer too"
        unscaled = not self.optimizer or not (self.bf16 or self.distributed)
        yield (
            self.scaled and unscaled,
            "scaled is for an optimizer that divides: give optimizer, and bf16 or distributed",
        )

"""How a batch of DeepSpeed's PipelineEngine is laid out."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tests.frameworks.engines.framework_layout import FrameworkLayout, offers, word

_ENDS = 2  # the layers before and after those that are counted


@dataclass(frozen=True)
class DeepSpeedLayout(FrameworkLayout):
    """tied: the first and the last layer are one. zero: the stage of ZeRO. bf16: the engine casts its layers.

    recompute: ``activation_checkpoint_interval``; reentrant: as the engine does where nobody says otherwise;
    blocks_alone: of ``checkpointable_layers``. clipped: ``gradient_clipping``. accumulate: ``grad_accum_dtype``.
    partition: ``partition_method``. dynamic: ``dynamic_shape``. bucket: of ZeRO's reductions; 0: not said. whole:
    without ``reduce_scatter``. overlap: ``overlap_comm``. scattered: without ``contiguous_gradients``. prescaled:
    ``prescale_gradients``. second: a batch is trained before the one that is judged.
    """

    tied: bool = False
    zero: int = 0
    bf16: bool = False
    recompute: int = 0
    clipped: bool = False
    accumulate: str = "none"
    reentrant: bool = False
    blocks_alone: bool = False
    partition: str = "uniform"
    dynamic: bool = False
    bucket: int = 0
    whole: bool = False
    overlap: bool = False
    scattered: bool = False
    prescaled: bool = False
    second: bool = False

    framework: ClassVar[str] = "deepspeed"
    offered: ClassVar[Mapping[str, tuple[Any, ...]]] = offers(
        "tied zero bf16 accumulate recompute reentrant blocks_alone partition dynamic clipped bucket whole "
        "overlap scattered prescaled second",
        zero=(0, 1),
        accumulate=("none", "fp32", "bf16"),
        recompute=(0, 1, 2, 3),
        partition=("uniform", "parameters", "type:block"),
        bucket=(0, 50, 1000),
    )

    @property
    def dtype(self) -> str:
        """Of weights, activations and gradients."""
        return "bf16" if self.bf16 else "fp32"

    def refusals(self, microbatches: int) -> Iterator[tuple[bool, str]]:
        """What DeepSpeed, or its adapter, cannot have."""
        yield self.vp != 1, "DeepSpeed's PipelineEngine has one stage on a rank: give v1"
        yield self.zero not in (0, 1), f"zero={self.zero}: DeepSpeed has pipelines with ZeRO 0 and 1"
        for name in ("accumulate", "partition"):
            value, known = getattr(self, name), self.offered[name]
            yield value not in known, f"{name}={value}: known are {', '.join(known)}"
        items = self.layers if self.partition == "type:block" else self.layers + _ENDS
        yield items < self.pp, f"{items} layers cannot be cut into {self.pp} stages"
        yield self.accumulate != "none" and not self.bf16, "accumulate is for layers in bf16: give bf16 too"
        yield (
            self.accumulate == "fp32" and not self.zero,
            "accumulate=fp32 is for ZeRO: give zero=1 too",
        )
        for name in ("reentrant", "blocks_alone"):
            yield getattr(self, name) and not self.recompute, f"{word(name)} is for recompute: give recompute=1 too"
        for name in ("bucket", "whole", "overlap", "scattered"):
            yield bool(getattr(self, name)) and not self.zero, f"{name} is for ZeRO: give zero=1 too"
        yield (
            self.prescaled and (bool(self.zero) or self.bf16 or self.dp == 1),
            "prescaled is for plain replicas in fp32",
        )

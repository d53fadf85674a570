"""How a step of torchtitan's pipelines is laid out."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType
from typing import Any, ClassVar

from pipeproof.own.runtimes import TORCH, TORCH_CLASSES, why_not
from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.pipeline.schedules import LOOPED, build, can_have, virtuals
from tests.frameworks.engines.framework_layout import FrameworkLayout, offers

_NAMES: Mapping[str, str] = MappingProxyType(  # torchtitan's for torch's classes, and the families that these are
    {torch.removeprefix("Schedule"): family for family, torch in TORCH_CLASSES.items()}
)


@dataclass(frozen=True)
class TorchtitanLayout(FrameworkLayout):
    """schedule: as torchtitan calls it. replicate: of the replicas, how many have whole weights; others have shards.

    clipped: by ``clip_grad_norm_``. less_first, less_last: ``pipeline_parallel_first_stage_less_layers`` and
    ``_last_``. ac: recomputation. reshard: ``fsdp_reshard_after_forward``. bf16: weights are. whole_batch: a step is
    given one batch, which torch splits. second: a step is trained before the one that is judged.
    """

    schedule: str = "1F1B"
    replicate: int = 1
    clipped: bool = False
    less_first: int = 1
    less_last: int = 1
    ac: str = "none"
    reshard: str = "default"
    bf16: bool = False
    whole_batch: bool = False
    second: bool = False

    framework: ClassVar[str] = "torchtitan"
    least_ranks: ClassVar[int] = 2
    most_virtual: ClassVar[int] = 3
    offered: ClassVar[Mapping[str, tuple[Any, ...]]] = offers(
        # The first decides how many stages and microbatches there may be.
        "schedule replicate clipped less_first less_last ac reshard bf16 whole_batch second",
        schedule=("1F1B", *(name for name in _NAMES if name != "1F1B")),
        replicate=(1, 2),
        less_first=(1, 0, 2),
        less_last=(1, 0, 2),
        ac=("none", "full", "selective"),
        reshard=("default", "always", "never"),
    )

    @property
    def order(self) -> str:
        """What its schedule is called elsewhere here."""
        return _NAMES.get(self.schedule, self.schedule)

    @property
    def dtype(self) -> str:
        """Of weights, activations and gradients."""
        return "bf16" if self.bf16 else "fp32"

    @property
    def shard(self) -> int:
        """Ranks that have a weight's shards."""
        return self.dp // self.replicate

    @property
    def single(self) -> bool:
        """Whether its schedule has one stage on a rank."""
        return self.order not in LOOPED and virtuals(self.order) == 1

    @property
    def layers_per_stage(self) -> int | None:
        """``pipeline_parallel_layers_per_stage``, where there are other stages than torchtitan makes by itself."""
        by_itself = self.vp == (1 if self.single else 2)
        return None if by_itself else ceil(self._slots / (self.pp * self.vp))

    @property
    def _slots(self) -> int:
        return self.layers + self.less_first + self.less_last

    def refusals(self, microbatches: int) -> Iterator[tuple[bool, str]]:
        """What torchtitan, or its adapter, cannot have."""
        for name in ("schedule", "ac", "reshard"):
            value, known = getattr(self, name), self.offered[name]
            yield value not in known, f"{name.replace('_', '-')}={value}: known are {', '.join(known)}"
        yield self.pp < self.least_ranks, "torchtitan has pipelines on 2 ranks and more"
        yield (
            not self.replicate or self.dp % self.replicate > 0,
            f"replicate={self.replicate} does not divide {self.dp} replicas",
        )
        yield self.reshard != "default" and self.shard < 2, "reshard is for shards: give dp2 or more, without replicate"
        yield from self._of_stages()
        yield (why := self._of_schedule(microbatches)) != "", why

    def _of_stages(self) -> Iterator[tuple[bool, str]]:
        stages, each = self.pp * self.vp, self.layers_per_stage
        least = self._slots // stages
        yield least == 0, f"{self._slots} layers, both ends counted, are too few for {stages} stages"
        yield (
            each is not None and ceil(self._slots / each) != stages,
            f"{self._slots} layers, both ends counted, make no {stages} stages of {each} or less",
        )
        for name, less in (("less-first", self.less_first), ("less-last", self.less_last)):
            yield less > least, f"{name}={less} is more than the {least} layers that a stage has at least"

    def _of_schedule(self, microbatches: int) -> str:
        if not self.single and self.vp < 2:
            return f"{self.schedule} has 2 stages and more on a rank in torchtitan: give v2 or more"
        try:
            can_have(self.order, self.vp)
            build(self.order, ranks=self.pp, virtual=self.vp, microbatches=microbatches)
        except ScheduleError as error:
            return str(error)
        shape = (self.pp, self.pp * self.vp, microbatches, 1)
        return why_not(TORCH, (), schedule=self.order, model="mlp", shape=shape, sizes_differ=False, specimen="")

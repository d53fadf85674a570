"""A tiny model with a policy of ColossalAI's, and a training step of it, as a user of ColossalAI writes them."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.pipeline.schedule.v_schedule import PipelineGraph
from colossalai.shardformer.policies.base_policy import ModulePolicyDescription, Policy
from torch import Tensor, nn

import pipeproof
from pipeproof import StepResult
from pipeproof.wings.adapters.colossalai_whole import COLOSSALAI

COLOSSALAI.on_cpu()
ROWS, SEQUENCE, WORDS, WIDTH = 2, 4, 16, 8


@dataclass(frozen=True)
class Layout:
    """How a step is laid out, and what it is told."""

    style: str = "1f1b"
    pp: int = 2
    dp: int = 1
    chunks: int = 1
    tied: bool = False
    bf16: bool = False
    zero: int = 0
    clipped: bool = True
    cached: bool = True
    dp_outside: bool = True
    layers: int = 8

    @property
    def ranks(self) -> dict[str, int]:
        return {"dp": self.dp, "pp": self.pp}

    @property
    def microbatches(self) -> int:
        """Those of each replica: shares of replicas round more of them too coarsely, where each has a part in bf16."""
        return 2 if self.zero and self.dp > 1 else 4

    @property
    def dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.bf16 else None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return made


class Tiny(nn.Module):
    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layout.layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if layout.tied:
            nn.init.normal_(self.words.weight, std=0.2)
            self.head.weight = self.words.weight

    def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(self.norm(x))}


def staged(
    self: Tiny,
    words: Tensor,
    labels: Tensor,
    hidden_states: Tensor | None = None,
    stage_index: Any = None,
    *,
    manager: Any,
) -> dict[str, Tensor | None]:
    """What a stage does in place of the model's forward, as ColossalAI's own policies have it."""
    x = self.words(words) if manager.is_first_stage() else hidden_states
    for block in self.blocks[stage_index[0] : stage_index[1]]:
        x = block(x)
    return {"logits": self.head(self.norm(x))} if manager.is_last_stage() else {"hidden_states": x}


class TinyPolicy(Policy):
    def config_sanity_check(self) -> None: ...

    def preprocess(self) -> Any:
        self.tied = self.model.head.weight is self.model.words.weight
        return self.model

    def postprocess(self) -> Any:
        return self.model

    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        manager = self.pipeline_stage_manager
        forward = partial(staged, manager=manager)
        if not manager.is_interleave:
            forward = partial(forward, stage_index=self.ranges()[0])
        return {Tiny: ModulePolicyDescription(method_replacement={"forward": forward})}

    def ranges(self) -> list[Any]:
        """The layers of this rank."""
        manager = self.pipeline_stage_manager
        found = manager.get_stage_index(manager.distribute_layers(len(self.model.blocks)))
        if not manager.is_interleave:
            return [found]
        manager.stage_indices = found
        return found  # type: ignore[no-any-return]  # ColossalAI's

    def get_held_layers(self) -> list[nn.Module]:
        model, manager = self.model, self.pipeline_stage_manager
        held = [block for start, end in self.ranges() for block in model.blocks[start:end]]
        if manager.is_first_stage(ignore_chunk=True):
            held.append(model.words)
        if manager.stage == 0 if manager.use_zbv else manager.is_last_stage(ignore_chunk=True):
            held += [model.norm, model.head]
        return held

    def get_shared_params(self) -> list[dict[int, Tensor]]:
        manager = self.pipeline_stage_manager
        if not self.tied or manager.use_zbv:
            return []
        return [{0: self.model.words.weight, manager.num_stages - 1: self.model.head.weight}]


def build(layout: Layout) -> nn.Module:
    torch.manual_seed(0)
    return Tiny(layout)


def criterion(outputs: Any, microbatch: Any) -> Tensor:
    return nn.functional.cross_entropy(outputs["logits"].flatten(0, 1).float(), microbatch["labels"].flatten())


def made(layout: Layout, microbatches: int) -> tuple[Booster, Any, Any]:
    """The booster, and the boosted model and optimizer of this rank."""
    plugin = HybridParallelPlugin(
        tp_size=1,
        pp_size=layout.pp,
        pp_style=layout.style,
        dp_outside=layout.dp_outside,
        num_model_chunks=layout.chunks,
        num_microbatches=microbatches,
        scheduler_nodes=nodes(layout.pp, microbatches) if layout.style == "zbv" else None,
        precision="bf16" if layout.bf16 else "fp32",
        zero_stage=layout.zero,
        overlap_communication=False,
        enable_metadata_cache=layout.cached,
        max_norm=1.0 if layout.clipped else 0.0,
        custom_policy=TinyPolicy(),
    )
    booster, model = Booster(plugin=plugin), build(layout)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.Adam(model.parameters(), lr=0.01), criterion)
    return booster, boosted, optimizer


def nodes(ranks: int, microbatches: int) -> Any:
    """A schedule in a V, of the costs that ColossalAI's examples use."""
    costs = {"f_cost": 1, "b_cost": 1, "w_cost": 1, "c_cost": 1, "f_mem": 34, "b_mem": -32, "w_mem": -2}
    return PipelineGraph(n_stage=ranks, n_micro=microbatches, **costs).get_v_schedule()


def step(layout: Layout, model: nn.Module, microbatches: list[Any]) -> StepResult:
    booster, boosted, optimizer = made(layout, len(microbatches))
    with pipeproof.colossalai.observe(booster, boosted, optimizer, microbatches, model) as observed:
        train_step(booster, boosted, optimizer, observed.data_iterator)
    return observed.result()


def train_step(booster: Booster, model: Any, optimizer: Any, data: Any) -> None:
    optimizer.zero_grad()
    booster.execute_pipeline(data, model, criterion, optimizer, return_loss=True)
    optimizer.step()


def data_of(microbatches: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [
        dict(zip(("words", "labels"), torch.randint(0, WORDS, (2, ROWS, SEQUENCE)), strict=True))
        for _ in range(microbatches)
    ]


def judged(
    layout: Layout, *, microbatches: int = 0, own_step: Any = step, dtype: Any = "", whitebox: Any = None
) -> Any:
    return pipeproof.colossalai.validate(
        partial(own_step, layout),
        reference=partial(build, layout),
        criterion=criterion,
        microbatches=data_of((microbatches or layout.microbatches) * layout.dp),
        ranks=layout.ranks,
        dtype=layout.dtype if dtype == "" else dtype,
        whitebox=whitebox,
    )

"""ColossalAI's pipeline, beside the whole model on one device.

It needs colossalai: pip install --no-deps colossalai==0.5.0 galore-torch==1.0 bitsandbytes==0.50.2 &&
pip install peft==0.21.2 einops psutil

It runs as it is: a toy model, and 1F1B on two ranks. Change what is marked CHANGE; the rest may stay.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof import colossalai
from pipeproof.whitebox import WhiteBox

with colossalai.imports():  # your own modules that import colossalai belong here, too
    from colossalai.booster import Booster
    from colossalai.booster.plugin import HybridParallelPlugin
    from colossalai.shardformer.policies.base_policy import ModulePolicyDescription, Policy

RANKS, WORDS, WIDTH, SEQUENCE, ROWS, MICROBATCHES = 2, 64, 16, 8, 2, 4


class Model(nn.Module):
    """Your own, as is all up to the data: a policy cuts a model into stages."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(x)}


def stage_forward(
    self: Model, words: Tensor, labels: Tensor, hidden_states: Any = None, *, stages: Any, start: int, end: int
) -> dict[str, Tensor]:
    """What a stage does in place of the model's forward."""
    x = self.words(words) if stages.is_first_stage() else hidden_states
    for layer in self.layers[start:end]:
        x = layer(x)
    return {"logits": self.head(x)} if stages.is_last_stage() else {"hidden_states": x}


class ModelPolicy(Policy):
    """Which layers a stage holds."""

    def config_sanity_check(self) -> None: ...

    def preprocess(self) -> Any:
        return self.model

    def postprocess(self) -> Any:
        return self.model

    def layers(self) -> Any:
        stages = self.pipeline_stage_manager
        return stages.get_stage_index(stages.distribute_layers(len(self.model.layers)))

    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        start, end = self.layers()
        forward = partial(stage_forward, stages=self.pipeline_stage_manager, start=start, end=end)
        return {Model: ModulePolicyDescription(method_replacement={"forward": forward})}

    def get_held_layers(self) -> list[nn.Module]:
        stages, (start, end) = self.pipeline_stage_manager, self.layers()
        first = [self.model.words] if stages.is_first_stage() else []
        last = [self.model.head] if stages.is_last_stage() else []
        return [*first, *self.model.layers[start:end], *last]

    def get_shared_params(self) -> list[dict[int, Tensor]]:
        return []


def build_model() -> nn.Module:
    """CHANGE 1: the whole model, as it is before it is boosted. Two calls must give the same weights."""
    torch.manual_seed(0)
    return Model()


def criterion(outputs: Any, microbatch: Any) -> Tensor:
    """Your own, as execute_pipeline is given it."""
    return nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), microbatch["labels"].flatten())


def microbatches() -> list[dict[str, Tensor]]:
    """CHANGE 2: the data, as the schedule cuts it from a batch."""
    torch.manual_seed(1)
    drawn = torch.randint(0, WORDS, (MICROBATCHES, 2, ROWS, SEQUENCE))
    return [{"words": words, "labels": labels} for words, labels in drawn]


def setup() -> tuple[Booster, Any, Any]:
    """CHANGE 3: your plugin, your optimizer and, below, your step."""
    options = {"precision": "fp32", "max_norm": 1.0, "custom_policy": ModelPolicy()}
    plugin = HybridParallelPlugin(tp_size=1, pp_size=RANKS, num_microbatches=MICROBATCHES, **options)
    booster, model = Booster(plugin=plugin), build_model()
    boosted, optimizer, *_ = booster.boost(model, torch.optim.Adam(model.parameters()), criterion)
    return booster, boosted, optimizer


def train_step(data_iterator: Iterator[Any], booster: Booster, boosted: Any, optimizer: Any) -> None:
    """Your own, as your job takes it."""
    optimizer.zero_grad()
    booster.execute_pipeline(data_iterator, boosted, criterion, optimizer)
    optimizer.step()


def my_step(model: Any, microbatches: list[Any]) -> Any:
    """The step that is judged, on every rank."""
    boosted = setup()
    with colossalai.observe(*boosted, microbatches, model) as observed:
        train_step(observed.data_iterator, *boosted)
    return observed.result()


def test_my_pipeline(whitebox: WhiteBox) -> None:
    """Fails, with the cause, where a loss or a gradient is not the whole model's."""
    verdict = colossalai.validate(
        my_step,
        reference=build_model,
        criterion=criterion,
        microbatches=microbatches(),
        ranks=RANKS,
        whitebox=whitebox,
    )
    verdict.raise_if_failed()

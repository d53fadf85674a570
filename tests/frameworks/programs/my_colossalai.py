from collections.abc import Iterator
from functools import partial

import torch
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.shardformer.policies.base_policy import ModulePolicyDescription, Policy
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0) for _ in range(4))
        self.head = nn.Linear(16, 64)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> dict:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(x)}


def stage_forward(self, words, labels, hidden_states=None, *, stages, start, end) -> dict:
    x = self.words(words) if stages.is_first_stage() else hidden_states
    for layer in self.layers[start:end]:
        x = layer(x)
    return {"logits": self.head(x)} if stages.is_last_stage() else {"hidden_states": x}


class ModelPolicy(Policy):
    def config_sanity_check(self) -> None: ...

    def preprocess(self) -> nn.Module:
        return self.model

    def postprocess(self) -> nn.Module:
        return self.model

    def layers(self) -> tuple:
        stages = self.pipeline_stage_manager
        return stages.get_stage_index(stages.distribute_layers(len(self.model.layers)))

    def module_policy(self) -> dict:
        start, end = self.layers()
        forward = partial(stage_forward, stages=self.pipeline_stage_manager, start=start, end=end)
        return {Model: ModulePolicyDescription(method_replacement={"forward": forward})}

    def get_held_layers(self) -> list:
        stages, (start, end) = self.pipeline_stage_manager, self.layers()
        first = [self.model.words] if stages.is_first_stage() else []
        last = [self.model.head] if stages.is_last_stage() else []
        return [*first, *self.model.layers[start:end], *last]

    def get_shared_params(self) -> list:
        return []


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def criterion(outputs: dict, microbatch: dict) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), microbatch["labels"].flatten())


def setup(pp: int) -> tuple:
    plugin = HybridParallelPlugin(
        tp_size=1, pp_size=pp, num_microbatches=4, precision="fp32", max_norm=1.0, custom_policy=ModelPolicy()
    )
    booster, model = Booster(plugin=plugin), build_model()
    model, optimizer, *_ = booster.boost(model, torch.optim.Adam(model.parameters()), criterion)
    return booster, model, optimizer


def train_step(data_iter: Iterator, booster: Booster, model: nn.Module, optimizer) -> None:
    optimizer.zero_grad()
    booster.execute_pipeline(data_iter, model, criterion, optimizer)
    optimizer.step()

"""An engine and layers that are like DeepSpeed's, for what needs no DeepSpeed."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.like_framework import install


class LayerSpec:
    def __init__(self, made: type, *arguments: Any) -> None:
        self.made, self.arguments = made, arguments

    def build(self) -> Any:
        return self.made(*self.arguments)


class TiedLayerSpec(LayerSpec):
    def __init__(self, key: str, made: type, *arguments: Any, forward_fn: Any = None) -> None:
        super().__init__(made, *arguments)
        self.key, self.forward_fn = key, forward_fn


class PipelineEngine(nn.Module):
    """As DeepSpeed's: ``train_batch`` runs all layers, steps and clears."""

    stage_id, micro_batches, is_model_parallel, has_moe_layers, batch_fn = 0, 2, False, False, None
    using_bf16_optimizer = False
    norm: float | None = 1.5

    def __init__(self, module: nn.Module, *, fp16: bool = False, **options: Any) -> None:
        super().__init__()
        self.module, self.grid, self.optimizer = module, SimpleNamespace(data_parallel_size=1), Refreshed()
        self.fwd_outputs: list[Tensor] = []
        self._fp16 = fp16
        vars(self).update(options)

    def fp16_enabled(self) -> bool:
        return self._fp16

    def torch_autocast_enabled(self) -> bool:
        return False

    zero_cpu_offload = random_ltd_enabled = curriculum_learning_enabled = torch_autocast_enabled
    is_deepcompile_enabled = bfloat16_enabled = torch_autocast_enabled

    def managed_gradient_accumulation(self) -> bool:
        return True

    def get_global_grad_norm(self) -> float | None:
        return self.norm

    def _take_model_step(self, _: Any = None) -> None:
        sys.modules["deepspeed.runtime.engine"].clip_grad_norm_(self.module.parameters())
        self.module.zero_grad()

    def _next_batch(self) -> Any:
        return next(self.data_iterator)

    def train_batch(self, data: Iterator[Any]) -> None:
        self.data_iterator = data
        for _ in range(self.micro_batches):
            loss = self.module(self._next_batch()[0]).sum()
            self.fwd_outputs.append(loss.detach())
            (loss / self.micro_batches).backward()
        self._take_model_step()


def clip_grad_norm_(parameters: Iterator[nn.Parameter]) -> float:
    for parameter in parameters:
        parameter.grad.zero_()
    return 2.5


class DualPipeVEngine(PipelineEngine):
    pass


class Refreshed:
    def __init__(self) -> None:
        self.times = 0

    def refresh_fp32_params(self) -> None:
        self.times += 1


def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a DeepSpeed that has what the adapter uses."""
    contents = {
        "pipe": {"LayerSpec": LayerSpec, "TiedLayerSpec": TiedLayerSpec},
        "runtime.pipe.engine": {"PipelineEngine": PipelineEngine},
        "runtime.engine": {"clip_grad_norm_": clip_grad_norm_},
        "ops": {"__compatible_ops__": {"deepspeed_shm_comm": True}},
    }
    places: dict[str, dict[str, Any]] = {name: {} for name in ("comm.comm", "utils.groups", "runtime.pipe.p2p")}
    install(monkeypatch, "deepspeed", "0.19.8", places | contents)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)

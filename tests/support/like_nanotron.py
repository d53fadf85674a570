"""A nanotron that has what its adapter uses, for what needs no nanotron: one rank, and a model of one block."""

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.support.like_framework import install


class Group:
    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class ParallelContext:
    def __init__(self, tensor: int, pipeline: int, data: int) -> None:
        self.set_device()
        self.tensor_parallel_size, self.context_parallel_size, self.expert_parallel_size = tensor, 1, 1
        self.pipeline_parallel_size, self.data_parallel_size = pipeline, data
        self.pp_pg = sys.modules["nanotron.distributed"].new_group([0])
        self.dp_pg = self.pp_pg

    def set_device(self) -> None:
        raise AssertionError("the reference takes no device")


class PipelineBlock(nn.Module):
    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank
        self.pp_block = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.pp_block(x)


class NanotronModel(nn.Module):
    input_pp_rank = output_pp_rank = 0

    def __init__(self, **config: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(**config)
        self.first, self.second = PipelineBlock(), PipelineBlock()

    def get_named_params_with_correct_tied(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.named_parameters()

    def get_embeddings_lm_head_tied_names(self) -> list[str]:
        return getattr(self.config, "tied", [])

    def forward(self, input_ids: Tensor, label_ids: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.second(self.first(input_ids)) - label_ids).square().mean()}


class PipelineEngine:
    def train_batch_iter(self, model: nn.Module, pg: Any, batch: Any, divisor: float) -> None:
        for microbatch in batch:
            (model(**microbatch)["loss"] / divisor).backward()


class PipelineBatchState:
    activations_buffer: ClassVar[deque[Any]] = deque()


class TensorPointer:
    def __init__(self, group_rank: int) -> None:
        self.group_rank = group_rank


@torch.profiler.record_function("clip_grad_norm")
def clip_grad_norm(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    return nn.utils.clip_grad_norm_(parameters, max_norm)


def contents() -> dict[str, dict[str, Any]]:
    states = {f"Pipeline{kind}BatchState": PipelineBatchState for kind in ("", "Train", "Eval")}
    pipeline = "parallel.pipeline_parallel"
    buffers = {name: lambda *_: None for name in ("recv_from_pipeline_state_buffer", "send_to_pipeline_state_buffer")}
    ranks = dict.fromkeys(("get_rank", "get_global_rank"), lru_cache(lambda: 0))
    others = ("is_initialized", "get_backend", "get_world_size", "get_global_ranks", "get_process_group_ranks")
    more = ("new_group", "all_gather_object", "all_reduce", "all_reduce_coalesced", "barrier", "broadcast")
    return {
        "distributed": {**dict.fromkeys((*others, *more)), **ranks},
        "logging.base": {"torch_dist": None},
        "models.base": {"NanotronModel": NanotronModel},
        "optim.clip_grads": {"clip_grad_norm": clip_grad_norm},
        "parallel.context": {"ParallelContext": ParallelContext},
        f"{pipeline}.block": {"PipelineBlock": PipelineBlock, **buffers},
        f"{pipeline}.engine": {"PipelineEngine": PipelineEngine},
        f"{pipeline}.state": states,
        f"{pipeline}.tensor_pointer": {"TensorPointer": TensorPointer},
    }


def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it be found for one test."""
    install(monkeypatch, "nanotron", "0.4", contents())


class Trainer:
    """As nanotron's, of one rank."""

    def __init__(self, **config: Any) -> None:
        self.model: nn.Module = NanotronModel(**config)
        sizes = dict.fromkeys(("tensor_parallel_size", "context_parallel_size", "expert_parallel_size"), 1)
        self.parallel_context = SimpleNamespace(pp_pg=Group(), dp_pg=Group(), data_parallel_size=1, **sizes)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.grad_accumulator: Any = None
        self.n_micro_batches_per_batch, self.pipeline_engine = 2, PipelineEngine()

    def training_step(self, data: Iterator[Any], divisor: float = 2) -> None:
        batch = (next(data) for _ in range(self.n_micro_batches_per_batch))
        engine = self.pipeline_engine if isinstance(self.pipeline_engine, PipelineEngine) else PipelineEngine()
        engine.train_batch_iter(self.model, self.parallel_context.pp_pg, batch, divisor)
        clip_grad_norm([*self.model.parameters()], 0.01)
        self.optimizer.step()
        self.optimizer.zero_grad()


DATA = [{"input_ids": torch.full((1, 2), one), "label_ids": torch.ones(1, 2)} for one in (1.0, 2.0)]

"""A Megatron-core that has what its adapter uses, for what needs no Megatron."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import Tensor


def forward_step_calc_loss(model: Any, output: Any, function: Any, config: Any, count: int) -> Tensor:
    loss: Tensor = function(output)[0]
    return loss if config.calculate_per_token_loss else loss.div_(count)


def forward_step(function: Any, data_iterator: Any, model: Any, count: int) -> Any:
    output, loss = function(data_iterator, model)
    return sys.modules["megatron.core.pipeline_parallel.schedules"].forward_step_calc_loss(
        model, output, loss, model.config, count
    )


def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it be found for one test."""
    core, own = ModuleType("megatron.core"), ModuleType("megatron")
    core.__version__ = "0.16.1"  # type: ignore[attr-defined]  # as Megatron has it
    contents: dict[str, dict[str, Any]] = {
        "parallel_state": {
            "_DATA_PARALLEL_GROUP": "the job's",
            "get_pipeline_model_parallel_rank": lambda: 0,
            "get_pipeline_model_parallel_world_size": lambda: 1,
        },
        "pipeline_parallel": {},
        "pipeline_parallel.schedules": {"forward_step_calc_loss": forward_step_calc_loss, "forward_step": forward_step},
        "tensor_parallel": {},
        "tensor_parallel.random": {"_CUDA_RNG_STATE_TRACKER": SimpleNamespace(states_={"model": 3})},
        "utils": {"GlobalMemoryBuffer": object},
    }
    monkeypatch.setitem(sys.modules, "megatron", own)
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    for name, values in contents.items():
        module = ModuleType(f"megatron.core.{name}")
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, f"megatron.core.{name}", module)

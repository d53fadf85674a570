"""Megatron-core without a GPU: what it asks of a CUDA device is given by the CPU."""

from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch

_type: Any = torch.Tensor.type


def on_cpu() -> None:
    """Have it run here. Imports it."""
    import_module("pipeproof.foreign.frameworks.cuda_on_cpu")
    random: Any = import_module("megatron.core.tensor_parallel.random")
    tensors: Any = torch.Tensor
    tensors.type = _type_name
    random.CudaRNGStatesTracker.add = lambda *_: None
    random.CudaRNGStatesTracker.fork = lambda *_: nullcontext()
    random._get_cuda_rng_state = lambda *_, **__: torch.empty(0)  # nothing here draws from a CUDA device
    random._set_cuda_rng_state = lambda *_, **__: None


def _type_name(tensor: torch.Tensor, *given: Any) -> Any:
    """What Megatron compares with the type of a CUDA tensor."""
    if given:
        return _type(tensor, *given)
    told = str(_type(tensor))  # where a mode looks at functions, torch's own calls the one in its place, which is this
    return told if "cuda" in told else told.replace("torch.", "torch.cuda.")

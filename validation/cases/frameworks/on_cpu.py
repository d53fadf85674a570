"""Megatron-core on CPUs: what it asks of a CUDA device is given by the CPU. Importing this does it."""

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

import pipeproof.cases.frameworks.cuda_on_cpu  # noqa: F401  # it does so, too


def _type_name(tensor: torch.Tensor, *given: Any) -> Any:
    """What Megatron compares with the type of a CUDA tensor."""
    if given:
        return _type(tensor, *given)
    told = str(_type(tensor))  # where a mode looks at functions, torch's own calls the one in its place, which is this
    return told if "cuda" in told else told.replace("torch.", "torch.cuda.")


_type: Any = torch.Tensor.type
if not torch.cuda.is_available():
    tensors: Any = torch.Tensor
    tensors.type = _type_name
    CudaRNGStatesTracker.add = lambda *_: None
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()
    random._get_cuda_rng_state = lambda *_, **__: torch.empty(0)  # nothing here draws from a CUDA device
    random._set_cuda_rng_state = lambda *_, **__: None

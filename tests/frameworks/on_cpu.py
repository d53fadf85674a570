"""Megatron-core on CPUs: what it asks of a CUDA device is given by the CPU. Importing this does it."""

from contextlib import nullcontext

import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

import tests.frameworks.cuda_on_cpu  # noqa: F401  # it does so, too

if not torch.cuda.is_available():
    _type = torch.Tensor.type
    torch.Tensor.type = (  # type: ignore[method-assign,assignment]  # which Megatron compares with that of a CUDA device
        lambda tensor, *given: _type(tensor, *given) if given else _type(tensor).replace("torch.", "torch.cuda.")
    )
    CudaRNGStatesTracker.add = lambda *_: None
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()

"""ColossalAI on CPUs: what it asks of a device beside numbers, and of torch with NCCL. Importing this does it."""

from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from colossalai.accelerator.cpu_accelerator import CpuAccelerator
from colossalai.zero.low_level import LowLevelZeroOptimizer


def _nothing(*_: Any, **__: Any) -> None: ...


if not hasattr(dist, "is_hccl_available"):
    dist.is_hccl_available = lambda: False  # type: ignore[attr-defined]  # of some vendors' torch
# Without an accelerator there are no streams to order.
CpuAccelerator.Stream = CpuAccelerator.current_stream = CpuAccelerator.synchronize = _nothing
CpuAccelerator.stream = lambda *_, **__: nullcontext()
LowLevelZeroOptimizer._sanity_checks = _nothing  # that there is one

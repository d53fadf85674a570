"""ColossalAI without a GPU: what it asks of a device beside numbers, and of torch with NCCL."""

from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch.distributed as dist


def on_cpu() -> None:
    """Have it run here. Imports it."""
    if not hasattr(dist, "is_hccl_available"):
        dist.is_hccl_available = lambda: False  # type: ignore[attr-defined]  # of some vendors' torch
    cpu = import_module("colossalai.accelerator.cpu_accelerator").CpuAccelerator
    # Without an accelerator there are no streams to order.
    cpu.Stream = cpu.current_stream = cpu.synchronize = _nothing
    cpu.stream = lambda *_, **__: nullcontext()
    import_module("colossalai.zero.low_level").LowLevelZeroOptimizer._sanity_checks = _nothing  # that there is one


def _nothing(*_: Any, **__: Any) -> None: ...

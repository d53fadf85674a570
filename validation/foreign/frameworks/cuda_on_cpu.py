"""What frameworks ask of a CUDA device is given by the CPU. Importing this does it, once."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

_MAKERS = ("arange", "empty", "empty_like", "full", "ones", "rand", "randn", "tensor", "zeros", "zeros_like")


def _is_cuda(device: object) -> bool:
    return device is not None and not isinstance(device, int) and torch.device(str(device)).type == "cuda"


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def made(*given: Any, **named: Any) -> Any:
        if _is_cuda(named.get("device")):
            named["device"] = "cpu"
        return make(*given, **named)

    return made


cuda: Any = torch.cuda
tensors: Any = torch.Tensor
for name in _MAKERS:
    setattr(torch, name, _on_cpu(getattr(torch, name)))
tensors.cuda = lambda tensor, *_, **__: tensor
cuda.current_device = lambda: torch.device("cpu")
cuda.synchronize = lambda *_: None

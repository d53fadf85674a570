"""What frameworks ask of a CUDA device is given by the CPU. Importing this does it."""

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


if not torch.cuda.is_available():
    for _name in _MAKERS:
        setattr(torch, _name, _on_cpu(getattr(torch, _name)))
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign,assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]

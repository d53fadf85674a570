"""Frameworks without a GPU: the CPU and gloo replace CUDA devices, NCCL and kernels.

Each function imports one framework and prepares it. The framework then finds replacements for torch's own functions.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, wraps
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

_MAKERS = ("arange", "empty", "empty_like", "full", "ones", "rand", "randn", "tensor", "zeros", "zeros_like")
_type: Any = torch.Tensor.type


def megatron() -> None:
    """Replace Megatron's queries of a CUDA device; random numbers do not use it."""
    _cuda()
    random: Any = import_module("megatron.core.tensor_parallel.random")
    tensors: Any = torch.Tensor
    tensors.type = _type_name
    random.CudaRNGStatesTracker.add = lambda *_: None
    random.CudaRNGStatesTracker.fork = lambda *_: nullcontext()
    random._get_cuda_rng_state = lambda *_, **__: torch.empty(0)
    random._set_cuda_rng_state = lambda *_, **__: None


def colossalai() -> None:
    """Replace ColossalAI's queries of a device, and of torch with NCCL; without an accelerator there are no streams."""
    if not hasattr(dist, "is_hccl_available"):
        dist.is_hccl_available = lambda: False  # type: ignore[attr-defined]  # of some vendors' torch
    cpu = import_module("colossalai.accelerator.cpu_accelerator").CpuAccelerator
    cpu.Stream = cpu.current_stream = cpu.synchronize = lambda *_, **__: None
    cpu.stream = lambda *_, **__: nullcontext()
    optimizer = import_module("colossalai.zero.low_level").LowLevelZeroOptimizer
    optimizer._sanity_checks = lambda *_, **__: None  # they demand an accelerator


def nanotron() -> None:
    """Replace packages that need a GPU, and make sends behave like NCCL's."""
    _cuda()
    missing = {name: given for name, given in _KERNELS.items() if find_spec(name.partition(".")[0]) is None}
    sys.modules.update({name: _StandIn(name, given) for name, given in missing.items()})
    with mock.patch.object(torch.jit, "script", lambda function: function):  # it reads sources of constructors
        import_module("nanotron.trainer")
    place: Any = import_module("nanotron.distributed")
    place.initialize_torch_distributed = lambda: dist.init_process_group("gloo")
    place.send, place.isend = (buffered := _Buffered()).send, buffered.isend
    import_module("nanotron.parallel.context").ParallelContext.set_device = lambda _: None
    torch.cuda.reset_peak_memory_stats = lambda *_: None


@cache
def _cuda() -> None:
    """Redirect constructors of CUDA tensors to the CPU."""
    cuda: Any = torch.cuda
    tensors: Any = torch.Tensor
    for name in _MAKERS:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensors.cuda = lambda tensor, *_, **__: tensor
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_: None


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def make_on_cpu(*given: Any, **named: Any) -> Any:
        device = named.get("device")
        if device is not None and not isinstance(device, int) and torch.device(str(device)).type == "cuda":
            named["device"] = "cpu"
        return make(*given, **named)

    return make_on_cpu


def _type_name(tensor: Tensor, *given: Any) -> Any:
    """Return a CUDA tensor's type name, for Megatron's comparisons."""
    if given:
        return _type(tensor, *given)
    name = str(_type(tensor))  # under a function mode, torch's own calls this replacement
    return name if "cuda" in name else name.replace("torch.", "torch.cuda.")


def _flash_attn_varlen_func(
    *, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, softmax_scale: float | None, causal: bool, **_: Any
) -> Tensor:
    """Compute attention within each of several joined sequences: ``q`` has [all tokens, heads, width]."""
    made = []
    for low, high in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
        query, key, value = (one.reshape(len(one), -1, one.shape[-1])[low:high].transpose(0, 1) for one in (q, k, v))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=softmax_scale)
        made.append(attended.transpose(0, 1))
    return torch.cat(made)


def _layer_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, is_rms_norm: bool, **_: Any
) -> Tensor:
    if is_rms_norm:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


class _RotaryEmbedding(nn.Module):
    """flash-attn's rotary embedding, for a query [batch, tokens, heads, width] and pairs of keys and values."""

    def __init__(self, dim: int, base: float = 10000.0, **_: Any) -> None:
        super().__init__()
        self.dim, self.base = dim, base

    def forward(self, query: Tensor, *, kv: Tensor) -> tuple[Tensor, Tensor]:
        key, value = kv.unbind(2)
        return self._rotate(query), torch.stack([self._rotate(key), value], 2)

    def _rotate(self, x: Tensor) -> Tensor:
        speeds = self.base ** -(torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), speeds)[:, None]
        one, other = x.float().chunk(2, -1)
        turned = one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()
        return torch.cat(turned, -1).to(x.dtype)


_KERNELS: dict[str, dict[str, Any]] = {
    "flash_attn": {"__version__": "2.6.3"},
    "flash_attn.flash_attn_interface": {"flash_attn_varlen_func": _flash_attn_varlen_func},
    "flash_attn.layers.rotary": {"RotaryEmbedding": _RotaryEmbedding},
    "flash_attn.modules.mha": {},
    "flash_attn.ops.triton.layer_norm": {"layer_norm_fn": _layer_norm_fn},
    "grouped_gemm": {},
    "grouped_gemm.ops": {},
}


class _StandIn(ModuleType):
    """Replaces a missing module. Other attributes are empty classes, for imports alone."""

    def __init__(self, name: str, given: dict[str, Any]) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        vars(self).update(given)

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Buffered:
    """Sends that finish immediately, like NCCL's for small messages. nanotron's 1F1B hangs with gloo's."""

    def __init__(self) -> None:
        self._under_way: list[tuple[Any, Tensor]] = []

    def send(self, tensor: Tensor, *given: Any, **named: Any) -> None:
        self._under_way = [one for one in self._under_way if not one[0].is_completed()]
        copy = tensor.detach().clone()
        self._under_way.append((dist.isend(copy, *given, **named), copy))

    def isend(self, *given: Any, **named: Any) -> Any:
        self.send(*given, **named)
        return SimpleNamespace(wait=lambda: None)

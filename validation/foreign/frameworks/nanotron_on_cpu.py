"""Nanotron without a GPU: packages that want one are stood in for, and sends are as NCCL's are."""

import sys
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


def on_cpu() -> None:
    """Have it run here. Imports it."""
    import_module("pipeproof.foreign.frameworks.cuda_on_cpu")
    missing = {name: given for name, given in _KERNELS.items() if find_spec(name.partition(".")[0]) is None}
    sys.modules.update({name: _StandIn(name, given) for name, given in missing.items()})
    with mock.patch.object(torch.jit, "script", lambda function: function):  # it reads the source of what makes tensors
        import_module("nanotron.trainer")
    place: Any = import_module("nanotron.distributed")
    place.initialize_torch_distributed = lambda: dist.init_process_group("gloo")
    place.send, place.isend = (buffered := _Buffered()).send, buffered.isend
    import_module("nanotron.parallel.context").ParallelContext.set_device = lambda _: None
    torch.cuda.reset_peak_memory_stats = lambda *_: None


def _flash_attn_varlen_func(
    *, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, softmax_scale: float | None, causal: bool, **_: Any
) -> Tensor:
    """Attention inside each of the sequences that lie behind one another: ``q`` is [all tokens, heads, width]."""
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
    """As flash-attn's, of a query [batch, tokens, heads, width] and pairs of keys and values."""

    def __init__(self, dim: int, base: float = 10000.0, **_: Any) -> None:
        super().__init__()
        self.dim, self.base = dim, base

    def forward(self, query: Tensor, *, kv: Tensor) -> tuple[Tensor, Tensor]:
        key, value = kv.unbind(2)
        return self._turned(query), torch.stack([self._turned(key), value], 2)

    def _turned(self, x: Tensor) -> Tensor:
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
    """In place of a module that is not installed. What it was not given is an empty class, to be imported alone."""

    def __init__(self, name: str, given: dict[str, Any]) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        vars(self).update(given)

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Buffered:
    """Sends that are done at once, as NCCL's are of small messages. Nanotron's 1F1B waits for ever with gloo's."""

    def __init__(self) -> None:
        self._under_way: list[tuple[Any, Tensor]] = []

    def send(self, tensor: Tensor, *given: Any, **named: Any) -> None:
        self._under_way = [one for one in self._under_way if not one[0].is_completed()]
        copy = tensor.detach().clone()
        self._under_way.append((dist.isend(copy, *given, **named), copy))

    def isend(self, *given: Any, **named: Any) -> Any:
        self.send(*given, **named)
        return SimpleNamespace(wait=lambda: None)

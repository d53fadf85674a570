"""Nanotron on CPUs: packages that need a GPU, or that no step needs, are stood in for. Importing this does it."""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import pipeproof.cases.frameworks.cuda_on_cpu  # noqa: F401  # it does so, too


def flash_attn_varlen_func(
    *, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, softmax_scale: float | None, causal: bool, **_: Any
) -> Tensor:
    """Attention inside each of the sequences that lie behind one another: ``q`` is [all tokens, heads, width]."""
    made = []
    for low, high in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
        one = [tensor.reshape(tensor.shape[0], -1, tensor.shape[-1])[low:high].transpose(0, 1) for tensor in (q, k, v)]
        attended = functional.scaled_dot_product_attention(*one, is_causal=causal, scale=softmax_scale)
        made.append(attended.transpose(0, 1))
    return torch.cat(made)


def layer_norm_fn(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, is_rms_norm: bool, **_: Any) -> Tensor:
    if is_rms_norm:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


class RotaryEmbedding(nn.Module):
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


_CONTENTS: dict[str, dict[str, Any]] = {
    "flash_attn": {"__version__": "2.6.3"},
    "flash_attn.flash_attn_interface": {"flash_attn_varlen_func": flash_attn_varlen_func},
    "flash_attn.layers.rotary": {"RotaryEmbedding": RotaryEmbedding},
    "flash_attn.ops.triton.layer_norm": {"layer_norm_fn": layer_norm_fn},
}


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages that nanotron imports and that are not installed; what else is in them is an empty class."""

    packages = ("flash_attn", "grouped_gemm", "datasets", "transformers")

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__path__ = []
        vars(module).update(_CONTENTS.get(spec.name, {}))
        module.__getattr__ = lambda name: _no_such(name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None: ...


def _no_such(name: str) -> type:
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


if not torch.cuda.is_available():
    sys.meta_path.append(_Absent())  # behind what is installed
    with mock.patch.object(torch.jit, "script", lambda function: function):  # it reads the source of what makes tensors
        import nanotron.trainer

    nanotron.parallel.context.ParallelContext.set_device = lambda _: None
    nanotron.distributed.initialize_torch_distributed = lambda: dist.init_process_group("gloo")
    nanotron.distributed.send, nanotron.distributed.isend = (_buffered := _Buffered()).send, _buffered.isend
    torch.cuda.reset_peak_memory_stats = lambda *_: None

"""In which type a job's modules compute, where that is narrower than the type of their weights."""

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

_PRODUCTS = {"high": torch.float16, "medium": torch.bfloat16}  # torch's settings; TF32 has the digits of fp16


class ComputedIn:
    """A context manager that notes in which types ``modules`` give something out, and autocast computes in them.

    Forward hooks change no bit. In what torch compiles or scripts nothing is noted.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        every = (one for whole in modules for one in whole.modules())
        self._modules = [one for one in every if not isinstance(one, torch.jit.ScriptModule)]  # which take no hooks
        self._hooks = list[RemovableHandle]()
        self._found: set[torch.dtype] = set()

    def __enter__(self) -> Self:
        self._hooks = [one.register_forward_hook(self._note) for one in self._modules]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def narrowest(self) -> str:
        """The name of the type with the least digits; empty where nothing was seen."""
        products = _PRODUCTS.get(torch.get_float32_matmul_precision())
        found = self._found | ({products} if products is not None and self._found else set())
        least = max(found, key=lambda one: torch.finfo(one).eps, default=None)
        return "" if least is None else str(least).removeprefix("torch.")

    def _note(self, module: nn.Module, given: Any, out: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for one in tree_leaves(out):
            if isinstance(one, Tensor) and one.dtype.is_floating_point:
                self._found.add(one.dtype)
                if torch.is_autocast_enabled(one.device.type):
                    self._found.add(torch.get_autocast_dtype(one.device.type))

"""In which type a job's modules compute, where that is narrower than the type of their weights."""

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from pipeproof.core.observe.fence import Fence
from pipeproof.core.observe.hook import Hook
from pipeproof.reference.graph import types_between
from pipeproof.reference.products import MATRICES, TYPES, products_in


class ComputedIn:
    """A context manager that notes in which types ``modules`` compute, by autocast or as they cast by hand.

    That is what they give out, and what autograd notes between that and what they are given, the first time. Forward
    hooks change no bit. In what torch compiles or scripts nothing is noted.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        every = (one for whole in modules for one in whole.modules())
        self.fence = Fence()
        self._modules = [one for one in every if not isinstance(one, torch.jit.ScriptModule)]  # which take no hooks
        self._hooks = list[RemovableHandle]()
        self._found: set[torch.dtype] = set()
        self._looked: set[int] = set()  # the ids of modules
        self._places: set[torch.device] = set()  # where fp32 is computed

    def __enter__(self) -> Self:
        note = self.fence.around(self._note)
        self._hooks = [one.register_forward_hook(Hook(one, note), with_kwargs=True) for one in self._modules]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def narrowest(self) -> str:
        """The name of the type with the least digits; empty where nothing was seen, or not all."""
        if self.fence.broken:
            return ""
        found = self._found | {TYPES[products_in(place, [MATRICES])[MATRICES]] for place in self._places}
        least = max(found, key=lambda one: torch.finfo(one).eps, default=None)
        return "" if least is None else str(least).removeprefix("torch.")

    def _note(self, module: nn.Module, given: Any, named: Any, out: Any) -> None:
        made = [one for one in tree_leaves(out) if isinstance(one, Tensor) and one.dtype.is_floating_point]
        for one in made:
            self._found.add(one.dtype)
            if one.dtype is torch.float32 and not one.is_meta:
                self._places.add(one.device)
            if torch.is_autocast_enabled(one.device.type):
                self._found.add(torch.get_autocast_dtype(one.device.type))
        if made and id(module) not in self._looked:
            self._looked.add(id(module))
            came = [one for one in tree_leaves((given, named)) if isinstance(one, Tensor)]
            self._found |= {one for one in types_between(came, made) if one.is_floating_point}

"""Detect the computing type, where narrower than the weights."""

from collections.abc import Iterable
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
    """Notes the types in which ``modules`` compute, by autocast or manual casts.

    Looks at outputs, and once at autograd nodes between outputs and inputs. Forward hooks change no bit. Compiled or
    scripted code stays unobserved.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        every = (one for whole in modules for one in whole.modules())
        self.fence = Fence()
        self._modules = [
            one for one in every if not isinstance(one, torch.jit.ScriptModule)
        ]  # scripted modules take no hooks
        self._hooks = list[RemovableHandle]()
        self._found: set[torch.dtype] = set()
        self._looked: set[int] = set()  # module ids
        self._places: set[torch.device] = set()  # devices with fp32 results

    def __enter__(self) -> Self:
        note = self.fence.around(self._note)
        self._hooks = [one.register_forward_hook(Hook(one, note), with_kwargs=True) for one in self._modules]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def narrowest(self) -> str:
        """Name of the type with the fewest digits; empty if unobserved or incomplete."""
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

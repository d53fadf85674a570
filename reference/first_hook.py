"""A hook that is told of a tensor's gradient as it came, before other hooks make another of it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def hook_first(tensor: Tensor, hook: Callable[[Tensor], Any]) -> None:
    """Register ``hook`` at ``tensor``, before the hooks that it has, as those that a module put at what it gives."""
    handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # in torch
    hooks: dict[int, Any] | None = tensor._backward_hooks
    if hooks is not None and handle.id in hooks:
        own, others = hooks.pop(handle.id), {**hooks}
        hooks.clear()  # torch calls them in the order in which they were put in
        hooks.update({handle.id: own, **others})

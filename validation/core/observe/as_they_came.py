"""Gradients before module hooks change them.

A forward hook sees a module's output before torch adds the module's backward pre-hooks behind it: a hook at that output
sees a changed gradient, not the received one.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipeproof.core.observe.fence import Fence
from pipeproof.core.observe.hook import Hook

_End = tuple[int, int]  # a tensor's node number, and its output index


class AsTheyCame:
    """Captures gradients ahead of module backward pre-hooks."""

    def __init__(self) -> None:
        self._ends: set[_End] = set()
        self._came: dict[tuple[int, _End], Tensor] = {}

    def before_hooks_of(self, module: nn.Module, fence: Fence) -> list[RemovableHandle]:
        """Hook ``module`` ahead of existing backward pre-hooks."""
        if not module._backward_pre_hooks:
            return []  # such a hook would change what the module returns
        return [module.register_full_backward_pre_hook(Hook(module, fence.around(self._comes)), prepend=True)]

    def to(self, output: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function that maps a hooked gradient at ``output`` to the received one."""
        if output.grad_fn is None:
            return lambda gradient: gradient
        end = output.grad_fn._sequence_nr(), output.output_nr
        self._ends.add(end)
        return lambda gradient: self._came.pop((torch._C._current_graph_task_id(), end), gradient)

    def _comes(self, module: nn.Module, gradients: Sequence[Tensor | None]) -> None:
        behind = torch._C._current_autograd_node().next_functions
        flowing = gradients if len(gradients) == len(behind) else [one for one in gradients if one is not None]
        for (made, number), gradient in zip(behind, flowing, strict=False):
            end = (-1, 0) if made is None else (made._sequence_nr(), number)
            if gradient is not None and end in self._ends:
                at = torch._C._current_graph_task_id(), end
                own = self._came.get(at)
                self._came[at] = gradient.clone() if own is None else own + gradient

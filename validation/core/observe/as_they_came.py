"""Gradients as they came to what a module returned, before hooks on the module make others of them.

A forward hook is shown what a module returns before torch puts the module's backward pre-hooks behind that: a hook at
such a tensor is told what they made of a gradient, and not what was sent.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipeproof.core.observe.fence import Fence
from pipeproof.core.observe.hook import Hook

_End = tuple[int, int]  # of a tensor: the number of what made it, and which of its results it is


class AsTheyCame:
    """Notes the gradients that come to modules that have such hooks."""

    def __init__(self) -> None:
        self._ends: set[_End] = set()
        self._came: dict[tuple[int, _End], Tensor] = {}

    def before_hooks_of(self, module: nn.Module, fence: Fence) -> list[RemovableHandle]:
        """Be asked before the hooks that ``module`` has, if any."""
        if not module._backward_pre_hooks:
            return []  # such a hook would change what the module returns
        return [module.register_full_backward_pre_hook(Hook(module, fence.around(self._comes)), prepend=True)]

    def to(self, output: Tensor) -> Callable[[Tensor], Tensor]:
        """What tells the gradient that came by the one that a hook at ``output`` is given."""
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

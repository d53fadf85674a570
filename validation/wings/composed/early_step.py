"""An optimizer's step that was over before anybody looked at gradients: the weights are no longer the step's."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from pipeproof.observers.backward_lines import is_inside_a_backward
from pipeproof.observers.elements import version
from pipeproof.records.record import RecordError
from pipeproof.worlds.fence import Fence

_EARLY = (
    "an optimizer took its step before gradients() was called: call gradients() after the last backward, and before "
    "gradients are clipped and weights updated"
)


_INSIDE = (
    "an optimizer takes its steps inside backwards, as from a hook on each gradient, so that no stage can be run again "
    "with the weights that it had: check a step without these hooks"
)


class EarlyStep:
    """Notes the first step of an optimizer that holds any of some parameters, and their gradients as they were then."""

    def __init__(self) -> None:
        self._fence = Fence()
        self._hook: RemovableHandle | None = None
        self._then: list[tuple[Tensor, Tensor | None, int | None]] | None = None
        self._inside = False  # a backward

    def open(self, parameters: Iterable[Tensor]) -> None:
        """From now on note it."""
        own = {id(one): one for one in parameters}

        def stepped(optimizer: Optimizer, arguments: Any, named: Any) -> None:
            held = (one for group in optimizer.param_groups for one in group["params"])
            if self._then is None and any(id(one) in own for one in held):
                self._then = [(one, one.grad, _version(one.grad)) for one in own.values()]
                self._inside = is_inside_a_backward()

        self._hook = register_optimizer_step_post_hook(self._fence.around(stepped))

    def close(self) -> None:
        """From now on note nothing."""
        if self._hook is not None:
            self._hook.remove()

    def check(self) -> None:
        """Raise ``RecordError`` if it came too early, or inside a backward. Where gradients grew after it, it came in
        the midst of the step: that is a fault of the step itself."""
        if self._fence.broken:
            raise RecordError(f"the steps of optimizers were not seen: {self._fence.broken}")
        if self._inside:
            raise RecordError(_INSIDE)
        then = self._then
        if then is not None and all(
            one.grad is None or (one.grad is gradient and _version(gradient) == was) for one, gradient, was in then
        ):
            raise RecordError(_EARLY)


def _version(gradient: Tensor | None) -> int | None:
    return None if gradient is None else version(gradient)

"""The gradients that flow back through one call of a watched module, kept apart from those of its other calls."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Note = Callable[[Tensor], Callable[[], None]]  # looks at a gradient; what it returns writes down what was seen


@dataclass
class Flows:
    """The backwards through one call: those that bring a gradient to what the call made.

    A tensor that a runtime receives into may come into many calls, and a hook at it is told of the gradients of all.
    What a call itself made is no other's, so the backwards that reach that are its own.
    """

    _own: set[int] = field(default_factory=set)
    _early: list[tuple[int, Callable[[], None]]] = field(default_factory=list)

    def made(self, tensor: Tensor, note: Note) -> None:
        """``tensor`` is the call's own: note the gradients that flow to it."""

        def flowed(gradient: Tensor) -> None:
            backward = torch._C._current_graph_task_id()
            self._own.add(backward)
            note(gradient)()
            for other, write in self._early:
                if other == backward:
                    write()
            self._early = [one for one in self._early if one[0] != backward]

        tensor.register_hook(flowed)  # type: ignore[no-untyped-call]  # in torch

    def borrowed(self, tensor: Tensor, note: Note, *, handed_on: bool) -> None:
        """``tensor`` may belong to other calls as well: note what flows to it in this one's backwards.

        One that is ``handed_on`` as it is may have its gradient before anything that the call made.
        """

        def flowed(gradient: Tensor) -> None:
            backward = torch._C._current_graph_task_id()
            if backward in self._own:
                note(gradient)()
            elif handed_on:
                self._early.append((backward, note(gradient)))

        tensor.register_hook(flowed)  # type: ignore[no-untyped-call]  # in torch

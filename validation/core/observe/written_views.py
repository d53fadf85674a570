"""What a module gave, where somebody may write to it in place: of a view, that takes its node out of the graph.

So the gradient of what was written to comes by the node of what it was a view of, and no hook at the view is told.
A linear layer with a bias, given three dimensions, gives a view.
"""

import weakref

from torch import Tensor

from pipeproof.core.observe.shards import InShards

WRITES = "CopySlices"  # the type of the node that autograd puts behind what such a view was of


class WrittenView:
    """``tensor``, a view that covers all or a part of its ``base``. It keeps neither alive."""

    def __init__(self, tensor: Tensor, base: Tensor) -> None:
        self._base, self._version = weakref.ref(base), base._version
        self._form = tensor.size(), tensor.stride(), tensor.storage_offset() - base.storage_offset()

    @staticmethod
    def of(tensor: Tensor) -> "WrittenView | None":
        """None where it is no view, or one through which gradients cannot be told by those of its base."""
        base = tensor._base if tensor._is_view() and not isinstance(tensor, InShards) else None
        if base is None or base.grad_fn is None or not base.is_contiguous() or tensor.numel() > base.numel():
            return None
        return WrittenView(tensor, base)

    @property
    def was_written(self) -> bool:
        """Whether somebody has written to it, or to what it shares memory with, as far as that is still there."""
        base = self._base()
        return base is not None and base._version != self._version

    def part_of(self, gradient: Tensor) -> Tensor:
        """Of the gradient of its base, what is its own."""
        size, stride, start = self._form
        whole = gradient.contiguous()
        return whole.as_strided(size, stride, whole.storage_offset() + start)

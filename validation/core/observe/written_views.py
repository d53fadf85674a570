"""Module outputs written in place: a write into a view replaces its graph node.

Then gradients arrive through the base's node, and a hook on the view stays silent. A linear layer with bias on
three-dimensional input returns a view.
"""

import weakref

from torch import Tensor

from pipeproof.core.observe.shards import InShards

WRITES = "CopySlices"  # autograd's node type behind such a base


class WrittenView:
    """A view over all or part of its ``base``. Keeps neither alive."""

    def __init__(self, tensor: Tensor, base: Tensor) -> None:
        self._base, self._version = weakref.ref(base), base._version
        self._form = tensor.size(), tensor.stride(), tensor.storage_offset() - base.storage_offset()

    @staticmethod
    def of(tensor: Tensor) -> "WrittenView | None":
        """Return None unless gradients on the base determine those on the view."""
        base = tensor._base if tensor._is_view() and not isinstance(tensor, InShards) else None
        if base is None or base.grad_fn is None or not base.is_contiguous() or tensor.numel() > base.numel():
            return None
        return WrittenView(tensor, base)

    @property
    def was_written(self) -> bool:
        """True after a write to the view or its memory, while that exists."""
        base = self._base()
        return base is not None and base._version != self._version

    def part_of(self, gradient: Tensor) -> Tensor:
        """Select the view's part from its base's gradient."""
        size, stride, start = self._form
        whole = gradient.contiguous()
        return whole.as_strided(size, stride, whole.storage_offset() + start)

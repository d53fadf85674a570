"""What a transport holds on to: tensors from the call that gave them on, their memory, and what was in it."""

from collections.abc import Sequence

from torch import Tensor

from pipeproof.worlds.simulated.races import copies, fill, unchanged
from pipeproof.worlds.simulated.torch_inside import Memory, unwatched


class HeldTensors:
    """Tensors as they are when this is made. As a transport does, it keeps the objects, and of their memory an address.

    Memory can go while its tensor is there: another is put in its place (``tensor.data = other``), or it is resized.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.before = copies(tensors)
        self._memory = [Memory(tensor) for tensor in tensors]
        self._kept: tuple[Tensor, ...] | None = None

    def let_go(self) -> None:
        """What is in it now is what it holds: what becomes of the memory from now on is nothing to it."""
        self._kept = self.contents

    @property
    def freed(self) -> bool:
        """Whether some of the memory is no longer there, or no longer where it was."""
        return any(one.tensor is None for one in self._memory)

    @property
    def changed(self) -> bool:
        """Whether what is in it is not what was."""
        there = self._there()
        return there is not None and not unchanged(there, self.before)

    @property
    def contents(self) -> tuple[Tensor, ...]:
        """What is in it now; of memory that is gone, what was."""
        if self._kept is not None:
            return self._kept
        there = self._there()
        return tuple(self.before) if there is None else copies(there)

    def fill(self, contents: Sequence[Tensor]) -> None:
        """Write this into the memory, where it is there."""
        if (there := self._there()) is not None:
            fill(there, contents)

    @unwatched
    def _there(self) -> list[Tensor] | None:
        there = [tensor for one in self._memory if (tensor := one.tensor) is not None]
        return there if len(there) == len(self._memory) else None


NOTHING_HELD = HeldTensors(())

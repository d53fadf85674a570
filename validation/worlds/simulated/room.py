"""What a network keeps of messages that nobody has received yet."""

from collections import Counter
from collections.abc import Hashable


class Room:
    """So many bytes for each channel. A message that is larger than all of them is never kept; without any, none is."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._taken: Counter[Hashable] = Counter()

    def takes(self, channel: Hashable, size_bytes: int) -> bool:
        """Whether a message finds room; it then has it."""
        if not self._size_bytes or self._taken[channel] + size_bytes > self._size_bytes:
            return False
        self._taken[channel] += size_bytes
        return True

    def leaves(self, channel: Hashable, size_bytes: int) -> None:
        """A message that had room has been received."""
        self._taken[channel] -= size_bytes

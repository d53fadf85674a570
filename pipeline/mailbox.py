"""Receiving ahead: when to post each message, so that data can leave immediately."""

from collections import deque

from torch import Tensor

from pipeproof.pipeline.transport import Message, Transport

# How much may be posted and not taken yet. Data leave their sender only when the receive is posted, and posting costs
# a message itself, dearest while others are under way; so small messages are all posted before the first is needed
# (measured with gloo: every other rule was slower), and the bound is on bytes, for large ones.
AHEAD_BYTES = 64 * 2**20
_AHEAD_LEAST = 2  # messages, however large: one in use, one on its way


class Mailbox:
    """A rank's expected messages in one step, posted in the order of expectation.

    A transport that runs messages in posting order gets each the moment it is expected, whatever its size.
    """

    def __init__(self, transport: Transport, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._transport = transport
        self._ahead_bytes = ahead_bytes
        self._held_back: deque[tuple[Message, int]] = deque()
        self._posted: dict[Message, int] = {}  # and not taken: how many bytes
        self._posted_bytes = 0

    def clear(self) -> None:
        """Forget expectations: a step begins."""
        self._held_back.clear()
        self._posted.clear()
        self._posted_bytes = 0

    def expect(self, message: Message, nbytes: int) -> None:
        """Start receiving ``message``, now or after room appears."""
        if self._transport.in_order or (not self._held_back and self._has_room(nbytes)):
            self._post(message, nbytes)
        else:
            self._held_back.append((message, nbytes))

    def take(self, message: Message, nbytes: int) -> Tensor:
        """Wait for ``message``, expected or not."""
        if message not in self._posted:
            if (message, nbytes) in self._held_back:
                self._held_back.remove((message, nbytes))
            self._post(message, nbytes)
        buffer = self._transport.receive(message)
        self._posted_bytes -= self._posted.pop(message)
        while self._held_back and self._has_room(self._held_back[0][1]):
            self._post(*self._held_back.popleft())
        return buffer

    def _has_room(self, nbytes: int) -> bool:
        return self._posted_bytes + nbytes <= self._ahead_bytes or len(self._posted) < _AHEAD_LEAST

    def _post(self, message: Message, nbytes: int) -> None:
        self._posted[message] = nbytes
        self._posted_bytes += nbytes
        self._transport.post(message, nbytes)

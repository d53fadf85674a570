"""Messages posted by foreign code: after a hang, they show who waits for whom."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pipeproof.core.observe.elements import byte_range
from pipeproof.core.observe.fence import Fence
from pipeproof.core.observe.stack import Stack, own_stack

# ProcessGroup methods behind all messages; their second argument names the peer.
_METHODS = {"send": "a send to", "recv": "a message from", "recv_anysource": "a message from any rank"}
_WAIT = "wait"  # method on a work
_NOT_OF_THE_HOST = (
    "{error}; gloo sends what lies in the host's memory, and this lies on {place}. Ranks that share a device have no "
    "other backend: copy to the host before sending, or give each rank a device"
)
_posted: Counter[str] = Counter()  # by method


@dataclass(frozen=True)
class _Posted:
    name: str
    work: Any
    peer: int | None
    stack: Stack

    @property
    def text(self) -> str:
        return _METHODS[self.name] + ("" if self.peer is None else f" rank {self.peer}")

    @property
    def open(self) -> bool:
        # A simulated work treats ``is_completed`` as permission to read its buffer; this only looks.
        return not getattr(self.work, "is_done", self.work.is_completed)()


class Message(NamedTuple):
    """Identifies a message: its number between two ranks, in a group, under a tag. Both ends count alike."""

    group: str
    sender: int
    receiver: int
    tag: int
    number: int


class Sent(NamedTuple):
    """A send's line in user code, and whether the tensor was all zeros."""

    stack: Stack = ()
    empty: bool = False


@dataclass(frozen=True)
class Came:
    """A received message and its line in user code. ``sent`` comes from the sender's process.

    message: None if uncertain: from any rank, after such a receive in its group, or uncounted.
    """

    received: Stack
    message: Message | None = None
    sent: Sent | None = None

    def join(self, sent: Mapping[Message, Sent]) -> "Came":
        """Add the matching send from all ranks' sends."""
        return self if self.message is None else replace(self, sent=sent.get(self.message))


_messages: list[_Posted] = []  # open messages, and the latest
_standing: dict[int, Any] = {}  # by thread, the awaited work
_open: list[None] = []  # one entry per open ``note_messages``
_done: list[tuple[str, int, str]] = []  # the rank's latest action: kind, number, place
_parting: list[str] = []  # an ended part's last message
_ways: Counter[tuple[str, int, int, int]] = Counter()  # message counts by route
_from_any: set[str] = set()  # groups with receives from any rank
_sent: dict[Message, Sent] = {}
_fence = Fence()

# By storage: received byte ranges, latest last.
_received: dict[int, tuple[StorageWeakRef, list[tuple[range, Came]]]] = {}


@contextmanager
def note_messages() -> Iterator[None]:
    """Note messages between ranks inside the context.

    Patches classes rather than functions: torch compares its own functions by identity.
    """
    global _fence
    kept = {name: vars(dist.ProcessGroup)[name] for name in _METHODS}  # getattr would bind them
    wait = vars(dist.Work)[_WAIT]
    for name in kept:
        setattr(dist.ProcessGroup, name, _noting(name, getattr(dist.ProcessGroup, name)))
    setattr(dist.Work, _WAIT, _standing_in(dist.Work.wait))
    _open.append(None)
    try:
        yield
    finally:
        _open.pop()
        for name, method in kept.items():
            setattr(dist.ProcessGroup, name, method)
        setattr(dist.Work, _WAIT, wait)
        _parting[:] = [
            "\n".join([f"the last before it returned: {one.text} ({progress()})", *map(str, one.stack)])
            for one in _messages[-1:]
        ]
        for noted in (_messages, _received, _posted, _ways, _from_any, _sent, _standing, _done):
            noted.clear()
        _fence = Fence()


def progress() -> str:
    """Describe sent and received counts, and the latest action; empty if unknown.

    An unawaited send counts as sent: gloo does not report its arrival.
    """
    waiting = [*_standing.values()]
    met = _posted - Counter(
        one.name for one in list(_messages) if one.open and (one.name != "send" or one.work in waiting)
    )
    received = met["recv"] + met["recv_anysource"]
    sent = [f"sent {met['send']} and received {received}"] if _posted else []
    return ", and ".join([*sent, *(f"did {kind} {number} of {what} last" for kind, number, what in _done)])


def did(kind: str, number: int, what: str) -> None:
    """Note the rank's latest action, its ``number`` counted from 1, while messages are noted."""
    _done[:] = [(kind, number, what)] if _open else []


def parting() -> str:
    """Take an ended part's last message with its line, once."""
    return _parting.pop() if _parting else ""


def _noting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def note(group: dist.ProcessGroup, *arguments: Any) -> Any:
        empty = name == "send" and _fence.around(lambda: not any(tensor.any() for tensor in arguments[0]))()
        try:
            work = method(group, *arguments)
        except RuntimeError as error:
            if place := Fence().around(_beyond_the_host)(group, arguments[0]):
                raise RuntimeError(_NOT_OF_THE_HOST.format(error=error, place=place)) from error
            raise
        _fence.around(_note)(name, work, bool(empty), group, *arguments)
        return work

    return note


def _standing_in(wait: Callable[..., Any]) -> Callable[..., Any]:
    def waits(work: Any, *given: Any, **named: Any) -> Any:
        thread = get_ident()
        outer, _standing[thread] = _standing.get(thread), work
        try:
            return wait(work, *given, **named)
        finally:
            _standing[thread] = outer

    return waits


def _note(name: str, work: Any, empty: bool, group: dist.ProcessGroup, tensors: Sequence[Tensor], *rest: int) -> None:
    peer = dist.get_global_rank(group, rest[0]) if name != "recv_anysource" else None
    message, stack = _message(name, group, peer, *rest[1:]), own_stack()
    _messages[:] = [one for one in _messages if one.open]
    _messages.append(_Posted(name, work, peer, stack))
    _posted[name] += 1
    if name != "send":
        for tensor in filter(torch._C._has_storage, tensors):
            held, place = StorageWeakRef(tensor.untyped_storage()), byte_range(tensor)  # type: ignore[no-untyped-call]
            kept = [one for one in _parts(tensor) if not _meet(one[0], place)]
            _received[held.cdata] = held, [*kept, (place, Came(stack, message))]
    elif message is not None:
        _sent[message] = Sent(stack, empty)


def _beyond_the_host(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> str:
    """Return the first device beyond gloo's reach, or an empty text."""
    if dist.get_backend(group) != "gloo":
        return ""
    return next((str(one.device) for one in tensors if one.device.type != "cpu"), "")


def _message(name: str, group: dist.ProcessGroup, peer: int | None, tag: int = 0) -> Message | None:
    """Identify a message. None if uncountable."""
    where, own = group.group_name, dist.get_rank()
    if peer is None:
        _from_any.add(where)
    if peer is None or (where in _from_any and name == "recv"):
        return None
    way = (where, own, peer, tag) if name == "send" else (where, peer, own, tag)
    _ways[way] += 1
    return Message(*way, _ways[way])


def list_sent() -> Mapping[Message, Sent]:
    """Return this rank's sends; empty after an observer's failure."""
    return {} if _fence.broken else dict(_sent)


def find_received(tensor: Tensor) -> Came | None:
    """Return the last message received into ``tensor``. None if none, or after an observer's failure."""
    if _fence.broken or not torch._C._has_storage(tensor):
        return None
    place = byte_range(tensor)
    return next((came for part, came in reversed(_parts(tensor)) if _meet(part, place)), None)


def _parts(tensor: Tensor) -> list[tuple[range, Came]]:
    """Return messages in the tensor's storage, by byte range."""
    held, parts = _received.get(tensor.untyped_storage()._cdata, (None, []))
    gone = held is None or held.expired()  # type: ignore[no-untyped-call]  # in torch
    return [] if gone else parts


def _meet(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def find_awaited(thread: int) -> tuple[str, tuple[int, ...] | None] | None:
    """Return the message that ``thread`` waits for, and its rank. Rank None: any rank.

    None without such a wait. An unawaited message proves nothing: gloo completes no send before its wait.
    """
    work = _standing.get(thread)
    found = next((one for one in list(_messages) if one.work is work), None)
    return None if found is None else (found.text, None if found.peer is None else (found.peer,))


def is_ours(file: str) -> bool:
    """True for frames in these wrappers."""
    return file == __file__

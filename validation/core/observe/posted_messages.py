"""Messages that code which is not ours has posted, so that a hang in it can say who waits for whom."""

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

from pipeproof.core.observe.fence import Fence
from pipeproof.core.observe.stack import Stack, own_stack

# Methods of a process group, through which every message passes; the peer is the second argument.
_METHODS = {"send": "a send to", "recv": "a message from", "recv_anysource": "a message from any rank"}
_WAIT = "wait"  # of a work
_NOT_OF_THE_HOST = (
    "{error}; gloo sends what lies in the host's memory, and this lies on {place}. Ranks that share a device have no "
    "other backend: copy to the host before sending, or give each rank a device"
)
_posted: Counter[str] = Counter()  # how many messages, by method


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
        # Who asks a simulated work whether it is completed may read what it fills from then on; this only looks.
        return not getattr(self.work, "ended", self.work.is_completed)()


class Message(NamedTuple):
    """Of the messages from one rank to another in a group with a tag, which; both ends count alike."""

    group: str
    sender: int
    receiver: int
    tag: int
    number: int


class Sent(NamedTuple):
    """Where the user's code sent a message, and whether all of it was zero."""

    stack: Stack = ()
    empty: bool = False


@dataclass(frozen=True)
class Came:
    """Where the user's code received a message, and which it was; what was ``sent`` its sender's process knows.

    None where it may be from any rank, or one that came before it in its group may, or nobody noted it.
    """

    received: Stack
    message: Message | None = None
    sent: Sent | None = None

    def joined(self, sent: Mapping[Message, Sent]) -> "Came":
        """The same, with what all ranks sent."""
        return self if self.message is None else replace(self, sent=sent.get(self.message))


_messages: list[_Posted] = []  # those that are open, and the last one
_standing: dict[int, Any] = {}  # by thread, the work that it waits for
_open: list[None] = []  # one for each ``noted_messages`` that is open
_done: list[tuple[str, int, str]] = []  # what the rank did last: a kind of call, the number of that, and of what
_parting: list[str] = []  # of what has ended, its last message
_ways: Counter[tuple[str, int, int, int]] = Counter()  # how many messages went from a rank to a rank
_from_any: set[str] = set()  # groups in which messages of any rank were received
_sent: dict[Message, Sent] = {}
_fence = Fence()

# By the storage that messages were received into: which of its bytes each filled, the last one last.
_received: dict[int, tuple[StorageWeakRef, list[tuple[range, Came]]]] = {}


@contextmanager
def noted_messages() -> Iterator[None]:
    """While this is open, messages between ranks are noted as they are posted.

    Where they pass and not where they are called for: torch tells its own functions apart by identity.
    """
    global _fence
    kept = {name: vars(dist.ProcessGroup)[name] for name in _METHODS}  # getattr's would not bind when put back
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
    """How many messages this rank has sent and received, in words, and what it did last; empty if nothing is known.

    A send that it does not wait for is sent: whether it was met, gloo does not say.
    """
    waiting = [*_standing.values()]
    met = _posted - Counter(
        one.name for one in list(_messages) if one.open and (one.name != "send" or one.work in waiting)
    )
    received = met["recv"] + met["recv_anysource"]
    sent = [f"sent {met['send']} and received {received}"] if _posted else []
    return ", and ".join([*sent, *(f"did {kind} {number} of {what} last" for kind, number, what in _done)])


def did(kind: str, number: int, what: str) -> None:
    """Note what this rank has just done, while messages are noted: such a call, the ``number``-th from 1 on."""
    _done[:] = [(kind, number, what)] if _open else []


def parting() -> str:
    """The last message of what has ended on this rank, and where it was posted; told once."""
    return _parting.pop() if _parting else ""


def _noting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def noted(group: dist.ProcessGroup, *arguments: Any) -> Any:
        empty = name == "send" and _fence.around(_is_empty)(arguments[0])
        try:
            work = method(group, *arguments)
        except RuntimeError as error:
            if place := Fence().around(_beyond_the_host)(group, arguments[0]):
                raise RuntimeError(_NOT_OF_THE_HOST.format(error=error, place=place)) from error
            raise
        _fence.around(_note)(name, work, bool(empty), group, *arguments)
        return work

    return noted


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
            _receive(tensor, Came(stack, message))
    elif message is not None:
        _sent[message] = Sent(stack, empty)


def _beyond_the_host(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> str:
    """Where the first of ``tensors`` lies that gloo, if it is what carries them, does not reach; or nothing."""
    if dist.get_backend(group) != "gloo":
        return ""
    return next((str(one.device) for one in tensors if one.device.type != "cpu"), "")


def _message(name: str, group: dist.ProcessGroup, peer: int | None, tag: int = 0) -> Message | None:
    """Which message this is; None where nobody can count."""
    where, own = group.group_name, dist.get_rank()
    if peer is None:
        _from_any.add(where)
    if peer is None or (where in _from_any and name == "recv"):
        return None
    way = (where, own, peer, tag) if name == "send" else (where, peer, own, tag)
    _ways[way] += 1
    return Message(*way, _ways[way])


def _is_empty(tensors: Sequence[Tensor]) -> bool:
    """Whether there is nothing but zeros."""
    return not any(tensor.any() for tensor in tensors)


def sent_messages() -> Mapping[Message, Sent]:
    """Where in the user's code this rank has sent each of its messages, and what; none where not all were seen."""
    return {} if _fence.broken else dict(_sent)


def _receive(tensor: Tensor, came: Came) -> None:
    held = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # in torch
    place = _bytes(tensor)
    _received[held.cdata] = held, [*(one for one in _parts(tensor) if not _meet(one[0], place)), (place, came)]


def received_at(tensor: Tensor) -> Came | None:
    """The message that was last received into ``tensor``; None where none was, or not all were seen."""
    if _fence.broken or not torch._C._has_storage(tensor):
        return None
    place = _bytes(tensor)
    return next((came for part, came in reversed(_parts(tensor)) if _meet(part, place)), None)


def _parts(tensor: Tensor) -> list[tuple[range, Came]]:
    """What was received into the storage of ``tensor``, part by part."""
    held, parts = _received.get(tensor.untyped_storage()._cdata, (None, []))
    gone = held is None or held.expired()  # type: ignore[no-untyped-call]  # in torch
    return [] if gone else parts


def _bytes(tensor: Tensor) -> range:
    """Of its storage, from the first to the last that is the tensor's."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    first = tensor.storage_offset() * tensor.element_size()
    return range(first, first + count * tensor.element_size())


def _meet(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def awaited(thread: int) -> tuple[str, tuple[int, ...] | None] | None:
    """The message that this thread stands and waits for, and from which rank it is; None where it may be from any.

    None where it waits for no message. What is posted and not waited for now says nothing: gloo completes no send
    before somebody waits for it.
    """
    work = _standing.get(thread)
    found = next((one for one in list(_messages) if one.work is work), None)
    return None if found is None else (found.text, None if found.peer is None else (found.peer,))


def is_ours(file: str) -> bool:
    """Whether a frame there is one of these wrappers."""
    return file == __file__

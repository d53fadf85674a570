"""Messages that code which is not ours has posted, so that a hang in it can say who waits for whom."""

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pipeproof.worlds.stack import Stack, own_stack

# Methods of a process group, through which every message passes; the peer is the second argument.
_METHODS = {"send": "a send to", "recv": "a message from", "recv_anysource": "a message from any rank"}
_SHOWN = 4  # messages in a sentence
_posted: Counter[str] = Counter()  # how many messages, by method


@dataclass(frozen=True)
class _Posted:
    name: str
    work: Any
    peer: int | None

    @property
    def text(self) -> str:
        return _METHODS[self.name] + ("" if self.peer is None else f" rank {self.peer}")

    @property
    def open(self) -> bool:
        return not self.work.is_completed()


_messages: list[_Posted] = []

# By the storage that messages were received into: which of its bytes each filled, the last one last.
_received: dict[int, tuple[StorageWeakRef, list[tuple[range, Stack]]]] = {}


@contextmanager
def noted_messages() -> Iterator[None]:
    """While this is open, messages between ranks are noted as they are posted.

    Where they pass and not where they are called for: torch tells its own functions apart by identity.
    """
    kept = {name: vars(dist.ProcessGroup)[name] for name in _METHODS}  # getattr's would not bind when put back
    for name in kept:
        setattr(dist.ProcessGroup, name, _noting(name, getattr(dist.ProcessGroup, name)))
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(dist.ProcessGroup, name, method)
        _messages.clear()
        _received.clear()
        _posted.clear()


def progress() -> str:
    """How many messages this rank has sent and received, in words; empty if it has posted none."""
    met = _posted - Counter(one.name for one in list(_messages) if one.open)
    received = met["recv"] + met["recv_anysource"]
    return f"sent {met['send']} and received {received}" if _posted else ""


def _noting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def noted(group: dist.ProcessGroup, *arguments: Any) -> Any:
        work = method(group, *arguments)
        peer = dist.get_global_rank(group, arguments[1]) if name != "recv_anysource" else None
        _messages[:] = [one for one in _messages if one.open]
        _messages.append(_Posted(name, work, peer))
        _posted[name] += 1
        if name != "send":
            stack = own_stack()
            for tensor in filter(torch._C._has_storage, arguments[0]):
                _receive(tensor, stack)
        return work

    return noted


def _receive(tensor: Tensor, stack: Stack) -> None:
    held = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # in torch
    place = _bytes(tensor)
    _received[held.cdata] = held, [*(one for one in _parts(tensor) if not _meet(one[0], place)), (place, stack)]


def received_at(tensor: Tensor) -> Stack:
    """Where in the user's code a message was last received into ``tensor``; empty where none was."""
    if not torch._C._has_storage(tensor):
        return ()
    place = _bytes(tensor)
    return next((stack for part, stack in reversed(_parts(tensor)) if _meet(part, place)), ())


def _parts(tensor: Tensor) -> list[tuple[range, Stack]]:
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


def awaited(frames: Sequence[traceback.FrameSummary]) -> tuple[str, tuple[int, ...] | None] | None:
    """What a rank with this stack waits for, if it stands at a wait: the messages that it has posted and not met.

    And from which ranks these are; None where one may be from any.
    """
    found = [one for one in list(_messages) if one.open]
    if not (found and frames and "wait" in (frames[-1].line or "")):
        return None
    texts = list(dict.fromkeys(one.text for one in found))
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    known = [one.peer for one in found if one.peer is not None]
    peers = tuple(sorted(set(known))) if len(known) == len(found) else None
    return " or ".join(texts[:_SHOWN]) + more, peers

"""Messages that code which is not ours has posted, so that a hang in it can say who waits for whom."""

import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from pipeline.waiting import waiting

# Functions of torch.distributed about one message: what it does, and where its peer stands among the arguments.
_FUNCTIONS = {
    "isend": ("send to", "dst"),
    "irecv": ("message from", "src"),
    "send": ("send to", "dst"),
    "recv": ("message from", "src"),
}
_SHOWN = 4  # messages in a sentence


@dataclass(frozen=True)
class _Posted:
    text: str
    work: Any

    @property
    def open(self) -> bool:
        return not self.work.is_completed()


_messages: list[_Posted] = []


class _Noted:
    """A function of torch.distributed that notes what it posts; equal to it, as torch compares such functions."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, tensor: Any, peer: Any = None, *more: Any, **named: Any) -> Any:
        what, key = _FUNCTIONS[self._function.__name__]
        known = peer if peer is not None else named.get(key, named.get(f"group_{key}"))
        text = f"a {what} rank {known}" if known is not None else f"a {what.split()[0]}, any peer"
        with waiting(text):
            work = self._function(tensor, *(() if peer is None and not more else (peer,)), *more, **named)
        if hasattr(work, "is_completed"):
            _messages[:] = [one for one in _messages if one.open]
            _messages.append(_Posted(text, work))
        return work

    def __eq__(self, other: object) -> bool:
        return other is self or other == self._function

    def __hash__(self) -> int:
        return hash(self._function)


@contextmanager
def noted_messages() -> Iterator[None]:
    """While this is open, messages posted through ``torch.distributed`` are noted."""
    kept = {name: getattr(dist, name) for name in _FUNCTIONS}
    for name, function in kept.items():
        for module in (dist, c10d):
            setattr(module, name, _Noted(function))
    try:
        yield
    finally:
        for name, function in kept.items():
            for module in (dist, c10d):
                setattr(module, name, function)
        _messages.clear()


def awaited(frames: Sequence[traceback.FrameSummary]) -> str | None:
    """What a rank with this stack waits for: the messages that it has posted and not met, if it stands at a wait."""
    if not frames or "wait" not in (frames[-1].line or ""):
        return None
    texts = list(dict.fromkeys(one.text for one in list(_messages) if one.open))
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return " or ".join(texts[:_SHOWN]) + more or None

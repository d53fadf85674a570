"""Find the user's line that called the current backward."""

import sys
import threading
from types import FrameType

import torch

from pipeproof.core.observe.stack import Stack, own_stack, stack_of
from pipeproof.reference.graph import is_inside_a_backward

_ENGINE = "_engine_run_backward"  # torch's only Python entry into a backward


def backward_stack() -> Stack:
    """Return the user's lines that started this backward; empty if unknown.

    A device's backward runs in torch's own thread while the calling thread waits. With several waiting threads, the
    caller remains unknown.
    """
    here = own_stack()
    if here or not is_inside_a_backward():
        return here
    waiting = [frame for thread, frame in sys._current_frames().items() if thread != threading.get_ident()]
    callers = [frame for frame in waiting if _waits(frame)]
    return stack_of(callers[0]) if len(callers) == 1 else ()


def _waits(frame: FrameType) -> bool:
    """True if the frame waits for a backward, in torch's call or a replaced engine's."""
    return frame.f_code.co_name == _ENGINE or isinstance(frame.f_locals.get("self"), torch._C._ImperativeEngine)

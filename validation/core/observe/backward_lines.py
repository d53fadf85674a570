"""Where in the user's own code the backward was called that runs now."""

import sys
import threading
from types import FrameType

import torch

from pipeproof.core.observe.stack import Stack, own_stack, stack_of

_ENGINE = "_engine_run_backward"  # all that torch has in Python to start a backward


def backward_stack() -> Stack:
    """The lines through which it came; empty where they cannot be told.

    A device's part of a backward runs in a thread of torch's own, and the one that called for it waits. Where several
    wait, it may be any of them.
    """
    here = own_stack()
    if here or not is_inside_a_backward():
        return here
    waiting = [frame for thread, frame in sys._current_frames().items() if thread != threading.get_ident()]
    callers = [frame for frame in waiting if _waits(frame)]
    return stack_of(callers[0]) if len(callers) == 1 else ()


def is_inside_a_backward() -> bool:
    """Whether a backward runs in this thread."""
    return torch._C._current_graph_task_id() != -1


def _waits(frame: FrameType) -> bool:
    """Whether a thread there waits for a backward: in torch's call, or in that of who took its engine's place."""
    return frame.f_code.co_name == _ENGINE or isinstance(frame.f_locals.get("self"), torch._C._ImperativeEngine)

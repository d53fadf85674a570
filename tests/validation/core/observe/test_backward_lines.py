"""A backward's lines are those that called for it, in whatever thread it runs."""

import sys
from threading import Event, Thread
from types import FrameType

import pytest
import torch

from pipeproof.core.observe import backward_lines
from pipeproof.core.observe.backward_lines import backward_stack
from pipeproof.core.observe.stack import Stack


def in_backward() -> Stack:
    """What a hook finds."""
    found: list[Stack] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: found.append(backward_stack()))
    y.backward()
    return found[0]


def test_in_the_same_thread_it_is_its_own_stack() -> None:
    assert in_backward()[1].function == "in_backward"


def waiting() -> FrameType:
    """The frame of a thread that waits in torch's engine, or what looks like it."""
    started, frames = Event(), list[FrameType]()

    def _engine_run_backward() -> None:
        frames.append(sys._getframe())
        started.set()

    def calls_it() -> None:
        _engine_run_backward()

    thread = Thread(target=calls_it)
    thread.start()
    started.wait()
    thread.join()
    return frames[0]


@pytest.mark.parametrize(("callers", "task", "found"), [(1, 7, True), (2, 7, False), (1, -1, False), (0, 7, False)])
def test_in_a_thread_of_torchs_own_it_is_that_of_the_one_that_waits(
    callers: int, task: int, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = {-1 - number: waiting() for number in range(callers)}
    monkeypatch.setattr(backward_lines, "own_stack", tuple)
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: task)
    monkeypatch.setattr(sys, "_current_frames", lambda: frames)
    stack = backward_stack()
    assert bool(stack) is found
    if found:
        assert any(line.function == "calls_it" for line in stack)

"""Fences around observers: an observer's error gets noted, and the step goes on undisturbed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

P = ParamSpec("P")
T = TypeVar("T")

_INSIDE_FUNC = "it runs inside torch.func, whose tensors have no storage"


class Fence:
    """Guards one observer. ``broken``: its first error; empty while intact.

    A broken observer stops, and its data do not count: half would be judged as all. compiled: torch.compile captured
    it, so it saw nothing there. in_func: it may also look inside torch.func.
    """

    def __init__(self, *, in_func: bool = True) -> None:
        self.broken = ""
        self._in_func = in_func
        self.compiled = False

    def around(self, look: Callable[P, T]) -> Callable[P, T | None]:
        """Wrap ``look``: it never raises, and returns None after an error."""

        @wraps(look)
        def fence(*given: P.args, **named: P.kwargs) -> T | None:
            if torch.compiler.is_compiling():
                self.compiled = True
                return None
            if not self._in_func and not self.broken and _inside_func():
                self.broken = _INSIDE_FUNC
            if self.broken:
                return None
            try:
                if not _inside_func() and not torch._C._len_torch_dispatch_stack():
                    return look(*given, **named)
                with _outside():
                    return look(*given, **named)
            except Exception as error:  # any type: tensors may be of any kind
                self.broken = _INSIDE_FUNC if _inside_func() else f"looking at it raised {_describe(error)}"
                return None

        return fence


class Observer(Protocol):
    """An observer with a fence."""

    @property
    def fence(self) -> Fence: ...


Looking = TypeVar("Looking", bound=Observer)


def looking(look: Callable[Concatenate[Looking, P], T]) -> Callable[Concatenate[Looking, P], T | None]:
    """Wrap an observer's method in its fence."""

    @wraps(look)
    def fence(observer: Looking, /, *given: P.args, **named: P.kwargs) -> T | None:
        return observer.fence.around(look)(observer, *given, **named)

    return fence


def _inside_func() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def _outside() -> Iterator[None]:
    """Suspend the user's modes and transformations inside the context.

    Otherwise they would keep or count the observer's operations, and tables cached here would become their tensors.
    """
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]

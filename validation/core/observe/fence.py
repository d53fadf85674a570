"""A fence around what observes a step: what goes wrong there is noted, and the step goes on as it would without it."""

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
    """Around one observer. ``broken``: why it has not seen everything; empty as long as it has.

    A broken observer looks at nothing more, and what it saw does not count: half of it would be judged as all of it.
    ``compiled``: torch.compile took it in once; what runs there cannot be observed. ``in_func``: what it looks at is
    there inside torch.func, too.
    """

    def __init__(self, *, in_func: bool = True) -> None:
        self.broken = ""
        self._in_func = in_func
        self.compiled = False
        self._users: Exception | None = None  # what a function of the user's raised

    def around(self, look: Callable[P, T]) -> Callable[P, T | None]:
        """``look``, which raises nothing: where it fails, and from then on, it gives None."""

        @wraps(look)
        def fenced(*given: P.args, **named: P.kwargs) -> T | None:
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
            except Exception as error:  # no one type: tensors may be of any kind
                if error is self._users:
                    raise
                self.broken = _INSIDE_FUNC if _inside_func() else f"looking at it raised {_told(error)}"
                return None

        return fenced

    def of_user(self, function: Callable[P, T]) -> Callable[P, T]:
        """A ``function`` of the user's own, which an observer calls: what it raises is raised."""

        @wraps(function)
        def called(*given: P.args, **named: P.kwargs) -> T:
            try:
                return function(*given, **named)
            except Exception as error:
                self._users = error
                raise

        return called


class Observer(Protocol):
    """What has a fence around it."""

    @property
    def fence(self) -> Fence: ...


Looking = TypeVar("Looking", bound=Observer)


def looking(look: Callable[Concatenate[Looking, P], T]) -> Callable[Concatenate[Looking, P], T | None]:
    """``look``, a method of an observer, within its fence."""

    @wraps(look)
    def fenced(observer: Looking, /, *given: P.args, **named: P.kwargs) -> T | None:
        return observer.fence.around(look)(observer, *given, **named)

    return fenced


def _inside_func() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def _outside() -> Iterator[None]:
    """While this is open, no transformation and no mode of the user's takes part in what is computed.

    One that keeps or counts operations would have the observer's, too; and what the observer keeps for later, such as
    tables, would be tensors of that transformation.
    """
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]

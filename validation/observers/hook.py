"""A hook on a module that its copies do not have."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

_unheard = set[int]()  # the ids of modules


@contextmanager
def unheard(modules: Iterable[nn.Module]) -> Iterator[None]:
    """While this is open, ``modules`` are run again: their calls are none of a step that anybody watches."""
    own = {id(part) for module in modules for part in module.modules()} - _unheard
    _unheard.update(own)
    try:
        yield
    finally:
        _unheard.difference_update(own)


class Hook:
    """Calls ``calls`` for the module that it is ``of``. A copy, as from a file, has in its place what does nothing.

    Some copies have the very hooks. A file with a module in it can be read where there is no pipeproof.
    """

    def __init__(self, of: nn.Module, calls: Callable[..., Any]) -> None:
        self._of, self._calls = of, calls

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        heard = module is self._of and id(module) not in _unheard
        return self._calls(module, *given) if heard else None

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # which takes anything

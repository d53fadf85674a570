"""A hook on a module that its copies do not have."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn

from pipeproof.reference.again import is_run_again


class Hook:
    """Calls ``calls`` for the module that it is ``of``, but where a check runs that again.

    A copy, as from a file, has in its place what does nothing. Some copies have the very hooks. A file with a module in
    it can be read where there is no pipeproof.
    """

    def __init__(self, of: nn.Module, calls: Callable[..., Any]) -> None:
        self._of, self._calls = of, calls

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        heard = module is self._of and not is_run_again(module)
        return self._calls(module, *given) if heard else None

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # which takes anything

"""Module hooks for originals, never for copies."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn

from pipeproof.reference.again import is_run_again


class Hook:
    """Runs ``calls`` for its own module, except in a check's repeated runs.

    A pickled copy gets a no-op instead. Some copies keep the same hook. A pickled module loads without pipeproof.
    """

    def __init__(self, of: nn.Module, calls: Callable[..., Any]) -> None:
        self._of, self._calls = of, calls

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        heard = module is self._of and not is_run_again(module)
        return self._calls(module, *given) if heard else None

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # which takes anything

"""Module hooks for originals, never for copies."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from pipeproof.reference.again import is_run_again


class Hook:
    """Runs ``calls`` for its own module while ``when`` holds, except in a check's repeated runs.

    A pickled copy gets a no-op instead. Some copies keep the same hook. A pickled module loads without pipeproof.
    """

    def __init__(self, of: nn.Module, calls: Callable[..., Any], when: Callable[[], bool] | None = None) -> None:
        self._of, self._calls, self._when = of, calls, when

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        heard = module is self._of and not is_run_again(module)
        # ``when`` is the user's: its errors are no observer's, and torch.compile is not to capture it.
        if heard and self._when is not None and not torch.compiler.is_compiling():
            heard = self._when()
        return self._calls(module, *given) if heard else None

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # which takes anything

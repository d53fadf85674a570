"""Observe router choices on a rank: which experts tokens use."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeproof.core.observe.fence import Fence
from pipeproof.reference.choices import Pick, Routers, running
from pipeproof.reference.graph import is_inside_a_backward


@dataclass(frozen=True)
class Route:
    """A router choice: experts ``chosen_TK`` per token, from scores in ``dtype``."""

    chosen_TK: Tensor
    dtype: torch.dtype


Routes = Mapping[str, Sequence[Route]]  # by router name, in order of choice


class RouteObserver(TorchFunctionMode):
    """Notes router choices in any running module, for routers called ``names``.

    Recomputation repeats earlier choices and is ignored. The mode sits above autograd and changes no operation; code
    under ``torch.compile`` stays unseen. model: its module names may also identify routers.
    """

    def __init__(self, names: Sequence[str], model: Any) -> None:
        super().__init__()
        self.fence = Fence()
        self._look = self.fence.around(self._note)
        self._routers = Routers(tuple(names))
        self._known = self._routers.among(model) if isinstance(model, nn.Module) else {}
        self._observed: list[tuple[tuple[nn.Module, ...], Route]] = []

    @contextmanager
    def open(self) -> Iterator["RouteObserver"]:
        """Enter the mode, if routers are named."""
        with self if self._routers.names else nullcontext():
            yield self

    def anew(self) -> None:
        """Start another operation."""
        self._observed.clear()

    def of(self, module: nn.Module) -> Routes:
        """Return choices in ``module``. Without named routers inside, it may be the router itself."""
        if self.fence.broken:
            return {}
        own = {part: name for name, part in module.named_modules()}
        named = {part: name for part, name in own.items() if self._routers.has(name) or part in self._known}
        found: dict[str, list[Route]] = {}
        for modules, route in self._observed:
            router = next((part for part in modules if part in (named or own)), None)
            if router is not None:
                found.setdefault(own[router], []).append(route)
        return {name: tuple(every) for name, every in found.items()}

    def __torch_function__(self, func: Any, types: Any, *given: Any) -> Any:
        args, kwargs = (*given, {})[:2]  # absent for positional calls
        made = func(*args, **(kwargs or {}))
        self._look(func, made, args, kwargs or {})
        return made

    def _note(self, func: Any, made: Any, args: Any, kwargs: Any) -> None:
        call = Pick.of(func, made, args, kwargs)
        if call is not None and not is_inside_a_backward():
            observed = call.choice
            self._observed.append(
                (tuple(running()), Route(observed.own_TK.to("cpu", copy=True), observed.scores_TE.dtype))
            )

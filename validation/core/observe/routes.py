"""What routers chose while a step ran on a rank: to which experts tokens went."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeproof.core.observe.fence import Fence
from pipeproof.reference.choices import Pick, Routers, in_backward, running


@dataclass(frozen=True)
class Route:
    """One choice of a router: the experts ``chosen_TK`` of every token, by scores of this ``dtype``."""

    chosen_TK: Tensor
    dtype: torch.dtype


Routes = Mapping[str, Sequence[Route]]  # by the name of the router, in the order in which it chose


class RouteObserver(TorchFunctionMode):
    """While it is open, notes what is chosen in any module that runs, where routers have ``names``.

    What is computed again in a backward was chosen before. It stands above autograd, and no operation is another by it;
    where ``torch.compile`` traces there is nothing to see. ``model``: names of routers may be those in it, too.
    """

    def __init__(self, names: Sequence[str], model: Any) -> None:
        super().__init__()
        self.fence = Fence()
        self._look = self.fence.around(self._note)
        self._routers = Routers(tuple(names))
        self._known = self._routers.among(model) if isinstance(model, nn.Module) else {}
        self._seen: list[tuple[tuple[nn.Module, ...], Route]] = []

    @contextmanager
    def opened(self) -> Iterator["RouteObserver"]:
        """It, open; where no routers are named nobody looks."""
        with self if self._routers.names else nullcontext():
            yield self

    def anew(self) -> None:
        """Another operation begins."""
        self._seen.clear()

    def of(self, module: nn.Module) -> Routes:
        """What the routers of ``module`` chose. One that has none by these names may itself be the router."""
        if self.fence.broken:
            return {}
        own = {part: name for name, part in module.named_modules()}
        named = {part: name for part, name in own.items() if self._routers.has(name) or part in self._known}
        found: dict[str, list[Route]] = {}
        for modules, route in self._seen:
            router = next((part for part in modules if part in (named or own)), None)
            if router is not None:
                found.setdefault(own[router], []).append(route)
        return {name: tuple(every) for name, every in found.items()}

    def __torch_function__(self, func: Any, types: Any, *given: Any) -> Any:
        args, kwargs = (*given, {})[:2]  # by name there may be none
        made = func(*args, **(kwargs or {}))
        self._look(func, made, args, kwargs or {})
        return made

    def _note(self, func: Any, made: Any, args: Any, kwargs: Any) -> None:
        call = Pick.of(func, made, args, kwargs)
        if call is not None and not in_backward():
            seen = call.choice
            self._seen.append((tuple(running()), Route(seen.own_TK.to("cpu", copy=True), seen.scores_TE.dtype)))

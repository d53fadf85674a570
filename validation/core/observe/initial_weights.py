"""Starting weights and gradients, captured at each parameter's first use."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from pipeproof.core.observe.digest import digest
from pipeproof.core.observe.fence import Fence
from pipeproof.core.observe.per_rank_globals import belongs_to_rank
from pipeproof.core.observe.shards import InShards, is_plain

SumOf = Callable[[nn.Parameter], object]


def _grad(parameter: nn.Parameter) -> Tensor | None:
    return parameter.grad


@dataclass(frozen=True)
class WeightContent:
    """A parameter's digest, with its value if unknown."""

    digest: bytes
    value: Tensor | None


class FirstUse:
    """Captures each parameter, and its gradient so far, before its module's first call.

    A plain forward hook touches no graph, so it disturbs nothing; known contents are not even copied. goes_on: an
    optimizer already has state from before the judged step. Separate fences guard ``weights``, gradient ``sums``, and
    optimizer ``steps``.
    """

    def __init__(self, known: Collection[bytes]) -> None:
        self.weights, self.sums, self.steps = Fence(), Fence(), Fence()
        self._known = frozenset(known)
        self.goes_on = False
        self._stepped: dict[int, Optimizer] = {}
        self._observed: dict[
            int, tuple[nn.Parameter, WeightContent]
        ] = {}  # keeps the parameter, so that its id stays valid
        self._at: dict[tuple[int, str], tuple[nn.Module, WeightContent]] = {}  # by module and name
        self._parts: dict[int, tuple[nn.Parameter, Tensor]] = {}  # this rank's parts before the step, for DTensors
        self._sum_of: SumOf = _grad
        self._handed: Mapping[int, object] | None = None  # gradients outside ``.grad``
        self._own: Mapping[tuple[int, str], nn.Parameter] = {}  # parameters in the modules with these gradients
        self._begun: dict[int, Tensor] = {}  # nonzero gradients, by parameter id

    def __enter__(self) -> Self:
        global _first_use
        self._outer, _first_use = _first_use, self
        self._hooks = (
            register_module_forward_pre_hook(self.weights.around(partial(self._look, False))),
            register_module_forward_hook(self.weights.around(partial(self._look, True))),
            register_optimizer_step_post_hook(self.steps.around(self._step)),
        )
        return self

    def __exit__(self, *error: object) -> None:
        global _first_use
        _first_use = self._outer
        for hook in self._hooks:
            hook.remove()

    def anew(self, sum_of: SumOf) -> None:
        """Start over: the judged step begins now. Its gradients go to ``sum_of``."""
        self._sum_of = sum_of
        stepped = self.steps.around(lambda: any(any(map(bool, one.state.values())) for one in self._stepped.values()))
        self.goes_on = bool(stepped())
        self._forget()

    def next_operation(self) -> None:
        """Start another operation with unknown contents."""
        self._known = frozenset()
        self._forget()

    def adds_to(self, sums: Mapping[int, object], modules: Collection[nn.Module]) -> None:
        """Read gradients from ``sums``, by parameter id, instead of ``.grad``, unless set otherwise.

        modules: owners, which ``functional_call`` runs with other parameters.
        """
        self._handed = sums if self._sum_of is _grad else None
        parts = {part for module in modules for part in module.modules()}
        self._own = {(id(part), n): one for part in parts for n, one in part._parameters.items() if one is not None}

    def _forget(self) -> None:
        for observed in (self._observed, self._at, self._parts, self._begun):
            observed.clear()

    def of(self, parameter: nn.Parameter, holder: nn.Module, leaf: str) -> WeightContent | None:
        """Return the content at first use, or the tensor that ``holder`` used instead.

        An unused parameter is read now, and trusted only if its content is known; likewise all, after an observer's
        failure.
        """
        place = id(holder), leaf
        if not self.weights.broken and id(parameter) in self._observed and not isinstance(parameter, InShards):
            return self._observed[id(parameter)][1]
        if not self.weights.broken and place in self._at:
            return self._at[place][1]
        now = None if isinstance(parameter, InShards) else Fence().around(self._note)(parameter)
        return now if now is not None and now.value is None else None

    def part_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return this rank's shard at first use, or None."""
        return self._parts[id(parameter)][1] if id(parameter) in self._parts else None

    def initial_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a nonzero, whole gradient at first use, or None."""
        return self._begun.get(id(parameter))

    def inside(self, module: nn.Module) -> bool:
        """True if a submodule with parameters ran."""
        return any(id(part) == at for part in module.modules() if part is not module for at, _ in self._at)

    def _look(self, late: bool, module: nn.Module, *_: Any) -> None:
        """Capture parameters before a call; after it, if its own hooks may still write them."""
        for leaf, parameter in module._parameters.items():
            if parameter is None or parameter.is_meta:
                continue
            if isinstance(parameter, InShards):
                if not late and id(parameter) not in self._parts:
                    self._parts[id(parameter)] = parameter, parameter.to_local().detach().to("cpu", copy=True)
                continue
            if late is not bool(module._forward_pre_hooks):
                continue
            place = id(module), leaf
            passing = not isinstance(parameter, nn.Parameter)  # from functional_call, a new one each time
            if id(parameter) not in self._observed and not (passing and place in self._at):
                self._observed[id(parameter)] = parameter, self._note(parameter)
                self.sums.around(self._look_at_sum)(self._own.get(place, parameter))
            if id(parameter) in self._observed:
                self._at.setdefault(place, (module, self._observed[id(parameter)][1]))

    def _look_at_sum(self, parameter: nn.Parameter) -> None:
        there = self._sum_of(parameter) if self._handed is None else self._handed.get(id(parameter))
        if isinstance(there, Tensor) and is_plain(there) and there.any():
            self._begun[id(parameter)] = there.detach().to("cpu", copy=True)

    def _step(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        self._stepped[id(optimizer)] = optimizer

    def _note(self, parameter: nn.Parameter) -> WeightContent:
        content = digest(parameter)
        return WeightContent(content, None if content in self._known else parameter.detach().to("cpu", copy=True))


_first_use: FirstUse | None = None
belongs_to_rank(__name__, "_first_use", fresh=lambda _: None)


def step_begins(sum_of: SumOf = _grad) -> None:
    """Mark the judged step's start, after any earlier training. No effect outside a validation.

    sum_of: returns the tensor that collects a parameter's gradient.
    """
    if _first_use is not None:
        _first_use.anew(sum_of)

"""What a step starts from: weights and gradients, as the first call of a module that holds them sees them."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from pipeproof.core.observe.belongings import belongs_to_rank
from pipeproof.core.observe.digest import digest
from pipeproof.core.observe.fence import Fence
from pipeproof.core.observe.shards import InShards, is_plain

SumOf = Callable[[nn.Parameter], object]


def _grad(parameter: nn.Parameter) -> Tensor | None:
    return parameter.grad


@dataclass(frozen=True)
class WeightContent:
    """A parameter's content: its digest, and its value where that is not the content of any known one."""

    digest: bytes
    value: Tensor | None


class FirstUse:
    """While it is open, looks at every parameter, and its gradient so far, when a module that holds it is first called.

    A plain hook around forwards touches no graph, so nothing is disturbed; known contents are not even copied.
    ``goes_on``: an optimizer had kept something of a step before the one that is judged. A fence each is around what
    looks at ``weights``, at ``sums`` of gradients so far, and at ``steps`` of optimizers.
    """

    def __init__(self, known: Collection[bytes]) -> None:
        self.weights, self.sums, self.steps = Fence(), Fence(), Fence()
        self._known = frozenset(known)
        self.goes_on = False
        self._stepped: dict[int, Optimizer] = {}
        self._seen: dict[int, tuple[nn.Parameter, WeightContent]] = {}  # with the parameter, to keep its id
        self._at: dict[tuple[int, str], tuple[nn.Module, WeightContent]] = {}  # by module and name
        self._parts: dict[int, tuple[nn.Parameter, Tensor]] = {}  # of DTensors, what this rank had
        self._sum_of: SumOf = _grad
        self._handed: Mapping[int, object] | None = None  # gradients that are not in ``.grad``
        self._own: Mapping[tuple[int, str], nn.Parameter] = {}  # of the modules whose gradients these are
        self._begun: dict[int, Tensor] = {}  # gradients that were not zero, by the id of their parameter

    def __enter__(self) -> Self:
        global _first_use
        self._outer, _first_use = _first_use, self
        self._hook = register_module_forward_pre_hook(self.weights.around(self._enter))
        self._late_hook = register_module_forward_hook(self.weights.around(self._leave))
        self._step_hook = register_optimizer_step_post_hook(self.steps.around(self._step))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _first_use
        _first_use = self._outer
        self._hook.remove()
        self._late_hook.remove()
        self._step_hook.remove()

    def anew(self, sum_of: SumOf) -> None:
        """The step that is judged begins now: what was used before it was of another one. It adds to ``sum_of``."""
        self._sum_of = sum_of
        self.goes_on = bool(self.steps.around(self._has_stepped)())
        self._forget()

    def _has_stepped(self) -> bool:
        return any(any(map(bool, one.state.values())) for one in self._stepped.values())

    def next_operation(self) -> None:
        """Another operation begins, with what those before it left: none of that is known."""
        self._known = frozenset()
        self._forget()

    def adds_to(self, sums: Mapping[int, object], modules: Collection[nn.Module]) -> None:
        """What comes adds to these, by the ids of parameters, in place of ``.grad``, if nobody said to what else.

        ``modules`` have these parameters: ``functional_call`` calls them with others.
        """
        self._handed = sums if self._sum_of is _grad else None
        parts = {part for module in modules for part in module.modules()}
        self._own = {(id(part), n): one for part in parts for n, one in part._parameters.items() if one is not None}

    def _forget(self) -> None:
        for seen in (self._seen, self._at, self._parts, self._begun):
            seen.clear()

    def of(self, parameter: nn.Parameter, holder: nn.Module, leaf: str) -> WeightContent | None:
        """What ``parameter`` was when it was first used, or what ``holder`` had in its place when it was called.

        One that no module was called with is looked at now, and only taken for unchanged where its content is known. So
        is every one where not all were seen.
        """
        place = id(holder), leaf
        if not self.weights.broken and id(parameter) in self._seen and not isinstance(parameter, InShards):
            return self._seen[id(parameter)][1]
        if not self.weights.broken and place in self._at:
            return self._at[place][1]
        now = None if isinstance(parameter, InShards) else Fence().around(self._note)(parameter)
        return now if now is not None and now.value is None else None

    def part_of(self, parameter: nn.Parameter) -> Tensor | None:
        """What this rank had of one in shards when it was first used so; None where nobody saw that."""
        return self._parts[id(parameter)][1] if id(parameter) in self._parts else None

    def begun(self, parameter: nn.Parameter) -> Tensor | None:
        """What its gradient is added to, as ``parameter`` was first used, if that was whole and not zero."""
        return self._begun.get(id(parameter))

    def inside(self, module: nn.Module) -> bool:
        """Whether a part of ``module`` was called that holds parameters."""
        return any(id(part) == at for part in module.modules() if part is not module for at, _ in self._at)

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        """Look at what ``module`` is called with; where it has hooks of its own, these may write its weights first."""
        for leaf, parameter in module._parameters.items():
            if parameter is None or parameter.is_meta:
                continue
            if isinstance(parameter, InShards):
                if id(parameter) not in self._parts:
                    self._parts[id(parameter)] = parameter, parameter.to_local().detach().to("cpu", copy=True)
            elif not module._forward_pre_hooks:
                self._look(module, leaf, parameter)

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Look at what ``module`` was called with, where that was not known before."""
        for leaf, parameter in module._parameters.items() if module._forward_pre_hooks else ():
            if parameter is not None:
                self._look(module, leaf, parameter)

    def _look(self, module: nn.Module, leaf: str, parameter: nn.Parameter) -> None:
        if parameter.is_meta or isinstance(parameter, InShards):
            return
        place = id(module), leaf
        passing = not isinstance(parameter, nn.Parameter)  # from functional_call, another one each time
        if id(parameter) not in self._seen and not (passing and place in self._at):
            self._seen[id(parameter)] = parameter, self._note(parameter)
            self.sums.around(self._look_at_sum)(self._own.get(place, parameter))
        if id(parameter) in self._seen:
            self._at.setdefault(place, (module, self._seen[id(parameter)][1]))

    def _look_at_sum(self, parameter: nn.Parameter) -> None:
        there = self._sum_of(parameter) if self._handed is None else self._handed.get(id(parameter))
        self._begun |= {id(parameter): one for one in _left(there)}

    def _step(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        self._stepped[id(optimizer)] = optimizer

    def _note(self, parameter: nn.Parameter) -> WeightContent:
        content = digest(parameter)
        return WeightContent(content, None if content in self._known else parameter.detach().to("cpu", copy=True))


def _left(gradient: object) -> Iterator[Tensor]:
    """A copy of what a step before left, if anything is there that can be read here and is not zero."""
    if isinstance(gradient, Tensor) and is_plain(gradient) and gradient.any():
        yield gradient.detach().to("cpu", copy=True)


_first_use: FirstUse | None = None
belongs_to_rank(__name__, "_first_use", fresh=lambda _: None)


def step_begins(sum_of: SumOf = _grad) -> None:
    """Say that the step that is judged begins now, whatever was trained before; outside a validation, nothing.

    ``sum_of``: what a parameter's gradient is added to.
    """
    if _first_use is not None:
        _first_use.anew(sum_of)

"""Deep copies for models with uncopyable members."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from traceback import walk_tb
from types import MethodType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Value = TypeVar("Value")


def deep_copy(value: Value, *, sharing: Iterable[object] = (), instead: Mapping[int, object] | None = None) -> Value:
    """Deep copy ``value``, sharing uncopyable members: a process group, a lock, a module.

    ``sharing``: further shared objects. ``instead``: by an object's id, its replacement in the copy. Raises
    ``deepcopy``'s error for a module or a parameter: changes to the copy must not reach it.
    """
    shared: dict[int, object] = {**{id(one): one for one in sharing}, **(instead or {})}
    while True:
        try:
            return copy.deepcopy(value, dict(shared))
        except Exception as error:  # no one type: every object has its own way to refuse
            frames = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code is copy.deepcopy.__code__]
            stuck = frames[-1].f_locals["x"]  # the innermost object that refused
            if stuck is value or id(stuck) in shared or isinstance(stuck, nn.Module | nn.Parameter):
                raise
            shared[id(stuck)] = stuck


def hooks_of(module: nn.Module) -> Iterator[object]:
    """Yield hooks on ``module`` and inside, or the objects behind their methods; without its submodules."""
    own = {id(part) for part in module.modules()}
    for part in module.modules():
        for name in (one for one in vars(part) if one.endswith("_hooks")):
            for hook in vars(part)[name].values() if isinstance(vars(part)[name], dict) else ():
                of = hook.__self__ if isinstance(hook, MethodType) else hook
                if id(of) not in own:
                    yield of


class TensorsShared(TorchFunctionMode):
    """Makes deep copies share tensors."""

    def __torch_function__(self, func: Any, types: Any, *given: Any) -> Any:
        args, kwargs = (*given, None, None)[:2]
        return args[0] if func is Tensor.__deepcopy__ else func(*(args or ()), **(kwargs or {}))

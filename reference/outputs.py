"""What the modules of a model put out, noted or changed while it runs: the only view into a model that is not ours."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

Place = str  # of a tensor: a module's n-th output, in which of its calls
AGAIN = ", call "
Note = Callable[[Place, Tensor], None]
Outputs = Mapping[Place, Tensor]


def module_of(place: Place) -> str:
    """The name of the module that puts out what is at ``place``."""
    return place.partition(" of ")[2].partition(AGAIN)[0]


def outputs_noted(model: nn.Module, note: Note) -> AbstractContextManager[None]:
    """While this is open, tell ``note`` of each tensor that a module of ``model`` puts out, and where.

    A tensor that a module inside it has given already is told once, as that one's; what was changed in place since is
    another. One that went through a module with parameters as it is, as where a layer is passed by, is told there, too.
    A module that is called more than once in a forward of the model has a place for each of its calls.
    """

    def noted(outputs: Outputs) -> Outputs:
        for place, tensor in outputs.items():
            note(place, tensor)
        return {}

    return outputs_changed(model, noted)


@contextmanager
def outputs_changed(model: nn.Module, change: Callable[[Outputs], Outputs]) -> Iterator[None]:
    """As ``outputs_noted``, call by call; the tensors that ``change`` returns stand for those at their places."""
    told: dict[tuple[int, int], tuple[str, Tensor]] = {}  # by which module; kept, so that no id is used again
    calls: Counter[str] = Counter()
    computing = {module for module in model.modules() if next(module.parameters(), None) is not None}

    def entered(module: nn.Module, arguments: Any) -> None:
        told.clear()
        calls.clear()

    def changing(name: str) -> Callable[[nn.Module, Any, Any], Any]:
        def called(module: nn.Module, arguments: Any, result: Any) -> Any:
            calls[name] += 1
            again = f"{AGAIN}{calls[name]}" if calls[name] > 1 else ""
            leaves, form = tree_flatten(result)
            outputs: dict[Place, Tensor] = {}
            for number, tensor in enumerate(leaf for leaf in leaves if isinstance(leaf, Tensor)):
                by, _ = told.get((id(tensor), tensor._version), (None, None))
                if by is None or (module in computing and not _inside(by, name)):
                    told[id(tensor), tensor._version] = name, tensor
                    outputs[f"output {number} of {name or 'the model'}{again}"] = tensor
            changed = {id(outputs[place]): tensor for place, tensor in change(outputs).items()}
            told.update({(id(tensor), tensor._version): (name, tensor) for tensor in changed.values()})
            return tree_unflatten([changed.get(id(leaf), leaf) for leaf in leaves], form) if changed else None

        return called

    hooks = [model.register_forward_pre_hook(entered)]
    hooks += [module.register_forward_hook(changing(name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _inside(module: str, other: str) -> bool:
    return module == other or not other or module.startswith(f"{other}.")


def order_of_use(model: nn.Module, inputs: Iterable[Any]) -> dict[str, int]:
    """Of every module that is called, by its name, when its last call ended: a count over all calls."""
    ended: dict[str, int] = {}

    def ending(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def called(module: nn.Module, arguments: Any, result: Any) -> None:
            ended[name] = next(clock)

        return called

    clock = count()
    hooks = [module.register_forward_hook(ending(name)) for name, module in model.named_modules()]
    try:
        model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return ended

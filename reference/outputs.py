"""Outputs of a model's modules, noted or changed during a run: the only view into a foreign model."""

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
    """Name the module with an output at ``place``."""
    return place.partition(" of ")[2].partition(AGAIN)[0]


def outputs_noted(model: nn.Module, note: Note) -> AbstractContextManager[None]:
    """Call ``note`` for each module output in ``model``, with its place.

    A tensor that a module inside it has given already is noted once, as that one's; a later change in place makes it
    another. A tensor that passes unchanged through a module with parameters, as around a skipped layer, is noted there,
    too. A module called more than once in a forward of the model has a place for each of its calls.
    """

    def note_each(outputs: Outputs) -> Outputs:
        for place, tensor in outputs.items():
            note(place, tensor)
        return {}

    return outputs_changed(model, note_each)


@contextmanager
def outputs_changed(model: nn.Module, change: Callable[[Outputs], Outputs]) -> Iterator[None]:
    """As ``outputs_noted``, call by call; tensors from ``change`` replace those at their places."""
    noted: dict[tuple[int, int], tuple[str, Tensor]] = {}  # by which module; kept, so that no id is used again
    calls: Counter[str] = Counter()
    computing = {module for module in model.modules() if next(module.parameters(), None) is not None}

    def on_enter(module: nn.Module, arguments: Any) -> None:
        noted.clear()
        calls.clear()

    def changing(name: str) -> Callable[[nn.Module, Any, Any], Any]:
        def on_call(module: nn.Module, arguments: Any, result: Any) -> Any:
            calls[name] += 1
            again = f"{AGAIN}{calls[name]}" if calls[name] > 1 else ""
            leaves, form = tree_flatten(result)
            outputs: dict[Place, Tensor] = {}
            for number, tensor in enumerate(leaf for leaf in leaves if isinstance(leaf, Tensor)):
                by, _ = noted.get((id(tensor), tensor._version), (None, None))
                if by is None or (module in computing and not _inside(by, name)):
                    noted[id(tensor), tensor._version] = name, tensor
                    outputs[f"output {number} of {name or 'the model'}{again}"] = tensor
            changed = {id(outputs[place]): tensor for place, tensor in change(outputs).items()}
            noted.update({(id(tensor), tensor._version): (name, tensor) for tensor in changed.values()})
            return tree_unflatten([changed.get(id(leaf), leaf) for leaf in leaves], form) if changed else None

        return on_call

    hooks = [model.register_forward_pre_hook(on_enter)]
    hooks += [module.register_forward_hook(changing(name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _inside(module: str, other: str) -> bool:
    return module == other or not other or module.startswith(f"{other}.")


def order_of_use(model: nn.Module, inputs: Iterable[Any]) -> dict[str, int]:
    """The end of every module's last call, by name: a count over all calls."""
    ended: dict[str, int] = {}

    def ending(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def on_call(module: nn.Module, arguments: Any, result: Any) -> None:
            ended[name] = next(clock)

        return on_call

    clock = count()
    hooks = [module.register_forward_hook(ending(name)) for name, module in model.named_modules()]
    try:
        model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return ended

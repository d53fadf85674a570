"""Outputs of a model's modules, noted or changed during a run: the only view into a foreign model."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
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
                inside = by is not None and (by == name or not name or by.startswith(f"{name}."))
                if by is None or (module in computing and not inside):
                    noted[id(tensor), tensor._version] = name, tensor
                    outputs[f"output {number} of {name or 'the model'}{again}"] = tensor
            changed = {id(outputs[place]): tensor for place, tensor in change(outputs).items()}
            noted.update({(id(tensor), tensor._version): (name, tensor) for tensor in changed.values()})
            return tree_unflatten([changed.get(id(leaf), leaf) for leaf in leaves], form) if changed else None

        return on_call

    with ExitStack() as hooks:
        hooks.enter_context(model.register_forward_pre_hook(on_enter))
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(changing(name)))
        yield


def order_of_use(model: nn.Module, inputs: Iterable[Any]) -> dict[str, int]:
    """The end of every module's last call, by name: a count over all calls."""
    ended: dict[str, int] = {}

    def on_call(name: str, *_: Any) -> None:
        ended[name] = next(clock)

    clock = count()
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(on_call, name)))
        model(*inputs)
    return ended

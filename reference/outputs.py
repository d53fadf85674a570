"""What the modules of a model put out, noted while it runs: the only view into a model that is not ours."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Place = str  # of a tensor: a module's n-th output, in which of its calls
AGAIN = ", call "
Note = Callable[[Place, Tensor], None]


@contextmanager
def outputs_noted(model: nn.Module, note: Note) -> Iterator[None]:
    """While this is open, tell ``note`` of each tensor that a module of ``model`` puts out, and where.

    A tensor that a module inside it has given already is told once, as that one's; what was changed in place since is
    another. A module that is called more than once in a forward of the model has a place for each of its calls.
    """
    told: dict[tuple[int, int], Tensor] = {}  # of this call of the model; kept, so that no id is used again
    calls: Counter[str] = Counter()

    def entered(module: nn.Module, arguments: Any) -> None:
        told.clear()
        calls.clear()

    def noting(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def called(module: nn.Module, arguments: Any, result: Any) -> None:
            calls[name] += 1
            again = f"{AGAIN}{calls[name]}" if calls[name] > 1 else ""
            outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            for number, tensor in enumerate(outputs):
                if (id(tensor), tensor._version) not in told:
                    told[id(tensor), tensor._version] = tensor
                    note(f"output {number} of {name or 'the model'}{again}", tensor)

        return called

    hooks = [model.register_forward_pre_hook(entered)]
    hooks += [module.register_forward_hook(noting(name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

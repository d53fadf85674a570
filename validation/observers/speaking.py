"""Whether a computation speaks to other ranks: then it may not be repeated where they do not repeat it, too."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_OF_RANKS = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd"})


class Speaking(TorchDispatchMode):
    """While this is open, ``spoke`` becomes true if anything is sent, received or reduced."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # in torch
        self.spoke = False

    def __torch_dispatch__(self, func: Any, types: Any, *given: Any) -> Any:
        args, kwargs = (*given, None)[:2]  # by name there may be none
        self.spoke = self.spoke or func.namespace in _OF_RANKS
        return func(*args, **(kwargs or {}))

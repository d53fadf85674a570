"""Whether a computation speaks to other ranks: then it may not be repeated where they do not repeat it, too."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_OF_RANKS = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd"})


class Speaking(TorchDispatchMode):
    """While this is open, ``spoke`` becomes true if anything is sent, received or reduced among several ranks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # in torch
        self.spoke = False

    def __torch_dispatch__(self, func: Any, types: Any, *given: Any) -> Any:
        args, kwargs = (*given, None)[:2]  # by name there may be none
        if func.namespace in _OF_RANKS and not self.spoke:
            self.spoke = max(_sizes((args, kwargs)), default=0) > 1
        return func(*args, **(kwargs or {}))


def _sizes(given: Any) -> Iterator[int]:
    """The sizes of the groups that an operator is given, which are boxed, or named."""
    for one in tree_leaves(given):
        with suppress(RuntimeError, ValueError, LookupError):  # it is no group, but the way to reduce
            if isinstance(one, torch.ScriptObject):
                yield dist.ProcessGroup.unbox(one).size()
            elif isinstance(one, str):
                yield c10d._resolve_process_group(one).size()  # type: ignore[arg-type, attr-defined]

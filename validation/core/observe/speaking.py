"""Detect communication: a computation that talks to other ranks cannot repeat alone."""

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
    """Sets ``spoke`` after any send, receive or reduction among several ranks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # in torch
        self.spoke = False

    def __torch_dispatch__(self, func: Any, types: Any, *given: Any) -> Any:
        args, kwargs = (*given, {})[:2]  # absent for positional calls
        if func.namespace in _OF_RANKS and not self.spoke:
            self.spoke = max(_sizes((args, kwargs)), default=0) > 1
        return func(*args, **(kwargs or {}))


def _sizes(given: Any) -> Iterator[int]:
    """Yield sizes of boxed or named groups among an operator's arguments."""
    for one in tree_leaves(given):
        with suppress(RuntimeError, ValueError, LookupError):  # a reduction name rather than a group
            if isinstance(one, torch.ScriptObject):
                yield dist.ProcessGroup.unbox(one).size()
            elif isinstance(one, str):
                yield c10d._resolve_process_group(one).size()  # type: ignore[arg-type, attr-defined]

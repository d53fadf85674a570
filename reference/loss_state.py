"""What a loss keeps: buffers of modules that it is, or calls. A loss that is run again leaves them as they were."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

_FURTHER = 4  # steps from the loss to a module that it calls
_HOLDERS = (list, tuple, set)


@contextmanager
def buffers_kept(function: object) -> Iterator[None]:
    """While this is open, what ``function`` does to buffers of modules that it calls is for a time: they come back."""
    parts = {id(part): part for module in _modules(function) for part in module.modules()}.values()
    kept = [(part, dict(part._buffers)) for part in parts]
    copies = [(one, one.detach().clone()) for _, own in kept for one in own.values() if isinstance(one, Tensor)]
    try:
        yield
    finally:
        for part, own in kept:
            part._buffers.update(own)
        with torch.no_grad():
            for one, copy in copies:
                if not torch.equal(one, copy):  # else a graph that needs it goes on as it was
                    one.copy_(copy)


def _modules(function: object) -> list[nn.Module]:
    """The modules within reach of a function: itself, whose method it is, what it closes over or calls by name."""
    found, seen, now = list[nn.Module](), set[int](), [function]
    for _ in range(_FURTHER):
        beyond = [one for one in now if id(one) not in seen]
        seen |= set(map(id, beyond))
        found += [one for one in beyond if isinstance(one, nn.Module)]
        now = [child for one in beyond if not isinstance(one, nn.Module) for child in _within(one)]
    return found


def _within(one: Any) -> Iterable[object]:
    if isinstance(one, MethodType):
        return [one.__self__, one.__func__]
    if isinstance(one, partial):
        return [one.func, *one.args, *one.keywords.values()]
    if isinstance(one, FunctionType):
        called = map(one.__globals__.get, one.__code__.co_names)
        return [*_cells(one), *(one for one in called if isinstance(one, nn.Module | FunctionType | partial))]
    if isinstance(one, dict):
        return list(one.values())
    if isinstance(one, _HOLDERS):
        return list(one)
    return [] if isinstance(one, type | Tensor) else list(getattr(one, "__dict__", {}).values())


def _cells(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty yet
            continue

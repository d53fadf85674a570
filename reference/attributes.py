"""A module's attributes besides parameters, buffers and submodules, at its call."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Attribute:
    """An attribute on a numbered module: a number, a text, or an untrained tensor.

    kept: itself, or a weak reference to a large tensor. version: a tensor's count of writes then.
    """

    number: int
    name: str
    kept: Any
    version: int | None = None

    def value(self) -> tuple[object] | None:
        """Its original; None if a tensor is gone, or was written to since."""
        one = self.kept() if isinstance(self.kept, weakref.ref) else self.kept
        changed = self.version is not None and (one is None or one._version != self.version)
        return None if changed else (one,)


def attributes_of(module: nn.Module) -> Iterator[Attribute]:
    """Yield attributes from ``module`` and its submodules. Tensors stay uncopied; large ones are not kept alive."""
    for number, part in enumerate(module.modules()):
        for name, value in vars(part).items():
            if name in _OF_TORCH:
                continue
            if type(value) in _PLAIN:
                yield Attribute(number, name, value)
            elif isinstance(value, Tensor) and not value.requires_grad and not value.is_inference():
                kept = weakref.ref(value) if value.is_floating_point() else value
                yield Attribute(number, name, kept, value._version)


def list_changed(module: nn.Module, attributes: Iterable[Attribute]) -> list[str]:
    """List attributes that changed on ``module``, if known."""
    return [f"{path}.{name}".removeprefix(".") for path, _, name, _ in _changed(module, attributes)]


def _changed(
    module: nn.Module, attributes: Iterable[Attribute]
) -> Iterator[tuple[str, dict[str, object], str, object]]:
    """Yield changed attributes: the path and members of their owner, their names, and their originals."""
    parts = [(path, vars(part)) for path, part in module.named_modules()]
    for one in attributes:
        (path, own), was = parts[one.number], one.value()
        if was is not None and own.get(one.name) is not was[0]:
            yield path, own, one.name, was[0]


@contextmanager
def put_back(module: nn.Module, attributes: tuple[Attribute, ...]) -> Iterator[None]:
    """Restore these attributes in ``module`` for a while; afterwards undo it, except for new writes."""
    left = list[tuple[dict[str, object], str, object, object]]()
    for _, own, name, was in _changed(module, attributes):
        if name in own:
            now, own[name] = own[name], _as_now(was, own[name])
            left.append((own, name, now, own[name]))
    try:
        yield
    finally:
        for own, name, now, then in left:
            if own.get(name) is then:
                own[name] = now


def _as_now(kept: object, now: object) -> object:
    """Widen ``kept`` like ``now``: the model may be a wider copy."""
    both = isinstance(kept, Tensor) and isinstance(now, Tensor) and kept.is_floating_point()
    return kept.to(now.dtype) if both and now.dtype == torch.float64 else kept  # type: ignore[attr-defined]

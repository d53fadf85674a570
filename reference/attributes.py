"""A module's attributes besides parameters, buffers and submodules, at its call."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, str, type(None))
_NONE = object()


@dataclass(frozen=True)
class Attribute:
    """An attribute on a numbered module: a number, a text, or an untrained tensor.

    ``value`` returns its original; None if a tensor is gone, or was written to since.
    """

    number: int
    name: str
    value: Callable[[], tuple[object] | None]


def attributes_of(module: nn.Module) -> Iterator[Attribute]:
    """Yield attributes from ``module`` and its submodules. Tensors stay uncopied; large ones are not kept alive."""
    for number, part in enumerate(module.modules()):
        for name, value in vars(part).items():
            if name in _OF_TORCH:
                continue
            if type(value) in _PLAIN:
                yield Attribute(number, name, _plain(value))
            elif isinstance(value, Tensor) and not value.requires_grad and not value.is_inference():
                yield Attribute(number, name, _tensor(value))


def list_changed(module: nn.Module, attributes: Iterable[Attribute]) -> list[str]:
    """List attributes that changed on ``module``, if known."""
    parts = [(path, vars(part)) for path, part in module.named_modules()]
    found = [(parts[one.number], one, one.value()) for one in attributes]
    others = [(path, one) for (path, own), one, was in found if was is not None and own.get(one.name) is not was[0]]
    return [f"{path}.{one.name}".removeprefix(".") for path, one in others]


@contextmanager
def put_back(module: nn.Module, attributes: tuple[Attribute, ...]) -> Iterator[None]:
    """Restore these attributes in ``module`` for a while; afterwards undo it, except for new writes."""
    parts = [vars(part) for part in module.modules()]
    left = list[tuple[dict[str, object], str, object, object]]()
    for one in attributes:
        own, found = parts[one.number], one.value()
        now = own.get(one.name, _NONE)
        if found is not None and now is not _NONE and now is not found[0]:
            own[one.name] = _as_now(found[0], now)
            left.append((own, one.name, now, own[one.name]))
    try:
        yield
    finally:
        for own, name, now, then in left:
            if own.get(name) is then:
                own[name] = now


def _plain(value: object) -> Callable[[], tuple[object]]:
    return lambda: (value,)


def _tensor(tensor: Tensor) -> Callable[[], tuple[object] | None]:
    version = tensor._version
    found: Callable[[], Tensor | None] = weakref.ref(tensor) if tensor.is_floating_point() else lambda: tensor

    def value() -> tuple[object] | None:
        one = found()
        return None if one is None or one._version != version else (one,)

    return value


def _as_now(kept: object, now: object) -> object:
    """Widen ``kept`` like ``now``: the model may be a wider copy."""
    both = isinstance(kept, Tensor) and isinstance(now, Tensor) and kept.is_floating_point()
    return kept.to(now.dtype) if both and now.dtype == torch.float64 else kept  # type: ignore[attr-defined]

"""A step's contributions with different rounding: the effects of rounding alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeproof.reference.copied import deep_copy
from pipeproof.reference.data import Batch
from pipeproof.reference.products import products_in, sort_of
from pipeproof.reference.step import Contribution, Expected, Reference

_WIDE: Mapping[torch.dtype, torch.dtype] = MappingProxyType(
    {
        torch.bfloat16: torch.float64,
        torch.float16: torch.float64,
        torch.float32: torch.float64,
        torch.complex64: torch.complex128,
    }
)


class _InDouble(TorchDispatchMode):  # type: ignore[no-untyped-call]  # in torch
    """Cast to fp64 for casts by hand: a narrower type would round as always."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, *given: Any) -> Any:
        args, kwargs = (*given, {})[:2]  # by name there may be none
        dtype = (kwargs or {}).get("dtype")
        wide = None if dtype is None else _WIDE.get(dtype)
        of_tensor = any(isinstance(one, Tensor) for one in args)  # drawing in another type gives other numbers
        if wide is not None and of_tensor and torch.Tag.nondeterministic_seeded not in func.tags:
            kwargs = {**kwargs, "dtype": wide}
        return func(*args, **(kwargs or {}))


def in_double(reference: Reference, expected: Expected, batches: Sequence[Batch]) -> tuple[Contribution, ...]:
    """Recompute contributions of ``expected`` in fp64, from the same parameters and microbatches."""
    model, wide = widen(deep_copy(reference.model)), [one.cast(torch.float64) for one in batches]
    with _InDouble():  # type: ignore[no-untyped-call]  # in torch
        return _once_more(reference, model, expected, wide)


def one_place_off(
    reference: Reference,
    expected: Expected,
    batches: Sequence[Batch],
    *,
    unit: float | None = None,
    draw: int = 0,
    way: int = 1,
) -> tuple[Contribution, ...]:
    """Recompute contributions of ``expected`` in the same precision, with every weight one rounding larger or smaller.

    ``unit``: the relative size; None: the weight type's own. ``draw``: the seed for the choice of larger ones; ``way``:
    -1 inverts it.
    """

    return _once_more(
        reference,
        deep_copy(reference.model),
        expected,
        batches,
        off=lambda dtype: way * (torch.finfo(dtype).eps if unit is None else unit),
        draw=draw,
    )


class _Types(TorchDispatchMode):  # type: ignore[no-untyped-call]  # in torch
    """Record types of computed floating-point numbers, and fp32 products."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # in torch
        self.found: set[torch.dtype] = set()
        self.products: set[tuple[torch.device, str]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, *given: Any) -> Any:
        args, kwargs = (*given, {})[:2]  # by name there may be none
        made = func(*args, **(kwargs or {}))
        numbers = [one for one in tree_leaves(made) if isinstance(one, Tensor) and one.is_floating_point()]
        self.found |= {one.dtype for one in numbers}
        if sort := sort_of(func):
            self.products |= {(one.device, sort) for one in numbers if one.dtype is torch.float32}
        return made


@dataclass(frozen=True)
class Made:
    """Floating-point types that a model computes, and rounding in its fp32 ``products`` by kind."""

    types: frozenset[torch.dtype] = frozenset()
    products: Mapping[str, str] = field(default_factory=dict)


def make_from(reference: Reference, expected: Expected, batches: Sequence[Batch]) -> Made:
    """Types in the model's run on the first of ``batches``."""
    with _Types() as types:
        _once_more(reference, deep_copy(reference.model), expected, batches[:1])
    products = (products_in(place, [sort]) for place, sort in sorted(types.products, key=str))
    return Made(frozenset(types.found), {sort: name for one in products for sort, name in one.items()})


def types_in(compute: Callable[[], object]) -> frozenset[torch.dtype]:
    """Types of floating-point numbers in ``compute``, cast by autocast or by hand."""
    with _Types() as types:
        compute()
    return frozenset(types.found)


def _once_more(
    reference: Reference,
    model: nn.Module,
    expected: Expected,
    batches: Sequence[Batch],
    *,
    off: Callable[[torch.dtype], float] = lambda dtype: 0.0,
    draw: int = 0,
) -> tuple[Contribution, ...]:
    """Contributions of ``batches`` in ``model``, a copy, with initial weights from ``expected``.

    ``off``: their relative error by type. ``draw``: as above.
    """
    generator = torch.Generator().manual_seed(draw)
    with torch.no_grad():
        for name, parameter in model.named_parameters(remove_duplicate=False):
            signs = torch.randint(2, parameter.shape, generator=generator, dtype=torch.float64).to(parameter.device)
            if parameter.is_floating_point() or parameter.is_complex():  # others have no rounding
                wide = expected.before[name].to(torch.complex128 if parameter.is_complex() else torch.float64)
                parameter.copy_(wide * (1 + off(parameter.dtype) * (2 * signs - 1)))
    routed = [  # different experts' results would not be rounding
        batch if batch.routers is None else batch.following(expected.contributions[m].choices)
        for m, batch in enumerate(batches)
    ]
    return reference.of(model).contribute(routed)


def widen(model: nn.Module) -> nn.Module:
    """Convert ``model`` to fp64 in place; complex parts too, which ``double()`` skips."""
    model.double()._apply(lambda one: one.to(torch.complex128) if one.is_complex() else one)  # type: ignore[no-untyped-call]  # in torch
    return model

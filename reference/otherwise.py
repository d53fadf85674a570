"""A step's contributions once more, with numbers that are rounded otherwise: what rounding alone may do."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from pipeproof.reference.copied import copied
from pipeproof.reference.data import Batch
from pipeproof.reference.step import Contribution, Expected, Reference


def in_double(reference: Reference, expected: Expected, batches: Sequence[Batch]) -> tuple[Contribution, ...]:
    """The contributions of ``expected`` computed once more in fp64, from the same parameters and microbatches."""
    return _once_more(reference, widened(copied(reference.model)), expected, [b.cast(torch.float64) for b in batches])


def one_place_off(reference: Reference, expected: Expected, batches: Sequence[Batch]) -> tuple[Contribution, ...]:
    """The contributions of ``expected`` in the same precision, with every weight one rounding larger or smaller."""
    return _once_more(reference, copied(reference.model), expected, batches, off=True)


class _Casts(TorchFunctionMode):
    """While it is open, notes the types that autocast casts to."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, *given: Any) -> Any:
        if torch.is_autocast_enabled(self._device):
            self.types.add(torch.get_autocast_dtype(self._device))
        args, kwargs = (*given, None, None)[:2]
        return func(*(args or ()), **(kwargs or {}))


def cast_to(reference: Reference, expected: Expected, batches: Sequence[Batch]) -> torch.dtype | None:
    """The narrowest type that autocast casts to while the model runs; None where it casts nowhere."""
    device = next((one.device.type for one in reference.model.parameters()), "cpu")
    with _Casts(device) as casts:
        _once_more(reference, copied(reference.model), expected, batches[:1])
    return max(casts.types, key=lambda one: torch.finfo(one).eps, default=None)


def _once_more(
    reference: Reference, model: nn.Module, expected: Expected, batches: Sequence[Batch], *, off: bool = False
) -> tuple[Contribution, ...]:
    """The contributions of ``batches`` in ``model``, a copy, with the weights that ``expected`` began with."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters(remove_duplicate=False):
            signs = torch.randint(2, parameter.shape, generator=generator, dtype=torch.float64).to(parameter.device)
            if parameter.is_floating_point() or parameter.is_complex():  # others have no rounding
                unit = torch.finfo(parameter.dtype).eps if off else 0.0
                wide = expected.before[name].to(torch.complex128 if parameter.is_complex() else torch.float64)
                parameter.copy_(wide * (1 + unit * (2 * signs - 1)))
    return reference.of(model).contribute([_as_routed(batch, expected, m) for m, batch in enumerate(batches)])


def _as_routed(batch: Batch, expected: Expected, microbatch: int) -> Batch:
    """``batch``, with the experts that were chosen for it: what others make of it is no rounding."""
    return batch if batch.routers is None else batch.following(expected.contributions[microbatch].choices)


def widened(model: nn.Module) -> nn.Module:
    """``model`` itself, in fp64; complex parts too, which ``double()`` leaves as they are."""
    model.double()._apply(lambda one: one.to(torch.complex128) if one.is_complex() else one)  # type: ignore[no-untyped-call]  # in torch
    return model

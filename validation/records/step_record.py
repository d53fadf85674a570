"""The record of one training step of anyone's model on one device: a plain loop over the microbatches."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reference.copied import copied
from reference.step import differentiable, widened
from validation.judging.tolerance import (
    Floor,
    Precision,
    error,
    precision_among,
    scalar_error,
    unmeasured,
)
from validation.observers.elements import in_fp64, is_rounded
from validation.records.record import Record, RecordedFloors, RecordedOperation, RecordError, microbatch_digests
from validation.records.record_file import write
from validation.worlds.output_file import OutputFile

LossFn = Callable[..., Tensor]
Pairs = Sequence[tuple[object, object]]


@dataclass(frozen=True)
class _Pass:
    """A forward and backward of every microbatch: losses by microbatch, summed gradients by name of each parameter.

    ``least`` is the norm of the smallest contribution that a microbatch made to a gradient.
    """

    losses: Mapping[int, float]
    gradients: Mapping[str, Tensor | None]
    least: Mapping[str, float]


def record_step(
    model: nn.Module,
    microbatches: Pairs,
    *,
    loss_fn: LossFn,
    loss_divisor: float | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    max_norm: float | None = None,
    floors: bool = True,
) -> Record:
    """What a correct training step gives: losses, gradients, their norm, and the parameters after it.

    The step is made on a copy: ``model`` and ``optimizer``, whose state counts, stay as they are. Microbatches are
    pairs (inputs, target); ``loss_fn(output, target)`` is a microbatch's scalar loss, and each is divided by
    ``loss_divisor`` before its backward: the number of microbatches unless told otherwise. ``max_norm`` clips. Without
    an optimizer there are no parameters after. ``floors``: measure what rounding does, by two more passes of which one
    is in fp64; without them what is a little off is judged "unknown".

    Raises ``RecordError`` for a model that does not give the same loss twice or has nothing to train, and ``LossError``
    for a loss that cannot be differentiated.
    """
    if not microbatches:
        raise RecordError("microbatches is empty: expected at least one")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecordError(f"the model, a {type(model).__name__}, has no parameter to train: nothing could be compared")
    divisor = float(len(microbatches) if loss_divisor is None else loss_divisor)
    untouched = model
    model, optimizer = copied((model, optimizer))
    run = _Run(microbatches, loss_fn, divisor)
    before = {name: parameter.detach().clone() for name, parameter in _named(model).items()}
    first = run.of(model)
    norm = _norm(first.gradients, model)
    measured = _floors(run, first, norm, untouched) if floors else None
    after: Mapping[str, Tensor] = {}
    if optimizer is not None:
        _update(model, optimizer, first.gradients, _factor(norm, max_norm))
        after = {name: parameter.detach().clone() for name, parameter in _named(model).items()}
    losses = tuple(first.losses[m] for m in range(len(microbatches)))
    operation = RecordedOperation(
        "train",
        microbatch_digests(microbatches),
        losses,
        (math.fsum(losses) if all(map(math.isfinite, losses)) else sum(losses)) / divisor,
        norm,
        before=before,
        gradients=first.gradients,
        parameters=after,
        buffers={name: buffer.detach().clone() for name, buffer in model.named_buffers()},
        floors=measured,
    )
    return Record("expected", _config(model, microbatches, divisor, max_norm), (operation,))


def write_record(record: Record, path: str) -> None:
    """Write ``record`` to a file, whole or not at all; only rank 0 of a launcher does."""
    with OutputFile(path) as file:
        write(record, file)


@dataclass(frozen=True)
class _Run:
    microbatches: Pairs
    loss_fn: LossFn
    divisor: float

    def of(self, model: nn.Module, *, backwards: bool = False, wide: bool = False) -> _Pass:
        """Every microbatch's forward and backward, one after the other, from the first or from the last.

        ``wide``: ``model`` is in fp64.
        """
        parameters = _named(model)
        trained = list(dict.fromkeys(p for p in parameters.values() if p.requires_grad))
        sums: dict[nn.Parameter, Tensor] = {}
        least: dict[nn.Parameter, float] = {}
        losses: dict[int, float] = {}
        numbered = list(enumerate(self.microbatches))
        for number, (inputs, target) in reversed(numbered) if backwards else numbered:
            loss = differentiable(self._loss(model, inputs, target, wide))
            losses[number] = loss.item()
            for parameter, part in zip(
                trained, torch.autograd.grad(loss / self.divisor, trained, allow_unused=True), strict=True
            ):
                if part is not None:
                    least[parameter] = min(least.get(parameter, math.inf), in_fp64(part).norm().item())
                    sums[parameter] = sums[parameter].add_(part) if parameter in sums else part.clone()
        named = {name: sums.get(parameter) for name, parameter in parameters.items()}
        return _Pass(losses, named, {name: least.get(p, 0.0) for name, p in parameters.items()})

    def _loss(self, model: nn.Module, inputs: object, target: object, wide: bool) -> Tensor:
        device = next(model.parameters()).device
        given = inputs if isinstance(inputs, tuple | list) else (inputs,)
        output = model(*(_cast(each, device, wide) for each in given))
        return self.loss_fn(output, _cast(target, device, wide))


def _cast(value: Any, device: torch.device, wide: bool) -> Any:
    """A tensor on ``device``; ``wide``: in fp64, unless it is of integers."""
    if not isinstance(value, Tensor):
        return value
    widest = torch.complex128 if value.is_complex() else torch.float64
    return value.to(device, widest if wide and is_rounded(value.dtype) else value.dtype)


def _floors(run: _Run, first: _Pass, norm: float, model: nn.Module) -> RecordedFloors:
    """What the reverse order of addition, and fp64, do to every number. One copy of ``model`` at a time."""
    again = run.of(copied(model), backwards=True)
    for number, loss in sorted(first.losses.items()):
        other = again.losses[number]
        if loss != other and (loss == loss or other == other):
            raise RecordError(
                f"the model does not give the same loss twice: microbatch {number} {loss:.9g}, then {other:.9g}; "
                "seed what it draws from the microbatch, or switch it off"
            )
    permuted, permuted_norm = _errors(again, first), _norm(again.gradients, model)
    del again
    precision = precision_among(model.parameters())
    try:
        wide = run.of(widened(copied(model)), wide=True)
    except Exception:  # no one type: it is the user's code, which may know of one dtype only
        return _without_double(first, permuted, scalar_error(permuted_norm, norm), precision)
    rounded, wide_norm = _errors(wide, first), _norm(wide.gradients, model)
    gradients = {
        name: Floor(permuted[name], rounded[name], _share(first.least[name], total), precision)
        for name, total in first.gradients.items()
    }
    apart = ((loss, wide.losses[number]) for number, loss in sorted(first.losses.items()))
    losses = [Floor(0.0, scalar_error(loss, other), 0.0, precision) for loss, other in apart]
    norms = Floor(scalar_error(permuted_norm, norm), scalar_error(wide_norm, norm), 0.0, precision)
    return RecordedFloors(tuple(losses), norms, gradients)


def _without_double(first: _Pass, permuted: Mapping[str, float], norm: float, precision: Precision) -> RecordedFloors:
    """Floors of a model that does not run in fp64: what other orders of addition do is all that may pass."""
    gradients = {
        name: Floor(permuted[name], 0.0, _share(first.least[name], total), precision)
        for name, total in first.gradients.items()
    }
    losses = tuple(unmeasured(precision) for _ in first.losses)
    return RecordedFloors(losses, unmeasured(precision, permutation=norm), gradients)


def _errors(other: _Pass, first: _Pass) -> dict[str, float]:
    """How far each gradient of another pass is from the first's; 0 where there is none."""
    pairs = {name: (other.gradients[name], total) for name, total in first.gradients.items()}
    return {name: 0.0 if one is None or two is None else error(one, two) for name, (one, two) in pairs.items()}


def _share(least: float, total: Tensor | None) -> float:
    size = 0.0 if total is None else in_fp64(total).norm().item()
    return least / size if size else 0.0


def _update(
    model: nn.Module, optimizer: torch.optim.Optimizer, gradients: Mapping[str, Tensor | None], factor: float
) -> None:
    for name, parameter in model.named_parameters():
        gradient = gradients[name]
        parameter.grad = None if gradient is None else gradient * factor
    optimizer.step()


def _factor(norm: float, max_norm: float | None) -> float:
    factor = 1.0 if max_norm is None else max_norm / (norm + 1e-6)
    return 1.0 if factor > 1.0 else factor  # not min(): a norm that is not a number must not go unseen


def _norm(gradients: Mapping[str, Tensor | None], model: nn.Module) -> float:
    """The 2-norm over logical parameters, a tied one counted once; sums of squares in fp64, added exactly."""
    found = [gradients[name] for name, _ in model.named_parameters()]
    real = (torch.view_as_real(g.resolve_conj()) if g.is_complex() else g for g in found if g is not None)
    return math.sqrt(math.fsum(torch.linalg.vector_norm(g, dtype=torch.float64).item() ** 2 for g in real))


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _config(model: nn.Module, microbatches: Pairs, divisor: float, max_norm: float | None) -> dict[str, object]:
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    return {
        "model": type(model).__name__,
        "microbatches": len(microbatches),
        "loss_divisor": divisor,
        "max_norm": max_norm,
        "dtype": "+".join(sorted(dtypes)),
        "torch": str(torch.__version__),
    }

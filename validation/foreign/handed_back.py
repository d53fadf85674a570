"""What a foreign step hands back on a rank, in the forms that are understood, and sentences for all others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor, nn

from pipeline.action import Action, ActionError
from pipeline.trace import Trace

_EXPECTED = "its local modules, or a mapping of parameter names to gradients; then losses; then the gradient norm"


class HandBackError(ValueError):
    """A step handed back what cannot be judged."""


@dataclass(frozen=True)
class HandedBack:
    """What a step made on one rank; a tuple of these, in this order, is as good.

    ``made``: a module, a list of modules, or a mapping of parameter names to gradients; nothing in it on a rank that
    holds nothing. A gradient may be a DTensor, or a part of one and its index in the whole: ``(part, slice(0, 4))``.
    ``losses``: one for each microbatch, undivided, or one number, the whole step's; None where another
    rank knows. ``grad_norm``: before clipping, if the step computes it. ``trace``: what the rank did in which order, if
    the runtime knows: a ``Trace``, actions, or their names (``0F1``).
    """

    made: Any
    losses: Any = None
    grad_norm: Any = None
    trace: Any = None

    @property
    def modules(self) -> list[nn.Module]:
        """The modules; none where gradients were handed back in their place."""
        if isinstance(self.made, Mapping) and not isinstance(self.made, nn.Module):
            return []
        return [self.made] if isinstance(self.made, nn.Module) else list(self.made)

    @property
    def gradients(self) -> Mapping[str, Any] | None:
        """The gradients by name, where no modules were handed back."""
        return self.made if isinstance(self.made, Mapping) and not isinstance(self.made, nn.Module) else None

    @property
    def by_microbatch(self) -> tuple[float, ...]:
        """The microbatches' losses, if that is what the losses are."""
        return () if self.losses is None or _is_number(self.losses) else tuple(map(_float, self.losses))

    @property
    def whole_loss(self) -> float | None:
        """The whole step's loss, if that is what was handed back."""
        return _float(self.losses) if _is_number(self.losses) else None

    @property
    def norm(self) -> float | None:
        return None if self.grad_norm is None else _float(self.grad_norm)

    def actions(self, rank: int) -> tuple[Action, ...] | None:
        """What ``rank`` did, in order, if the runtime told."""
        if isinstance(self.trace, Trace):
            return tuple(span.action for span in self.trace.spans[rank])
        return (
            None if self.trace is None else tuple(a if isinstance(a, Action) else Action.parse(a) for a in self.trace)
        )


def understood(result: object, step: str) -> HandedBack:
    """What the function called ``step`` returned. Raises ``HandBackError`` where that is no such thing."""
    if result is None:
        raise HandBackError(f"{step} returned None: expected {_EXPECTED}")
    handed = result if isinstance(result, HandedBack) else _from_tuple(result, step)
    _check_made(handed.made, step)
    losses = handed.losses
    if losses is not None and not _is_number(losses) and not _is_numbers(losses):
        raise HandBackError(
            f"{step} returned {_named(losses)} as losses: expected a number for each microbatch, or one for the step"
        )
    if handed.grad_norm is not None and not _is_number(handed.grad_norm):
        raise HandBackError(f"{step} returned {_named(handed.grad_norm)} as the gradient norm: expected a number")
    _check_trace(handed, step)
    return handed


def _check_trace(handed: HandedBack, step: str) -> None:
    try:
        handed.actions(0)
    except (ActionError, TypeError) as error:
        raise HandBackError(f"{step} returned a trace that cannot be read: {error}") from None


def _from_tuple(result: object, step: str) -> HandedBack:
    if not isinstance(result, tuple):
        return HandedBack(result)
    if not 1 <= len(result) <= 4:
        raise HandBackError(
            f"{step} returned a tuple of {len(result)}: expected {_EXPECTED}; at most a trace after that"
        )
    return HandedBack(*result)


def _check_made(made: object, step: str) -> None:
    if isinstance(made, nn.Module):
        return
    if isinstance(made, Mapping):
        for name, gradient in made.items():
            whole = gradient[0] if _is_part(gradient) else gradient
            if not isinstance(name, str) or not (whole is None or isinstance(whole, Tensor)):
                raise HandBackError(
                    f"{step} returned a mapping with {name!r}: {_named(gradient)}: expected the name of a parameter "
                    "and its gradient, a tensor or None, or a part of it and its index"
                )
    elif isinstance(made, Sequence) and not isinstance(made, str):
        for one in made:
            if not isinstance(one, nn.Module):
                raise HandBackError(f"{step} returned {_named(one)} among its modules: expected modules only")
    else:
        raise HandBackError(f"{step} returned {_named(made)}: expected {_EXPECTED}")


def _float(value: Any) -> float:
    return float(value.item() if isinstance(value, Tensor) else value)


def _is_part(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], slice | tuple)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex())


def _is_numbers(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 1 and not value.is_complex()
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(_is_number, value))


def _named(value: object) -> str:
    text = repr(value) if isinstance(value, str | Real) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:59]}…"

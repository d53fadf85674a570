"""Microbatches: real text from every Python installation, and synthetic ones.

Legend: B rows, T tokens, C width, M microbatches.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.reference.choices import Choices, Routers, choosing
from pipeproof.reference.model import CONTEXT, WIDTH, ModelError

IGNORED = -100  # cross entropy's mark for a target that does not count


@dataclass(frozen=True)
class Batch:
    """One microbatch: the model's ``inputs``, the loss's ``target``, and the number of counting targets (``tokens``).

    routers: routers to watch, with choices to impose; None: not watched.
    """

    inputs: tuple[Tensor, ...]
    target: Tensor
    tokens: int
    routers: Routers | None = None

    @classmethod
    def of(cls, inputs: Any, target: Any) -> "Batch":
        """Convert a user's pair: one input or several. Classes count unless cross entropy ignores them."""
        given = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        if not isinstance(target, Tensor):
            return cls(given, target, 1)
        return cls(given, target, target.numel() if target.is_floating_point() else int((target != IGNORED).sum()))

    def following(self, choices: Choices) -> "Batch":
        """Make routers repeat ``choices`` for this microbatch."""
        return self if self.routers is None else replace(self, routers=self.routers.following(choices))

    def through(self, model: nn.Module) -> Any:
        """Run it through the model."""
        with choosing(model, self.routers):
            return model(*self.inputs)

    def to(self, device: str) -> "Batch":
        """Move to ``device``."""
        return self._with(lambda tensor: tensor.to(device))

    def cast(self, dtype: torch.dtype) -> "Batch":
        """Cast floating-point tensors to ``dtype``, and complex tensors to pairs."""

        def as_dtype(tensor: Tensor) -> Tensor:
            if tensor.is_complex():
                return tensor.to(dtype.to_complex())
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return self._with(as_dtype)

    @property
    def of_tensors(self) -> bool:
        """True for tensors alone: a user's pair may have other members, which stay unchanged."""
        return all(isinstance(one, Tensor) for one in (*self.inputs, self.target))

    @property
    def wanting(self) -> dict[int, Tensor]:
        """Inputs that want a gradient, by number."""
        return {k: one for k, one in enumerate(self.inputs) if isinstance(one, Tensor) and one.requires_grad}

    def of_leaves(self) -> "Batch":
        """Replace inputs that want gradients by private leaves."""
        own = {k: one.detach().requires_grad_() for k, one in self.wanting.items()}
        return replace(self, inputs=tuple(own.get(k, one) for k, one in enumerate(self.inputs))) if own else self

    def _with(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        *inputs, target = (change(x) if isinstance(x, Tensor) else x for x in (*self.inputs, self.target))
        return replace(self, inputs=tuple(inputs), target=target)


@dataclass(frozen=True)
class Shapes:
    """Microbatch shapes: rows, tokens per row, and whether they differ between microbatches.

    ragged: sequence lengths (rows, for models without tokens) differ. unequal: numbers of counting targets differ.
    """

    rows: int = 2
    tokens: int = 16
    ragged: bool = False
    unequal: bool = False


@functools.cache
def text() -> Tensor:
    """Python's language reference, in ASCII codes (about half a million, int64, one dimension)."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ModelError("this Python lacks pydoc_data, its help texts: install the full standard library") from error
    words = "".join(topics[name] for name in sorted(topics)).encode("ascii", errors="ignore")
    return torch.frombuffer(bytearray(words), dtype=torch.uint8).long()


def microbatches(model: str, *, count: int, shapes: Shapes, seed: int) -> list[Batch]:
    """Make ``count`` microbatches for ``model``, on the CPU, from ``seed`` alone."""
    generator = torch.Generator().manual_seed(seed)
    make = _text_batch if model.startswith("gpt") else _row_batch
    return [make(model, shapes, generator, index) for index in range(count)]


def _text_batch(model: str, shapes: Shapes, generator: torch.Generator, index: int) -> Batch:
    length = shapes.tokens - (index * 5 % 7 if shapes.ragged else 0)
    if not 1 <= length <= CONTEXT:
        raise ModelError(f"a sequence of {length} tokens: expected 1 to {CONTEXT}")
    source = text()
    starts_B = torch.randint(len(source) - length - 1, (shapes.rows,), generator=generator)
    rows = torch.stack([source[start : start + length + 1] for start in starts_B.tolist()])  # (B, T + 1)
    target_BT = rows[:, 1:].clone()
    if shapes.unequal:
        # Drop a growing tail of each row's targets, never all of them.
        dropped = (index * 3 + 1) % length
        target_BT[:, length - dropped :] = IGNORED
    return Batch((rows[:, :-1].contiguous(),), target_BT, int((target_BT != IGNORED).sum()))


def _row_batch(model: str, shapes: Shapes, generator: torch.Generator, index: int) -> Batch:
    """Random rows; each row counts, so unequal counts mean unequal numbers of rows."""
    rows = shapes.rows + 2 + (index * 5 % 7 if shapes.ragged or shapes.unequal else 0)
    x_BC = torch.randn(rows, WIDTH, generator=generator)
    target_BC = torch.randn(rows, WIDTH, generator=generator)
    key = torch.randint(2**31, (), generator=generator)
    second_BC = torch.randn(rows, WIDTH, generator=generator)
    extra = {"dropout": (key,), "pair": (second_BC,), "sometimes": (second_BC, key)}.get(model, ())
    return Batch((x_BC, *extra), target_BC, rows)

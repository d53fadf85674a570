"""The reference of a step of ColossalAI's pipelines: the whole model on one rank, and the same criterion of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from pipeproof.foreign.frameworks.colossalai_on_cpu import on_cpu
from pipeproof.foreign.frameworks.framework import Framework
from pipeproof.foreign.task import WhiteBoxError

CHILD = "model"  # what the reference calls the whole model
Criterion = Callable[[Any, Any], Tensor]  # of what the model gives, and the microbatch


class ColossalAIError(WhiteBoxError):
    """ColossalAI is missing, of a version that is not known, or used in a way that is not covered."""


COLOSSALAI = Framework(
    "colossalai",
    "colossalai",
    "pipeproof.colossalai",
    ("0.5",),
    "pip install --no-deps colossalai==0.5.0 galore-torch==1.0 bitsandbytes==0.50.2 && "
    "pip install peft==0.21.2 einops psutil",
    ColossalAIError,
    axes=("dp", "pp"),
    child=CHILD,
    shim=on_cpu,
)


@dataclass(frozen=True)
class Packed:
    """Microbatches, as a pipeline cuts them from a batch, as tuples of tensors; ``constants``: what is no tensor."""

    spec: TreeSpec | None = None
    constants: Mapping[int, Any] = field(default_factory=dict)
    rows: int = 0

    @classmethod
    def of(cls, microbatches: Sequence[Any]) -> "Packed":
        """How to pack these. Raises ``ColossalAIError`` where they are not cut from one batch, along dimension 0."""
        if not microbatches:
            return cls()
        leaves, spec = tree_flatten(microbatches[0])
        constants = {k: leaf for k, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
        made = cls(spec, constants, _rows("microbatch 0", leaves))
        for number, one in enumerate(microbatches[1:], start=1):
            others, like = tree_flatten(one)
            if like != spec or made._constants_of(others) != constants:
                raise ColossalAIError(
                    f"microbatch {number} is {_form(one)}, microbatch 0 is {_form(microbatches[0])}: expected the same "
                    "entries in all, as they are cut from one batch"
                )
            if (rows := _rows(f"microbatch {number}", others)) != made.rows:
                raise ColossalAIError(
                    f"microbatch {number} has {rows} rows, microbatch 0 has {made.rows}: expected the same number in "
                    "all, as they are cut from one batch"
                )
        return made

    def pack(self, microbatch: Any) -> tuple[Tensor, ...]:
        """The tensors of a microbatch."""
        return tuple(leaf for leaf in tree_flatten(microbatch)[0] if isinstance(leaf, Tensor))

    def unpack(self, tensors: Sequence[Tensor]) -> Any:
        """A microbatch as it was."""
        assert self.spec is not None, "there are microbatches"
        coming = iter(tensors)
        count = self.spec.num_leaves
        return tree_unflatten(
            [self.constants[k] if k in self.constants else next(coming) for k in range(count)], self.spec
        )

    def joined(self, microbatches: Sequence[Sequence[Tensor]]) -> Any:
        """The batch from which a pipeline cuts these."""
        return self.unpack([torch.cat(tensors) for tensors in zip(*microbatches, strict=True)])

    @staticmethod
    def _constants_of(leaves: Sequence[Any]) -> dict[int, Any]:
        return {k: leaf for k, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}


def cut(batch: Any, count: int | None, size: int | None) -> list[Any]:
    """The microbatches, so many or of so many rows, that a pipeline cuts from ``batch``.

    Raises ``ColossalAIError`` where they would not be of equal sizes.
    """
    rows = _rows("the batch", tree_flatten(batch)[0])
    due = size or (rows // count if count else 0)
    if not due or rows % due or count not in (None, rows // due):
        wanted = f"{count} microbatches" if count else "microbatches"
        wanted += f" of {size} rows" if size else " of equal sizes"
        raise ColossalAIError(f"the batch has {rows} rows: expected what is cut into {wanted}")
    starts = range(0, rows, due)
    return [tree_map_only(Tensor, lambda tensor, k=k: tensor[k : k + due], batch) for k in starts]  # type: ignore[misc]


def _rows(what: str, leaves: Sequence[Any]) -> int:
    """The rows that all tensors have."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        raise ColossalAIError(f"{what} has no tensor in it: expected a dict, a tuple or a tensor")
    found = [tensor.shape[0] if tensor.dim() else None for tensor in tensors]
    if others := [one for one in found if one != found[0] or one is None]:
        has = "a tensor without dimensions" if others[0] is None else f"tensors of {found[0]} and of {others[0]} rows"
        raise ColossalAIError(
            f"{what} has {has}: ColossalAI cuts every tensor along dimension 0, so give all of them one row per sample"
        )
    rows: int = found[0]  # type: ignore[assignment]  # it has dimensions
    return rows


def _form(microbatch: Any) -> str:
    kind = type(microbatch).__name__
    return f"a {kind} of {sorted(map(str, microbatch))}" if isinstance(microbatch, Mapping) else f"a {kind}"


class WholeColossalAI(nn.Module):
    """The whole model; called with the tensors of a microbatch."""

    def __init__(self, build: Callable[[], nn.Module], packed: Packed, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        model = COLOSSALAI.built(build)
        if not isinstance(model, nn.Module):
            raise ColossalAIError(
                f"the reference is a {type(model).__name__}: expected the model, before it is boosted"
            )
        check_model(model)
        self.model = model if dtype is None else model.to(dtype)
        self.packed = packed
        self._dtype = dtype

    def forward(self, *tensors: Tensor) -> Any:
        return _called(self.model, self._cast(self.packed.unpack(tensors)))

    def _cast(self, microbatch: Any) -> Any:
        """What the boosted model makes of its inputs with mixed precision."""
        if self._dtype is None:
            return microbatch
        return tree_map_only(
            Tensor, lambda tensor: tensor.to(self._dtype) if tensor.is_floating_point() else tensor, microbatch
        )


def _called(model: nn.Module, microbatch: Any) -> Any:
    """As ColossalAI's schedules call a model."""
    if isinstance(microbatch, list | tuple):
        return model(*microbatch)
    return model(**microbatch) if isinstance(microbatch, dict) else model(microbatch)


def check_model(model: nn.Module) -> None:
    """Raise ``ColossalAIError`` for a model that would be judged wrongly."""
    if hasattr(model, "peft_config"):
        raise ColossalAIError(
            f"the model has LoRA's layers: {COLOSSALAI.adapter} covers models without; train all of it"
        )
    COLOSSALAI.check_dropout(model)

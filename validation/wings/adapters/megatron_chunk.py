"""A Megatron chunk in the role of a stage: its inputs, and the loss of its output."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pipeproof.wings.adapters.megatron_whole import ForwardStep, bare, core, whole_loss

_beside: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()  # the input set beside each model


class _Fed:
    """A Megatron model that gets the previous stage's output by a setter, and here as an argument too."""

    def set_input_tensor(self: Any, tensor: Any) -> None:
        _beside[self] = tensor[0] if isinstance(tensor, list) else tensor
        super().set_input_tensor(tensor)  # type: ignore[misc]  # of the model

    def __call__(self: Any, *arguments: Any, **named: Any) -> Any:
        return super().__call__(*arguments, **{"stage_input": _beside.get(self)} | named)  # type: ignore[misc]

    def forward(self: Any, *arguments: Any, stage_input: Any = None, **named: Any) -> Any:
        if stage_input is not _beside.get(self):  # a rerun, with its original inputs
            self.set_input_tensor(stage_input)
        return super().forward(*arguments, **named)  # type: ignore[misc]


@cache
def _fed_kind(kind: type) -> type:
    return type(kind.__name__, (_Fed, kind), {"__module__": kind.__module__})


@contextmanager
def fed(chunks: Sequence[Any]) -> Iterator[None]:
    """Pass the previous stage's output to models in ``chunks`` as an argument, for the observer, while open."""
    kinds = {bare(chunk): type(bare(chunk)) for chunk in chunks}
    for model, kind in kinds.items():
        model.__class__ = _fed_kind(kind)  # type: ignore[arg-type]  # a class can be hashed
    try:
        yield
    finally:
        for model, kind in kinds.items():
            model.__class__ = kind
            _beside.pop(model, None)


class _Giving(nn.Module):
    """Replaces a chunk with known output: returns it for any input."""

    def __init__(self, config: Any, output: Tensor) -> None:
        super().__init__()
        self.config, self._output = config, output

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self._output


class LossOf:
    """The undivided loss of the last of ``chunks`` on a microbatch, by the job's own ``forward_step``."""

    def __init__(self, chunks: Sequence[Any], forward_step: ForwardStep) -> None:
        self._config: Any = bare(chunks[-1]).config
        self._forward_step = forward_step
        kind, chunk = core("transformer.module").Float16Module, chunks[-1]
        while isinstance(chunk, nn.Module) and not isinstance(chunk, kind):
            chunk = getattr(chunk, "module", None)
        self._widens = chunk is not None  # a wrapper casts 16-bit outputs to fp32

    def __call__(self, output: Tensor, microbatch: Any) -> Tensor:
        given = output.float() if self._widens and output.dtype in (torch.bfloat16, torch.float16) else output
        made, function = self._forward_step(iter([microbatch]), _Giving(self._config, given))
        return whole_loss(function(made), self._config)

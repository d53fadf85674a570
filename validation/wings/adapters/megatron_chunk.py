"""A chunk of Megatron's as a stage: what comes into it, and the loss of what it gives."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pipeproof.wings.adapters.megatron_whole import ForwardStep, bare, core, undivided

_beside: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()  # by model, what was set beside it


class _Fed:
    """A model of Megatron's, beside which what the stage before sent is set: that comes in as an argument, too."""

    def set_input_tensor(self: Any, tensor: Any) -> None:
        _beside[self] = tensor[0] if isinstance(tensor, list) else tensor
        super().set_input_tensor(tensor)  # type: ignore[misc]  # of the model

    def __call__(self: Any, *arguments: Any, **named: Any) -> Any:
        return super().__call__(*arguments, **{"stage_input": _beside.get(self)} | named)  # type: ignore[misc]

    def forward(self: Any, *arguments: Any, stage_input: Any = None, **named: Any) -> Any:
        if stage_input is not _beside.get(self):  # it is run again, with what it was given
            self.set_input_tensor(stage_input)
        return super().forward(*arguments, **named)  # type: ignore[misc]


@cache
def _fed_kind(kind: type) -> type:
    return type(kind.__name__, (_Fed, kind), {"__module__": kind.__module__})


@contextmanager
def fed(model: nn.Module) -> Iterator[None]:
    """While this is open, what the stage before sent comes into ``model`` as an argument too, where it is watched."""
    kind = type(model)
    model.__class__ = _fed_kind(kind)  # type: ignore[arg-type]  # a class can be hashed
    try:
        yield
    finally:
        model.__class__ = kind
        _beside.pop(model, None)


class _Giving(nn.Module):
    """In the place of a chunk whose output is known: that is what it gives, whatever it is called with."""

    def __init__(self, config: Any, output: Tensor) -> None:
        super().__init__()
        self.config, self._output = config, output

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self._output


class LossOf:
    """The loss of what the last of ``chunks`` gives of a microbatch, undivided: by the job's own ``forward_step``."""

    def __init__(self, chunks: Sequence[Any], forward_step: ForwardStep) -> None:
        self._config: Any = bare(chunks[-1]).config
        self._forward_step = forward_step
        self._widens = _widens(chunks[-1])

    def __call__(self, output: Tensor, microbatch: Any) -> Tensor:
        given = output.float() if self._widens and output.dtype in (torch.bfloat16, torch.float16) else output
        made, function = self._forward_step(iter([microbatch]), _Giving(self._config, given))
        return undivided(function(made), self._config)


def _widens(chunk: Any) -> bool:
    """Whether what is around a model gives in fp32 what the model gives in 16 bits."""
    kind = core("transformer.module").Float16Module
    while isinstance(chunk, nn.Module) and not isinstance(chunk, kind):
        chunk = getattr(chunk, "module", None)
    return chunk is not None

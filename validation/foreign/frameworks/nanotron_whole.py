"""The reference of a step of nanotron's: the whole model on one rank, built by the same function."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from torch import Tensor, nn

from pipeproof.foreign.frameworks.framework import Framework, Packed, replaced
from pipeproof.foreign.frameworks.nanotron_on_cpu import on_cpu
from pipeproof.foreign.task import WhiteBoxError

CHILD = "model"  # what the reference calls the whole model
Microbatch = Mapping[str, Any]  # as a dataloader of nanotron's gives it: tensors by name


class NanotronError(WhiteBoxError):
    """Nanotron is missing, of a version that is not known, or used in a way that is not covered."""


NANOTRON = Framework(
    "nanotron",
    "nanotron",
    "pipeproof.nanotron",
    ("0.4",),
    "pip install --no-deps git+https://github.com/huggingface/nanotron && "
    "pip install dacite datasets einops psutil pyyaml transformers triton",
    NanotronError,
    child=CHILD,
    shim=on_cpu,
)


def core(name: str = "") -> ModuleType:
    """Nanotron, or the module ``name`` in it. Raises ``NanotronError`` where it cannot be imported."""
    try:
        return NANOTRON.module(name)
    except ImportError as error:
        raise NanotronError(f"nanotron does not import ({error}): PyPI has that of 2024; {NANOTRON.install}") from None


_COVERED = {
    "moe_config": None,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}


def check_model(model: nn.Module) -> None:
    """Raise ``NanotronError`` for a model that would be judged wrongly."""
    NANOTRON.covers(vars(getattr(model, "config", None) or nn.Module()), _COVERED)
    NANOTRON.check_dropout(model)


def packed_of(microbatches: Sequence[Microbatch]) -> Packed:
    """How to pack these. Raises ``NanotronError`` for what no dataloader of nanotron's gives."""
    for number, one in enumerate(microbatches):
        if not isinstance(one, Mapping) or not one:
            raise NanotronError(f"microbatch {number} is a {type(one).__name__}: expected tensors by name")
        if other := [name for name, value in one.items() if not isinstance(value, Tensor)]:
            raise NanotronError(
                f"microbatch {number} has a {type(one[other[0]]).__name__} as {other[0]}: expected tensors only"
            )
    return Packed.of(microbatches, error=NanotronError)


class WholeNanotron(nn.Module):
    """The whole model; called with all of a packed microbatch, it gives the loss."""

    def __init__(self, build: Callable[[Any], nn.Module], names: Sequence[str]) -> None:
        super().__init__()
        with alone():
            model = NANOTRON.built(build, _context())
        if not isinstance(model, nn.Module):
            raise NanotronError(f"the reference is a {type(model).__name__}: expected a model of nanotron's")
        check_model(model)
        self.model = model
        self._names = tuple(names)
        self._check_ties()

    def forward(self, *tensors: Tensor) -> Tensor:
        with alone():
            output = self.model(**dict(zip(self._names, tensors, strict=True)))
        loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
        return loss

    def _check_ties(self) -> None:
        """Raise ``NanotronError`` where weights are to be tied, and are not."""
        named = dict(self.model.named_parameters(remove_duplicate=False))
        model: Any = self.model
        tied = model.get_embeddings_lm_head_tied_names() if hasattr(model, "get_embeddings_lm_head_tied_names") else []
        held = [name for name in tied if name in named]
        if len({id(named[name]) for name in held}) > 1:
            raise NanotronError(
                f"the reference does not tie {' and '.join(held)}: call nanotron.trainer.mark_tied_parameters in it"
            )


class _One:
    """A group of this rank alone, as far as nanotron asks one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class _Done:
    def wait(self) -> None: ...


def _gathered(into: list[Any], what: Any, **_: Any) -> None:
    into[:] = [what]


def _nothing(*_: Any, async_op: bool = False, **__: Any) -> Any:
    return _Done() if async_op else None


_OF_ONE: dict[str, Callable[..., Any]] = {
    "is_initialized": lambda: True,
    "get_backend": lambda *_: "gloo",
    "get_rank": lambda *_, **__: 0,
    "get_world_size": lambda *_, **__: 1,
    "get_global_rank": lambda *_, **__: 0,
    "get_global_ranks": lambda *_, **__: (0,),
    "get_process_group_ranks": lambda *_, **__: [0],
    "new_group": lambda *_, **__: _One(),
    "all_gather_object": _gathered,
    **dict.fromkeys(("all_reduce", "all_reduce_coalesced", "barrier", "broadcast"), _nothing),
}


@contextmanager
def alone() -> Iterator[None]:
    """While this is open, nanotron believes that there is one rank. No group is made for it."""
    place = core("distributed")
    with ExitStack() as stack:
        for name, function in _OF_ONE.items():
            stack.enter_context(replaced(place, name, function))
        default = SimpleNamespace(
            distributed_c10d=SimpleNamespace(_get_default_group=_One), is_initialized=lambda: True
        )
        stack.enter_context(mock.patch.object(core("logging.base"), "torch_dist", default))
        yield


def _context() -> Any:
    """A ``ParallelContext`` of one rank."""
    kind = core("parallel.context").ParallelContext
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with mock.patch.dict(os.environ, one), replaced(kind, "set_device", lambda _: None):
        return kind(1, 1, 1)

"""The whole model beside a step of a framework's: what makes it, what it is called with, and its loss."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only, tree_structure

from pipeproof.core.contract import DEFAULTS, Contract
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_record import LossFn, Pairs
from pipeproof.whitebox.task import LossOfAll, name_of
from pipeproof.wings.adapters.framework import AdapterError
from pipeproof.worlds.accelerator import CPU


def _as_they_are(model: Any, microbatches: list[Any]) -> tuple[Any, list[Any]]:
    return model, microbatches


@dataclass(frozen=True)
class Whole:
    """The whole model that a step is held against.

    reference: the user's function. build: makes the model by it. microbatches: pairs of what the model is called with
    and the target, or where it gives the loss itself and ``loss_fn`` is None, what it is called with. contract: what
    the step claims, or a function of model and microbatches. given: model and microbatches as a user's step has them.
    alone: while it is open for a type of device, the framework is as a launcher leaves it; then it is as it was, so
    that the next layout can be another.
    """

    reference: Callable[..., Any]
    build: Callable[[], nn.Module]
    microbatches: Sequence[Any]
    loss_fn: LossFn | LossOfAll | None = None
    contract: Contract | Callable[[Any, Any], Contract] = DEFAULTS
    given: Callable[[Any, list[Any]], tuple[Any, list[Any]]] = _as_they_are
    alone: Callable[[str], AbstractContextManager[object]] = nullcontext

    @property
    def pairs(self) -> Pairs:
        """The microbatches in pairs."""
        return [(one, torch.empty(0)) for one in self.microbatches] if self.loss_fn is None else self.microbatches

    @property
    def loss_in_step(self) -> LossFn | None:
        """The loss function in a step of just these microbatches."""
        return self.loss_fn.of(self.pairs) if isinstance(self.loss_fn, LossOfAll) else self.loss_fn

    def contract_in_step(self) -> Contract:
        """The contract in a step of just these; the defaults where the model cannot be made, which a verdict says."""
        if isinstance(self.contract, Contract):
            return self.contract
        try:
            return self.contract(self.build(), self.pairs) if self.microbatches else DEFAULTS
        except AdapterError:
            raise
        except Exception:  # no one type: it is the user's code that runs
            return DEFAULTS

    def run_by(self, step: Callable[[Any, list[Any]], Any]) -> Callable[[Any, list[Any]], Any]:
        """The user's ``step`` as ranks run it; nothing else of this goes there."""
        return partial(_run, step, self.given, self.alone)

    def beside(self, *, floors: bool) -> SingleDevice:
        """How a running job has it."""
        return SingleDevice(self.build, self.loss_fn or _given, contract=self.contract, floors=floors)


def _run(
    step: Callable[[Any, list[Any]], Any],
    given: Callable[[Any, list[Any]], tuple[Any, list[Any]]],
    alone: Callable[[str], AbstractContextManager[object]],
    model: Any,
    microbatches: list[Any],
) -> Any:
    device = next((one.device.type for one in model.parameters()), CPU)
    with alone(device):
        return step(*given(model, microbatches))


def _given(output: Tensor, _: Tensor) -> Tensor:
    """The loss of a model that gives it itself."""
    return output


@dataclass(frozen=True)
class Packed:
    """Microbatches, which have one form, as tuples of tensors; ``form``: that of one, with ``...`` for each tensor."""

    form: Any = None

    @classmethod
    def of(cls, microbatches: Sequence[Any]) -> "Packed":
        """How to pack these. Raises where one has other entries than the first."""
        forms = [tree_map_only(Tensor, lambda _: ..., one) for one in microbatches]
        for number, form in enumerate(forms):
            if form != forms[0] or tree_structure(form) != tree_structure(forms[0]):
                told = f"{_named(microbatches[number])}, microbatch 0 is {_named(microbatches[0])}"
                raise AdapterError(f"microbatch {number} is {told}: expected the same entries in all")
        return cls(forms[0] if forms else None)

    def pack(self, microbatch: Any) -> tuple[Tensor, ...]:
        """The tensors of a microbatch."""
        return tuple(leaf for leaf in tree_leaves(microbatch) if isinstance(leaf, Tensor))

    def unpack(self, tensors: Any) -> Any:
        """A microbatch as it was."""
        coming = iter(tensors if isinstance(tensors, tuple | list) else (tensors,))
        return tree_map(lambda leaf: next(coming) if leaf is ... else leaf, self.form)


def _named(one: Any) -> str:
    kind = type(one).__name__
    return f"a {kind} of {sorted(map(str, one))}" if isinstance(one, Mapping) else f"a {kind}"


def by_name(inputs: Mapping[str, Any], first: str = "") -> dict[str, Any]:
    """``inputs`` in one order: the ``first``, and then by their names."""
    return {name: inputs[name] for name in sorted(inputs, key=lambda name: (name != first, name))}


class Called(nn.Module):
    """A model that is called with the tensors of a packed microbatch; ``call`` is given it, and the microbatch."""

    def __init__(self, model: nn.Module, packed: Packed, call: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.model, self.packed, self._call = model, packed, call

    def forward(self, *tensors: Tensor) -> Any:
        return self._call(self.model, self.packed.unpack(tensors))


@dataclass(frozen=True)
class OfMicrobatch:
    """``criterion``, of outputs and the number of their microbatch, in place of what is no single tensor of targets."""

    criterion: Callable[[Any, Any], Tensor]
    microbatches: Mapping[tuple[int, ...], Any]

    def __call__(self, outputs: Any, number: Tensor) -> Tensor:
        microbatch = self.microbatches[tuple(number.tolist())]
        return self.criterion(outputs, tree_map_only(Tensor, lambda tensor: tensor.to(number.device), microbatch))


@dataclass(frozen=True)
class Named:
    """``run``, that is called what the user's ``function`` is called."""

    function: Callable[..., Any]
    run: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return name_of(self.function)

    def __call__(self, *given: Any) -> Any:
        return self.run(*given)

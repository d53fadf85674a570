"""The whole model for a framework's step: its builder, inputs and loss."""

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


def _as_it_is(one: Any) -> Any:
    return one


@dataclass(frozen=True)
class Whole:
    """The whole model that a step is compared with.

    reference: the user's function. build: makes the model with it. microbatches: pairs of the model's input and the
    target; only inputs if ``loss_fn`` is None, and the model returns the loss. contract: the step's claims, or a
    function of model and microbatches. given: makes of a microbatch what a user's step is given. own: the same of the
    model. alone: imitates a launcher on a type of device while open, then restores the framework's state, to allow
    another layout next.
    """

    reference: Callable[..., Any]
    build: Callable[[], nn.Module]
    microbatches: Sequence[Any]
    loss_fn: LossFn | LossOfAll | None = None
    contract: Contract | Callable[[Any, Any], Contract] = DEFAULTS
    given: Callable[[Any], Any] = _as_it_is
    own: Callable[[Any], Any] = _as_it_is
    alone: Callable[[str], AbstractContextManager[object]] = nullcontext

    @property
    def pairs(self) -> Pairs:
        """The microbatches in pairs."""
        return [(one, torch.empty(0)) for one in self.microbatches] if self.loss_fn is None else self.microbatches

    @property
    def loss_in_step(self) -> LossFn | None:
        """The loss function in a step with exactly these microbatches."""
        return self.loss_fn.of(self.pairs) if isinstance(self.loss_fn, LossOfAll) else self.loss_fn

    def contract_in_step(self) -> Contract:
        """The contract in a step with these microbatches; the defaults if the model fails, which a verdict reports."""
        if isinstance(self.contract, Contract):
            return self.contract
        try:
            return self.contract(self.build(), self.pairs) if self.microbatches else DEFAULTS
        except AdapterError:
            raise
        except Exception:  # all types: user code runs
            return DEFAULTS

    def run_by(self, step: Callable[[Any, list[Any]], Any]) -> Callable[[Any, list[Any]], Any]:
        """Wrap the user's ``step`` for ranks, without the rest of this object."""
        return partial(_run, step, self.given, self.own, self.alone)

    def single_device(self, *, floors: bool) -> SingleDevice:
        """Return the expectation for a running job."""
        return SingleDevice(self.build, self.loss_fn or _own_loss, contract=self.contract, floors=floors)


def _run(
    step: Callable[[Any, list[Any]], Any],
    given: Callable[[Any], Any],
    own: Callable[[Any], Any],
    alone: Callable[[str], AbstractContextManager[object]],
    model: Any,
    microbatches: list[Any],
) -> Any:
    device = next((one.device.type for one in model.parameters()), CPU)
    with alone(device):
        return step(own(model), [given(one) for one in microbatches])


def _own_loss(output: Tensor, _: Tensor) -> Tensor:
    """Return the loss made by a model itself."""
    return output


@dataclass(frozen=True)
class Packed:
    """Microbatches of one form, flattened into tuples of tensors; ``form``: with ``...`` for each tensor."""

    form: Any = None

    @classmethod
    def of(cls, microbatches: Sequence[Any]) -> "Packed":
        """Find the common form. Raises if one differs from the first."""
        forms = [tree_map_only(Tensor, lambda _: ..., one) for one in microbatches]
        for number, form in enumerate(forms):
            if form != forms[0] or tree_structure(form) != tree_structure(forms[0]):
                entries = f"{_name_type(microbatches[number])}, microbatch 0 is {_name_type(microbatches[0])}"
                raise AdapterError(f"microbatch {number} is {entries}: expected the same entries in all")
        return cls(forms[0] if forms else None)

    def pack(self, microbatch: Any) -> tuple[Tensor, ...]:
        """Return a microbatch's tensors."""
        return tuple(leaf for leaf in tree_leaves(microbatch) if isinstance(leaf, Tensor))

    def unpack(self, tensors: Any) -> Any:
        """Rebuild a microbatch."""
        coming = iter(tensors if isinstance(tensors, tuple | list) else (tensors,))
        return tree_map(lambda leaf: next(coming) if leaf is ... else leaf, self.form)


def _name_type(one: Any) -> str:
    kind = type(one).__name__
    return f"a {kind} of {sorted(map(str, one))}" if isinstance(one, Mapping) else f"a {kind}"


def by_name(inputs: Mapping[str, Any], first: str = "") -> dict[str, Any]:
    """Order ``inputs``: the ``first``, then by name."""
    return {name: inputs[name] for name in sorted(inputs, key=lambda name: (name != first, name))}


class Called(nn.Module):
    """A model called with a packed microbatch's tensors; ``call`` gets the model and the microbatch."""

    def __init__(self, model: nn.Module, packed: Packed, call: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.model, self.packed, self._call = model, packed, call

    def forward(self, *tensors: Tensor) -> Any:
        return self._call(self.model, self.packed.unpack(tensors))


@dataclass(frozen=True)
class OfMicrobatch:
    """``criterion`` on outputs and a microbatch's number, for targets beyond a single tensor."""

    criterion: Callable[[Any, Any], Tensor]
    microbatches: Mapping[tuple[int, ...], Any]

    def __call__(self, outputs: Any, number: Tensor) -> Tensor:
        microbatch = self.microbatches[tuple(number.tolist())]
        return self.criterion(outputs, tree_map_only(Tensor, lambda tensor: tensor.to(number.device), microbatch))


def under_name_of(function: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` under the name of the user's ``function``."""

    def named(*given: Any) -> Any:
        return run(*given)

    named.__name__ = name_of(function)
    return named

"""What is to be validated, as the user gave it, and sentences for what cannot be."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reference.data import IGNORED, Batch
from reference.graph import ends_of, uses
from reference.step import Loss
from validation.foreign.rank import Step
from validation.judging.verdict import raised


class WhiteBoxError(ValueError):
    """A validation that cannot be: what was asked for makes no sense."""


class ReferenceRaised(Exception):
    """The reference, which is the user's own code, cannot be run. Its cause is what it raised."""


@dataclass(frozen=True)
class Task:
    """What is to be validated, as the user gave it."""

    step: Step
    reference: Callable[[], nn.Module]
    microbatches: tuple[Any, ...]
    loss_fn: Callable[[Any, Tensor], Tensor] | None
    loss_divisor: float | None

    def check(self, ranks: int) -> None:
        """Raise ``WhiteBoxError`` for what cannot be."""
        if not callable(self.step):
            raise WhiteBoxError(f"step is {self.step!r}: expected a function step(model, microbatches)")
        if isinstance(self.reference, nn.Module) or not callable(self.reference):
            raise WhiteBoxError(f"reference is a {type(self.reference).__name__}: expected a function that builds it")
        if ranks < 1:
            raise WhiteBoxError(f"ranks is {ranks}: expected at least 1")
        if not self.microbatches:
            raise WhiteBoxError("microbatches is empty: expected at least one")
        if self.loss_divisor is not None and not self.loss_divisor > 0:
            raise WhiteBoxError(f"loss_divisor is {self.loss_divisor}: expected more than 0")
        for number in range(len(self.microbatches)):
            self._batch(number)

    @property
    def name(self) -> str:
        return name_of(self.reference)

    @property
    def loss(self) -> Loss:
        """The loss of a microbatch, and what it is divided by."""
        function = self.loss_fn or (lambda output, target: output)
        return Loss(function, float(self.loss_divisor or len(self.microbatches)))

    def title(self, ranks: int) -> str:
        """The subject in words."""
        count = len(self.microbatches)
        return f"{name_of(self.step)} on {ranks} ranks, {count} microbatches, reference {self.name}"

    def built(self, device: str) -> nn.Module:
        """The reference, as every rank builds it."""
        try:
            model = self.reference()
        except Exception as error:  # no one type: it is the user's code
            raise ReferenceRaised(f"the reference {self.name} cannot be built: it raised {raised(error)}") from error
        if not isinstance(model, nn.Module):
            raise WhiteBoxError(f"reference {self.name} returned a {type(model).__name__}: expected a torch.nn.Module")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise WhiteBoxError(f"reference {self.name} has no parameter to train: nothing could be compared")
        return model.to("cpu" if device == "cpu" else "cuda:0").train()

    def batches(self, model: nn.Module) -> list[Batch]:
        """The microbatches for the reference, where ``model`` is."""
        device = str(next(model.parameters()).device)
        return [self._batch(number).to(device) for number in range(len(self.microbatches))]

    def repeated(self, device: str) -> frozenset[str]:
        """The parameters that the reference uses in several places, by all their names, as its first microbatch shows.

        Such a one may have a copy in every stage that uses it. What cannot be told is in none.
        """
        model = self.built(device)
        return repeated(model, self.batches(model)[0], self.loss.function)

    def _batch(self, number: int) -> Batch:
        given = self.microbatches[number]
        pair = isinstance(given, tuple | list) and len(given) == 2
        if self.loss_fn is None:
            inputs, target = (given if isinstance(given, tuple | list) else (given,)), torch.empty(0)
        elif not pair:
            raise WhiteBoxError(
                f"microbatch {number} is a {type(given).__name__}: expected a pair of inputs and target"
            )
        else:
            inputs, target = given
            inputs = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        for tensor in (*inputs, target):
            if not isinstance(tensor, Tensor):
                raise WhiteBoxError(f"microbatch {number} has a {type(tensor).__name__} in it: expected tensors only")
        return Batch(tuple(inputs), target, counting(target))


def repeated(model: nn.Module, batch: Batch, loss_fn: Callable[[Any, Tensor], Tensor]) -> frozenset[str]:
    """The parameters that ``model``, which is used up by it, uses in several places for ``batch``, by all names."""
    model.requires_grad_()
    inputs = [one.detach().requires_grad_() * 1 if one.is_floating_point() else one for one in batch.inputs]
    try:
        loss = loss_fn(model(*inputs), batch.target)
    except RuntimeError:  # of the user's own code, which may not like that its data has a gradient
        return frozenset()
    count, parameters = uses(ends_of([loss])), model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, one in parameters if count[id(one)] > 1)


def counting(target: Tensor) -> int:
    """How many elements of ``target`` count: of classes, those that cross entropy does not ignore."""
    return target.numel() if target.is_floating_point() else int((target != IGNORED).sum())


def name_of(function: object) -> str:
    """What to call ``function``."""
    function = getattr(function, "func", function)  # of a functools.partial
    return str(getattr(function, "__name__", None) or type(function).__name__)

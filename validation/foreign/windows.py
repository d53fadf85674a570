"""A model too large for one rank: neighbouring layers are models of their own, built, judged and dropped in turn."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.core.judge import one_thread
from pipeproof.core.verdict import raised
from pipeproof.foreign.task import WhiteBoxError, name_of
from pipeproof.reference.data import Batch
from pipeproof.worlds.accelerator import first_of

Build = Callable[[], nn.Module]
LossOf = Callable[[Any, Tensor], Tensor]
Given = Any  # a tensor or a tuple of tensors: what a layer takes, and gives
_BOTH = 2  # layers with parameters, in a window
_SEED = 7_919_000  # of targets, away from the small numbers that models and data are seeded with


class Window(nn.Sequential):
    """Neighbouring layers, each under its number in the model, as a step is given them.

    A layer takes all that the one before it returns, a tensor or several.
    """

    @property
    def loss_fn(self) -> LossOf:
        """The loss of a microbatch, of the output and the target: yours, if these layers end the model."""
        loss_fn: LossOf = self.__dict__["its_loss"]  # no attribute: a loss that is a module would be a layer
        return loss_fn

    def forward(self, *given: Tensor) -> Any:
        """What the last layer returns."""
        found: Given = given
        for layer in self:
            found = layer(*_tuple(found))
        return found


@dataclass(frozen=True)
class Neighbours:
    """Builds the window of the layers from number ``first`` on, of ``count`` that the model has: a reference."""

    builders: tuple[Build, ...]
    first: int
    count: int
    loss_fn: LossOf

    @property
    def __name__(self) -> str:
        last = self.first + len(self.builders) - 1
        numbers = {0: "layer {0}", 1: "layers {0} and {1}"}.get(last - self.first, "layers {0} to {1}")
        return f"{numbers.format(self.first, last)} of {self.count}"

    def __call__(self) -> Window:
        named = {str(self.first + k): build() for k, build in enumerate(self.builders)}
        window = Window(OrderedDict(named))
        window.__dict__["its_loss"] = self.loss_fn
        return window


@dataclass(frozen=True)
class Piece:
    """A window, and what it is trained on; ``unseen``: what of its gradients no verdict on it tells, in words."""

    window: Neighbours
    microbatches: Sequence[tuple[Given, Tensor]]
    unseen: str


@dataclass(frozen=True)
class Layered:
    """A model by the builders of its layers, in order, with what it is trained on; ``device`` as a world has it."""

    builders: Sequence[Build]
    microbatches: tuple[Any, ...]
    loss_fn: LossOf
    device: str

    def check(self) -> None:
        """Raise ``WhiteBoxError`` for what cannot be."""
        given: object = self.builders
        if not isinstance(given, Sequence) or isinstance(given, str):
            kind = type(given).__name__
            raise WhiteBoxError(f"layers is a {kind}: expected a list of functions, of which each builds a layer")
        if not self.builders:
            raise WhiteBoxError("layers is empty: expected a function for each layer, which builds it")
        for number, build in enumerate(self.builders):
            if isinstance(build, nn.Module) or not callable(build):
                what = f"{self._layer(number)} is a {type(build).__name__}"
                raise WhiteBoxError(f"{what}: expected a function without arguments that builds it")
        if not callable(self.loss_fn):
            raise WhiteBoxError(f"loss_fn is {self.loss_fn!r}: expected a function of output and target")

    def windows(self) -> Iterator[Piece]:
        """Each window with its microbatches. Raises ``WhiteBoxError`` for layers that are no chain.

        A window ends with the second of its layers that has parameters to train. The next begins with that one, so that
        what every layer sends back meets parameters of a layer before it.
        """
        first, last, count = 0, -1, len(self.builders)
        inputs: list[Given] = [inputs for inputs, _ in self.microbatches]
        while last + 1 < count:
            last, following, targets, unseen = self._reached(first, inputs)
            ends = last + 1 == count
            due = [target for _, target in self.microbatches] if ends else targets
            loss_fn = self.loss_fn if ends else off_target
            window = Neighbours(tuple(self.builders[first : last + 1]), first, count, loss_fn)
            yield Piece(window, list(zip(inputs, due, strict=True)), unseen if last > first else "")
            first, inputs = last, following

    def _reached(self, first: int, inputs: list[Given]) -> tuple[int, list[Given], list[Tensor], str]:
        """The last layer of the window from ``first`` on, what it is given, and targets for what it gives.

        And which tensors of the window's first layer with parameters are not made by these.
        """
        trained, given, unseen = 0, inputs, ""
        for number in range(first, len(self.builders)):
            layer = self._built(number)
            trains = any(parameter.requires_grad for parameter in layer.parameters())
            trained += trains
            if trained == _BOTH or number + 1 == len(self.builders):
                break
            found = [self._called(layer, number, m, one) for m, one in enumerate(given)]
            unseen = self._unseen(layer, number, given[0]) if trains else unseen
            given = found
        draw = torch.Generator().manual_seed(_SEED + number)
        # One at a time, for the outputs of a head may be large.
        targets = [self._target(self._called(layer, number, m, one), number, draw) for m, one in enumerate(given)]
        return number, given, targets, unseen

    def _unseen(self, layer: nn.Module, number: int, given: Given) -> str:
        """The tensors that ``layer`` gives and no parameter of its own has a part in, in words; empty if none is."""
        with one_thread():
            found = _tuple(layer(*self._moved(given)))
        own = [k for k, one in enumerate(found) if one.is_floating_point() and not one.requires_grad]
        outputs = f"{'outputs' if len(own) > 1 else 'output'} {', '.join(map(str, own))}"
        why = "no parameter of its own has a part in it"
        return f"what is sent back for {outputs} of layer {number} is not compared: {why}" if own else ""

    def _built(self, number: int) -> nn.Module:
        build = self.builders[number]
        try:
            layer: object = build()
        except Exception as error:  # no one type: it is the user's code
            what = f"{self._layer(number)} cannot be built: {name_of(build)} raised {raised(error)}"
            raise WhiteBoxError(what) from error
        if not isinstance(layer, nn.Module):
            kind = type(layer).__name__
            raise WhiteBoxError(f"{self._layer(number)} is a {kind}, by {name_of(build)}: expected a torch.nn.Module")
        return layer.to(self._place).train()

    def _called(self, layer: nn.Module, number: int, microbatch: int, given: Given) -> Given:
        """What ``layer`` gives, on the CPU."""
        own = f"{self._layer(number)}, a {type(layer).__name__},"
        try:
            with one_thread(), torch.no_grad():
                found = layer(*self._moved(given))
        except Exception as error:  # no one type: it is the user's code
            whose = f"layer {number - 1} gave" if number else "it is given"
            what = f"what {whose} for microbatch {microbatch}, {_shapes(given)}"
            raise WhiteBoxError(f"{own} cannot take {what}: it raised {raised(error)}") from error
        given = _tuple(found)
        if not given or not all(isinstance(one, Tensor) for one in given):
            raise WhiteBoxError(f"{own} gave {_kind(found)}: expected a tensor, or a tuple of tensors")
        moved = tuple(one.detach().cpu() for one in given)
        return moved if isinstance(found, tuple) else moved[0]

    def _target(self, output: Given, number: int, draw: torch.Generator) -> Tensor:
        """Random numbers as large as ``output``: in its shape, or in a row where it is several tensors.

        After the model's last layer, whose targets are the user's, none.
        """
        rounded = _rounded(output)
        if not rounded:
            what = f"{self._layer(number)} gave no floating-point tensor"
            raise WhiteBoxError(f"{what}: nothing could be sent back to it")
        if number + 1 == len(self.builders):
            return torch.empty(0)
        drawn = [_like(one, draw) for one in rounded]
        return torch.cat([one.flatten() for one in drawn]) if isinstance(output, tuple) else drawn[0]

    def _moved(self, given: Given) -> list[Tensor]:
        """Copies where the layers are, for a layer may change what it is given."""
        return [one.to(self._place, copy=True) for one in Batch.of(given, torch.empty(0)).inputs]

    @property
    def _place(self) -> str:
        return first_of(self.device)

    def _layer(self, number: int) -> str:
        return f"layer {number} of {len(self.builders)}"


def off_target(output: Given, target: Tensor) -> Tensor:
    """The loss of layers that do not end the model: the mean square of what ``output`` is off ``target``.

    Of several tensors it is the sum of theirs, and the target has the numbers of all in a row. Unlike a product with
    random numbers it is no sum of terms that cancel, so that rounding stays as small as in any other loss.
    """
    outputs = _rounded(output)
    parts = torch.split(target.flatten(), [one.numel() for one in outputs])
    off = [(one.flatten() - part).square().mean() for one, part in zip(outputs, parts, strict=True)]
    return torch.stack(off).sum()


def _tuple(given: Given) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)


def _rounded(output: Given) -> list[Tensor]:
    """The tensors of ``output`` that have gradients, complex numbers as pairs."""
    real = [torch.view_as_real(one) if one.is_complex() else one for one in _tuple(output)]
    return [one for one in real if one.is_floating_point()]


def _like(output: Tensor, draw: torch.Generator) -> Tensor:
    """Random numbers in its shape, and of its size, so that neither is lost beside the other; in fp32 at least."""
    wide = output.to(torch.promote_types(output.dtype, torch.float32))
    size = wide.square().mean().sqrt().item()
    drawn = torch.randn(output.shape, generator=draw, dtype=wide.dtype)
    return drawn * size if 0 < size < math.inf else drawn


def _shapes(given: Given) -> str:
    """``(4, 8)``, of each tensor."""
    return " and ".join(str(tuple(one.shape)) for one in (given if isinstance(given, tuple | list) else [given]))


def _kind(found: object) -> str:
    if not isinstance(found, tuple):
        return f"a {type(found).__name__}"
    other = next((type(one).__name__ for one in found if not isinstance(one, Tensor)), "")
    return f"a tuple with a {other} in it" if other else "an empty tuple"

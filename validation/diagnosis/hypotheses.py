"""What a stage may have computed in place of what it should: the reference does it, and the results are compared."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from reference.boundary import Tensors, run_layers
from reference.model import Model
from validation.diagnosis.flow import Played
from validation.diagnosis.likeness import agrees
from validation.diagnosis.setup import Setup
from validation.judging.tolerance import FP32, precision_of
from validation.observers.likeness import NARROWER

Outputs = Sequence[Tensor | None]
_FEW = 4  # layers whose every order is tried


@dataclass(frozen=True)
class _Alternative:
    """A way to compute a stage other than the right one, and what it would be called."""

    kind: str
    text: str
    model: Model
    layers: Sequence[int]
    training: bool
    dtype: torch.dtype | None = None

    def run(self, inputs: Tensors) -> Tensors | None:
        """All that comes out; None if these layers do not take such inputs, so that they were not what ran."""
        fresh = copy.deepcopy(self.model).train(self.training)
        narrow = nullcontext() if self.dtype is None else torch.autocast("cpu", dtype=self.dtype)
        try:
            with torch.no_grad(), narrow:
                return run_layers(fresh, self.layers, inputs)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None


Tried = dict[int, list[_Alternative]]


class _Cast(_Alternative):
    """All of the stage, parameters and activations, in another type."""

    def run(self, inputs: Tensors) -> Tensors | None:
        assert self.dtype is not None, "cast to what?"
        fresh = copy.deepcopy(self.model).to(self.dtype).train(self.training)
        with torch.no_grad():
            return _to(torch.float32, run_layers(fresh, self.layers, _to(self.dtype, inputs)))


def _to(dtype: torch.dtype, tensors: Tensors) -> Tensors:
    return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors)


def computed(
    setup: Setup, played: Mapping[int, Played], number: int, stage: int, *, microbatch: int, seen: Outputs, tried: Tried
) -> tuple[str, str] | None:
    """The kind of cause and its words, if ``seen`` is all that ``stage`` gives when something is done wrongly.

    ``tried`` by stage: a stage does the same with every microbatch, so what the first one says holds for the next.
    """
    inputs = played[number].boundaries[microbatch].inputs[stage]
    if stage not in tried:
        tried[stage] = list(_alternatives(setup, played, number, stage))
    for one in tried[stage]:
        made = one.run(inputs)
        if made is not None and _all_agree(seen, made):
            tried[stage] = [one]
            return one.kind, one.text
    tried[stage] = []
    if draws(setup, played, number, stage):
        return "randomness", "the stage draws random numbers, and others gave this output"
    return None


def _all_agree(seen: Outputs, made: Tensors) -> bool:
    pairs = zip(seen, made, strict=False)
    alike = (a is not None and agrees(a, b, precision_of(b.dtype).least) for a, b in pairs)
    return len(seen) == len(made) and all(alike)


def draws(setup: Setup, played: Mapping[int, Played], number: int, stage: int) -> bool:
    """Whether a stage does something else in training, other than with statistics of the batch."""
    now, layers = played[number], setup.layers[stage]
    if setup.plan[number] == "eval" or any(True for _ in now.model.buffers()):
        return False
    inputs = now.boundaries[0].inputs[stage]
    trained, evaluated = (_Alternative("", "", now.model, layers, mode).run(inputs) for mode in (True, False))
    return trained is not None and evaluated is not None and not all(map(torch.equal, trained, evaluated))


def other_target(
    setup: Setup, played: Mapping[int, Played], number: int, *, microbatch: int, seen: Tensor
) -> str | None:
    """Whose targets give the loss ``seen`` with this microbatch's output, in words; None if nobody's do."""
    now = played[number]
    (output,) = now.boundaries[microbatch].outputs[-1]
    loss_fn = now.model.sum_loss if setup.recipe.loss == "tokens" else now.model.mean_loss
    own = setup.batches(number)[microbatch].target
    for earlier in range(number, -1, -1):
        when = " of an earlier step" if earlier != number else ""
        for other, batch in enumerate(setup.batches(earlier)):
            if (other, earlier) != (microbatch, number) and batch.target.shape == own.shape:
                if agrees(seen, loss_fn(output, batch.target), FP32.least):
                    return f"that of microbatch {other}'s targets{when}, expected microbatch {microbatch}'s"
    return None


def _alternatives(setup: Setup, played: Mapping[int, Played], number: int, stage: int) -> Iterator[_Alternative]:
    model, layers, training = played[number].model, setup.layers[stage], setup.plan[number] != "eval"
    named = {True: "training", False: "evaluation"}
    yield _Alternative("mode", f"its module ran in {named[not training]} mode", model, layers, not training)
    if number - 1 in played:
        text = "its parameters are those of the operation before"
        yield _Alternative("stale-tensor", text, played[number - 1].model, layers, training)
    for name, dtype in NARROWER.items():
        yield _Alternative("rounded", f"it was computed in {name}", model, layers, training, dtype)
        yield _Cast("rounded", f"it was computed in {name}", model, layers, training, dtype)
    for other in layer_orders(list(layers), sum(map(len, setup.layers))):
        text = f"it computed layers {_list(other)}, expected {_list(layers)}"
        yield _Alternative("partition", text, model, other, training)


def layer_orders(own: list[int], count: int) -> Iterator[list[int]]:
    """Other layers that a stage may have by mistake: a neighbouring range, another order, one twice, one exchanged."""
    for start in range(count):
        for end in range(start + 1, count + 1):
            if abs(end - start - len(own)) <= 1 and list(range(start, end)) != own:
                yield list(range(start, end))
    if len(own) <= _FEW:
        yield from (list(order) for order in permutations(own) if list(order) != own)
    for place in range(len(own)):
        yield [*own[: place + 1], *own[place:]]
        yield from ([*own[:place], k, *own[place + 1 :]] for k in range(count) if k != own[place])


def _list(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))

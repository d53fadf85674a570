"""What may go wrong at a stage, as suppositions that the reference can play through."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from reference.boundary import Tensors, run_layers
from reference.model import DropoutBlock, Model
from validation.diagnosis.flow import Played
from validation.diagnosis.hypotheses import layer_orders
from validation.diagnosis.supposed import Change, Compute, Given, Supposed
from validation.observers.likeness import NARROWER


def of_forward(played: Mapping[int, Played], number: int, stage: int, layers: Sequence[range]) -> Iterator[Supposed]:
    """What may have been wrong with a stage's inputs, or with what it computed of them."""
    yield from _of_inputs(played, number, stage)
    count = sum(map(len, layers))
    yield Supposed("mode", stage, "its module ran in evaluation mode", compute=_in_evaluation(layers[stage]))
    for name, dtype in NARROWER.items():
        yield Supposed("rounded", stage, f"it was computed in {name}", compute=_in_type(layers[stage], dtype))
    own = _pieces(played[number].model, layers[stage])
    if any(isinstance(part, DropoutBlock) for piece in own for part in piece.modules()):
        for text, change in _KEYS.items():
            yield Supposed("randomness", stage, text, compute=_keyed(layers[stage], change))
    for other in layer_orders(list(layers[stage]), count):
        listed = ", ".join(map(str, other))
        yield Supposed("partition", stage, f"it computed layers {listed}", compute=_of_layers(other))


def of_backward(stage: int) -> Iterator[Supposed]:
    """What may have been wrong with a stage's output gradients, or with what it kept for its backward."""
    for name, dtype in NARROWER.items():
        text = f"its output gradients are {name}-rounded"
        yield Supposed("rounded", stage, text, received=_through(dtype))
    yield Supposed("uninitialised", stage, "its output gradients are zero", received=torch.zeros_like)
    yield Supposed("overwritten", stage, "its kept inputs were zero in its backward", kept=torch.zeros_like)


def spoiled(stage: int) -> Supposed:
    """Something else in place of what was kept: which gradients does that reach?"""
    return Supposed("overwritten", stage, "its kept inputs were overwritten before its backward", kept=_noise)


# What random numbers may be drawn from by mistake: the layer's number in its stage, and the seed.
_KEYS: Mapping[str, Callable[[int, int, int], tuple[int, int]]] = {
    "its random numbers are those of layers counted from 0": lambda place, layer, seed: (place, seed),
    "its random numbers are those of layers counted from 1": lambda place, layer, seed: (layer + 1, seed),
    "its random numbers are those of the next seed": lambda place, layer, seed: (layer, seed + 1),
    "its random numbers are those of the seed before": lambda place, layer, seed: (layer, seed - 1),
}


def _pieces(model: Model, layers: Sequence[int]) -> list[nn.Module]:
    return [model.get_submodule(piece) for layer in layers for piece in model.layers[layer]]


def _keyed(layers: Sequence[int], change: Callable[[int, int, int], tuple[int, int]]) -> Compute:
    def compute(model: Model, inputs: Tensors) -> Tensors:
        parts = [part for piece in _pieces(model, layers) for part in piece.modules() if isinstance(part, DropoutBlock)]
        before = [(part.layer, part.seed) for part in parts]
        try:
            for place, part in enumerate(parts):
                part.layer, part.seed = change(place, part.layer, part.seed)
            return run_layers(model, layers, inputs)
        finally:
            for part, (layer, seed) in zip(parts, before, strict=True):
                part.layer, part.seed = layer, seed

    return compute


def _of_inputs(played: Mapping[int, Played], number: int, stage: int) -> Iterator[Supposed]:
    boundaries = played[number].boundaries
    for k, member in enumerate(boundaries[0].inputs[stage]):
        what = "input" if not k else "side input"
        if member.is_floating_point():
            for name, dtype in NARROWER.items():
                yield Supposed("rounded", stage, f"its {what} is {name}-rounded", given=_changed(k, _through(dtype)))
        kind = "uninitialised" if stage and member.is_floating_point() else "altered"
        yield Supposed(kind, stage, f"its {what} is zero", given=_changed(k, torch.zeros_like))
        other = "swapped-data" if not stage else "wrong-message"
        for j, one in enumerate(boundaries):
            text = f"its {what} is microbatch {j}'s"
            yield Supposed(other, stage, text, given=_replaced(k, one.inputs[stage][k]))
    for ago in range(1, number + 1):
        before = played[number - ago].boundaries
        if all(one.inputs for one in before):
            text = f"its input is that of {ago} operation{'s' * (ago > 1)} before"
            yield Supposed("stale-tensor", stage, text, given=_of_earlier([one.inputs[stage] for one in before]))
    for further in range(len(boundaries[0].inputs)):
        if stage and further and further != stage:
            inputs = [one.inputs[further] for one in boundaries]
            yield Supposed("wrong-message", stage, f"its input is stage {further}'s", given=_of_earlier(inputs))


def _changed(k: int, change: Change) -> Given:
    return lambda m, inputs: (*inputs[:k], change(inputs[k]), *inputs[k + 1 :])


def _replaced(k: int, by: Tensor) -> Given:
    def given(m: int, inputs: Tensors) -> Tensors | None:
        same = inputs[k].shape == by.shape and not torch.equal(inputs[k], by)
        return (*inputs[:k], by, *inputs[k + 1 :]) if same else None

    return given


def _of_earlier(inputs: Sequence[Tensors]) -> Given:
    return lambda m, own: inputs[m] if [x.shape for x in inputs[m]] == [x.shape for x in own] else None


def _of_layers(layers: Sequence[int]) -> Compute:
    return lambda model, inputs: run_layers(model, layers, inputs)


def _in_evaluation(layers: Sequence[int]) -> Compute:
    def compute(model: Model, inputs: Tensors) -> Tensors:
        before = model.training
        model.eval()
        try:
            return run_layers(model, layers, inputs)
        finally:
            model.train(before)

    return compute


def _in_type(layers: Sequence[int], dtype: torch.dtype) -> Compute:
    def compute(model: Model, inputs: Tensors) -> Tensors:
        with torch.autocast("cpu", dtype=dtype):
            made = run_layers(model, layers, inputs)
        return tuple(x.to(inputs[0].dtype) if inputs[0].is_floating_point() else x for x in made)

    return compute


def _through(dtype: torch.dtype) -> Change:
    return lambda tensor: tensor.to(dtype).to(tensor.dtype)


def _noise(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return torch.zeros_like(tensor)
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor)

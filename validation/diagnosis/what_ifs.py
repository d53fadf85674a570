"""What may go wrong at a stage, one list: the reference plays each through, and what it gives is compared."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, permutations

import torch
from torch import Tensor, nn

from pipeproof.core.cause import listed
from pipeproof.core.limits import FP32, precision_of
from pipeproof.core.tolerance import agrees
from pipeproof.diagnosis.played import Played, Setup
from pipeproof.diagnosis.what_if import Change, Compute, Given, Received, WhatIf
from pipeproof.observers.likeness import NARROWER, ROUNDED_TO, narrower
from pipeproof.reference.boundary import Gradients, Tensors, run_layers
from pipeproof.reference.model import DropoutBlock, Model

Outputs = Sequence[Tensor | None]
_FEW = 4  # layers whose every order is tried


def of_forward(played: Mapping[int, Played], number: int, stage: int, layers: Sequence[range]) -> Iterator[WhatIf]:
    """What may have been wrong with a stage's inputs, or with what it computed of them."""
    yield from _of_inputs(played, number, stage)
    yield from _of_computing(played[number].model, stage, layers, training=True)


def _of_computing(model: Model, stage: int, layers: Sequence[range], *, training: bool) -> Iterator[WhatIf]:
    own = list(layers[stage])
    mode = "evaluation" if training else "training"
    yield WhatIf("mode", stage, f"its module ran in {mode} mode", compute=_in_mode(own, not training))
    for name, dtype in NARROWER.items():
        yield WhatIf("rounded", stage, f"it was computed in {name}", compute=_in_type(own, dtype))
    if training and any(isinstance(part, DropoutBlock) for piece in _pieces(model, own) for part in piece.modules()):
        for text, change in _KEYS.items():
            yield WhatIf("randomness", stage, text, compute=_keyed(own, change))
    for other in layer_orders(own, sum(map(len, layers))):
        text = f"it computed layers {listed(other)}, expected {listed(own)}"
        yield WhatIf("partition", stage, text, compute=_of_layers(other))


Tried = dict[int, list[WhatIf]]


def computed(
    setup: Setup, played: Mapping[int, Played], number: int, stage: int, *, microbatch: int, seen: Outputs, tried: Tried
) -> tuple[str, str] | None:
    """The kind of cause and its words, if ``seen`` is all that ``stage`` gives when something is done wrongly.

    ``tried`` by stage: a stage does the same with every microbatch, so what the first one says holds for the next.
    """
    inputs, model = played[number].boundaries[microbatch].inputs[stage], played[number].model
    if stage not in tried:
        tried[stage] = list(_of_whole_model(setup, played, number, stage))
    for one in tried[stage]:
        made = _outputs(one.compute, model, inputs, training=setup.plan[number] != "eval")
        if made is not None and _all_agree(seen, made):
            tried[stage] = [one]
            return one.kind, one.text
    tried[stage] = []
    if draws(setup, played, number, stage):
        return "randomness", "the stage draws random numbers, and others gave this output"
    return None


def _of_whole_model(setup: Setup, played: Mapping[int, Played], number: int, stage: int) -> Iterator[WhatIf]:
    """What may have been wrong with what a stage computed, in another model as well."""
    layers, training = setup.layers, setup.plan[number] != "eval"
    if number - 1 in played:
        text = "its parameters are those of the operation before"
        before = copy.deepcopy(played[number - 1].model).train(training)
        yield WhatIf("stale-tensor", stage, text, compute=lambda _, inputs: run_layers(before, layers[stage], inputs))
    yield from _of_computing(played[number].model, stage, layers, training=training)
    for name, dtype in NARROWER.items():
        yield WhatIf("rounded", stage, f"it was computed in {name}", compute=_cast(layers[stage], dtype))


def _outputs(compute: Compute | None, model: Model, inputs: Tensors, *, training: bool = True) -> Tensors | None:
    """All that comes out; None if a stage does not take such inputs, so that this is not what ran."""
    assert compute is not None, "what changes no computation is not asked for"
    try:
        with torch.no_grad():
            return compute(copy.deepcopy(model).train(training), inputs)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None


def _all_agree(seen: Outputs, made: Tensors) -> bool:
    pairs = zip(seen, made, strict=False)
    alike = (a is not None and agrees(a, b.to(a.dtype), precision_of(b.dtype).least) for a, b in pairs)
    return len(seen) == len(made) and all(alike)


def draws(setup: Setup, played: Mapping[int, Played], number: int, stage: int) -> bool:
    """Whether a stage does something else in training, other than with statistics of the batch."""
    now, layers = played[number], setup.layers[stage]
    if setup.plan[number] == "eval" or any(True for _ in now.model.buffers()):
        return False
    inputs = now.boundaries[0].inputs[stage]
    trained, evaluated = (_outputs(_in_mode(layers, mode), now.model, inputs) for mode in (True, False))
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


def sent_in(name: str, stage: int) -> WhatIf:
    """All that a stage is given comes through the narrower type of that name."""
    return WhatIf("rounded", stage, f"what it is given is {name}-rounded", given=_all_through(ROUNDED_TO[name]))


def sent_back_in(name: str, stage: int) -> WhatIf:
    """All output gradients of a stage come through the narrower type of that name."""
    through = _received(_through(ROUNDED_TO[name]))
    return WhatIf("rounded", stage, f"its output gradients are {name}-rounded", received=through)


def of_sent(stage: int, inputs: Mapping[int, str], dtype: torch.dtype) -> Iterator[WhatIf]:
    """What may become of a stage's inputs on their way to it; ``inputs`` names what can be told apart."""
    for name in narrower(dtype):
        yield sent_in(name, stage)
        for k, one in inputs.items() if len(inputs) > 1 else ():
            given = _changed(k, _through(ROUNDED_TO[name]))
            yield WhatIf("rounded", stage, f"{one} is {name}-rounded", given=given)
    for k, other in permutations(inputs, 2):
        kind = "wrong-message" if stage else "swapped-data"
        yield WhatIf(
            kind, stage, f"in place of {inputs[k]} it is given {inputs[other]}", given=_in_place_of({k: other})
        )
        if k < other:
            text = f"{inputs[k]} and {inputs[other]} are exchanged"
            yield WhatIf(kind, stage, text, given=_in_place_of({k: other, other: k}))


def unfilled(stage: int, inputs: Mapping[int, str]) -> Iterator[WhatIf]:
    """That a stage was given zeros."""
    every: Given = lambda m, tensors: tuple(map(torch.zeros_like, tensors))  # noqa: E731
    yield WhatIf("uninitialised", stage, "what it is given is zero", given=every)
    for k, one in inputs.items() if len(inputs) > 1 else ():
        yield WhatIf("uninitialised", stage, f"{one} is zero", given=_changed(k, torch.zeros_like))


def of_sent_back(stage: int, outputs: Mapping[int, str], dtype: torch.dtype) -> Iterator[WhatIf]:
    """What may become of a stage's output gradients on their way to it; ``outputs`` names what can be told apart."""
    for name in narrower(dtype):
        yield sent_back_in(name, stage)
    yield WhatIf("uninitialised", stage, "its output gradients are zero", received=_received(torch.zeros_like))
    for k, one in outputs.items() if len(outputs) > 1 else ():
        yield from of_stream_back(stage, k, one, dtype)
    for k, other in combinations(outputs, 2):
        text = f"the gradients of {outputs[k]} and {outputs[other]} are exchanged"
        yield WhatIf("wrong-message", stage, text, received=_exchanged(k, other))


def of_stream_back(stage: int, k: int, one: str, dtype: torch.dtype) -> Iterator[WhatIf]:
    """What may become of the gradient of a stage's output ``k`` alone, which is called ``one``."""
    for name in narrower(dtype):
        received = _received(_through(ROUNDED_TO[name]), k)
        yield WhatIf("rounded", stage, f"the gradient of {one} is {name}-rounded", received=received)
    yield WhatIf("uninitialised", stage, f"the gradient of {one} is zero", received=_received(torch.zeros_like, k))


def of_backward(stage: int, outputs: Mapping[int, str], dtype: torch.dtype) -> Iterator[WhatIf]:
    """What may have been wrong with a stage's output gradients, or with what it kept for its backward."""
    yield from of_sent_back(stage, outputs, dtype)
    yield WhatIf("overwritten", stage, "its kept inputs were zero in its backward", kept=torch.zeros_like)


def spoiled(stage: int) -> WhatIf:
    """Something else in place of what was kept: which gradients does that reach?"""
    return WhatIf("overwritten", stage, "its kept inputs were overwritten before its backward", kept=_noise)


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


def _of_inputs(played: Mapping[int, Played], number: int, stage: int) -> Iterator[WhatIf]:
    boundaries = played[number].boundaries
    members = boundaries[0].inputs[stage]
    floating = {k: f"its input {k}" for k, member in enumerate(members) if member.is_floating_point()}
    yield from of_sent(stage, floating, played[number].dtype)
    for k, member in enumerate(members):
        what = "input" if len(members) == 1 else f"input {k}"
        kind = "uninitialised" if stage and member.is_floating_point() else "altered"
        yield WhatIf(kind, stage, f"its {what} is zero", given=_changed(k, torch.zeros_like))
        other = "swapped-data" if not stage else "wrong-message"
        for j, one in enumerate(boundaries):
            text = f"its {what} is microbatch {j}'s"
            yield WhatIf(other, stage, text, given=_replaced(k, one.inputs[stage][k]))
    for ago in range(1, number + 1):
        before = played[number - ago].boundaries
        if all(one.inputs for one in before):
            text = f"its input is that of {ago} operation{'s' * (ago > 1)} before"
            yield WhatIf("stale-tensor", stage, text, given=_of_earlier([one.inputs[stage] for one in before]))
    for further in range(len(boundaries[0].inputs)):
        if stage and further and further != stage:
            inputs = [one.inputs[further] for one in boundaries]
            yield WhatIf("wrong-message", stage, f"its input is stage {further}'s", given=_of_earlier(inputs))


def _changed(k: int, change: Change) -> Given:
    return lambda m, inputs: (*inputs[:k], change(inputs[k]), *inputs[k + 1 :])


def _replaced(k: int, by: Tensor) -> Given:
    def given(m: int, inputs: Tensors) -> Tensors | None:
        same = inputs[k].shape == by.shape and not torch.equal(inputs[k], by)
        return (*inputs[:k], by, *inputs[k + 1 :]) if same else None

    return given


def _all_through(dtype: torch.dtype) -> Given:
    return lambda m, inputs: _to_and_back(dtype, inputs)


def _in_place_of(others: Mapping[int, int]) -> Given:
    """Inputs, by number, that others stand in place of."""

    def given(m: int, inputs: Tensors) -> Tensors | None:
        if any(inputs[k].shape != inputs[other].shape for k, other in others.items()):
            return None
        return tuple(inputs[others[k]].detach() if k in others else one for k, one in enumerate(inputs))

    return given


def _received(change: Change, concerned: int | None = None) -> Received:
    """``change`` of the gradient of this output, or of all."""
    return lambda gradients: tuple(
        gradient if gradient is None or concerned not in (None, k) else change(gradient)
        for k, gradient in enumerate(gradients)
    )


def _exchanged(k: int, other: int) -> Received:
    def received(gradients: Gradients) -> Gradients:
        made = list(gradients)
        made[k], made[other] = gradients[other], gradients[k]
        return tuple(made)

    return received


def _of_earlier(inputs: Sequence[Tensors]) -> Given:
    return lambda m, own: inputs[m] if [x.shape for x in inputs[m]] == [x.shape for x in own] else None


def _of_layers(layers: Sequence[int]) -> Compute:
    return lambda model, inputs: run_layers(model, layers, inputs)


def _in_mode(layers: Sequence[int], training: bool) -> Compute:
    def compute(model: Model, inputs: Tensors) -> Tensors:
        before = model.training
        model.train(training)
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


def _to_and_back(dtype: torch.dtype, tensors: Tensors) -> Tensors:
    return tuple(_through(dtype)(tensor) if tensor.is_floating_point() else tensor for tensor in tensors)


def _noise(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return torch.zeros_like(tensor)
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor)


def _cast(layers: Sequence[int], dtype: torch.dtype) -> Compute:
    """All of the stage, parameters and activations, in another type."""

    def compute(model: Model, inputs: Tensors) -> Tensors:
        before = next(model.parameters()).dtype
        return _to(before, run_layers(model.to(dtype), layers, _to(dtype, inputs)))

    return compute


def _to(dtype: torch.dtype, tensors: Tensors) -> Tensors:
    return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors)


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

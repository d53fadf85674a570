"""What a stage may have computed in place of what it should: the reference does it, and the results are compared."""

import copy
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from reference.boundary import Tensors, run_layers
from reference.model import Model
from validation.address import agrees
from validation.case import Case
from validation.flow import Played
from validation.observe import data_for
from validation.stages import layers_of
from validation.tolerance import LEAST


def computed(
    case: Case, played: Mapping[int, Played], number: int, stage: int, *, microbatch: int, seen: Tensor
) -> tuple[str, str] | None:
    """The kind of cause and its words, if ``seen`` is what ``stage`` gives when something is done wrongly."""
    now = played[number]
    inputs = now.boundaries[microbatch].inputs[stage]
    layers = layers_of(case.split)[stage]
    training = case.plan[number] != "eval"
    before = played.get(number - 1)
    for kind, text, model, taken, mode in _alternatives(now.model, before, layers, case.layers, training):
        made = _run(model, taken, inputs, training=mode)
        if made is not None and agrees(seen, made, LEAST):
            return kind, text
    if training and _random(now.model, layers, inputs):
        return "randomness", "the stage draws random numbers, and others gave this output"
    return None


def other_target(case: Case, played: Mapping[int, Played], number: int, *, microbatch: int, seen: Tensor) -> str | None:
    """Whose targets give the loss ``seen`` with this microbatch's output, in words; None if nobody's do."""
    now = played[number]
    (output,) = now.boundaries[microbatch].outputs[-1]
    loss_fn = now.model.sum_loss if case.loss == "tokens" else now.model.mean_loss
    own = data_for(case, number)[microbatch].target
    for earlier in range(number, -1, -1):
        when = " of an earlier step" if earlier != number else ""
        for other, batch in enumerate(data_for(case, earlier)):
            if (other, earlier) != (microbatch, number) and batch.target.shape == own.shape:
                if agrees(seen, loss_fn(output, batch.target), LEAST):
                    return f"that of microbatch {other}'s targets{when}, expected microbatch {microbatch}'s"
    return None


def _alternatives(
    model: Model, before: Played | None, layers: range, count: int, training: bool
) -> Iterator[tuple[str, str, Model, range, bool]]:
    named = {True: "training", False: "evaluation"}
    yield "mode", f"its module ran in {named[not training]} mode", model, layers, not training
    if before is not None:
        yield "stale-tensor", "its parameters are those of the operation before", before.model, layers, training
    for start in range(count):
        for end in range(start + 1, count + 1):
            if range(start, end) != layers and abs(end - start - len(layers)) <= 1:
                text = f"it computed layers {start} to {end - 1}, expected {layers.start} to {layers.stop - 1}"
                yield "partition", text, model, range(start, end), training


def _run(model: Model, layers: range, inputs: Tensors, *, training: bool) -> Tensor | None:
    fresh = copy.deepcopy(model).train(training)
    try:
        with torch.no_grad():
            return run_layers(fresh, layers, inputs)[0]
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None  # these layers do not take such inputs, so they were not what ran


def _random(model: Model, layers: range, inputs: Tensors) -> bool:
    """Whether the layers do something else in training, other than with statistics of the batch."""
    if any(True for _ in model.buffers()):
        return False
    trained, evaluated = (_run(model, layers, inputs, training=mode) for mode in (True, False))
    return trained is not None and evaluated is not None and not torch.equal(trained, evaluated)

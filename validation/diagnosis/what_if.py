"""What a step would have given had something gone wrong in it: the reference does it, and the results are compared.

One microbatch at a time, cut into stages as the pipeline cuts them, with one thing changed on the way.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pipeproof.diagnosis.limits import CLOSE
from pipeproof.reference.boundary import Gradients, Tensors, run_layers
from pipeproof.reference.data import Batch
from pipeproof.reference.model import LossFn, Model

Change = Callable[[Tensor], Tensor]
Received = Callable[[Gradients], Gradients]
Given = Callable[[int, Tensors], Tensors | None]
Compute = Callable[[Model, Tensors], Tensors]
Made = Mapping[str, Tensor | None]  # gradients by name
End = tuple[Tensors, Tensors]  # what a stage starts from, and what comes out, the last stage's divided loss


def same_loss(one: float, other: float) -> bool:
    """Whether two numbers may be one loss."""
    return abs(one - other) <= CLOSE * abs(other)


@dataclass(frozen=True)
class WhatIf:
    """One thing that may have gone wrong at ``stage``: the kind of cause, its words, and what it changes.

    ``given`` is what reaches the stage in place of its right inputs, by microbatch; ``compute`` what the stage does;
    ``kept`` what becomes of its input before its backward, and ``received`` of the output gradients given to that.
    """

    kind: str
    stage: int
    text: str
    given: Given | None = None
    compute: Compute | None = None
    kept: Change | None = None
    received: Received | None = None

    @property
    def forward(self) -> bool:
        """Whether it can be seen in a loss."""
        return self.given is not None or self.compute is not None


@dataclass(frozen=True)
class Line:
    """The stages, one behind the other: a model and the layers of each. ``divisor`` divides the loss."""

    model: Model
    layers: Sequence[range]
    loss_fn: LossFn
    divisor: float

    def loss(self, what_if: WhatIf, microbatch: int, inputs: Tensors, batch: Batch) -> float | None:
        """The loss if ``what_if`` were true; ``inputs`` are those of its stage. None where it cannot be."""
        try:
            with torch.no_grad():
                given = self._given(what_if, microbatch, inputs)
                if given is None:
                    return None
                for stage in range(what_if.stage, len(self.layers)):
                    given = self._compute(what_if, stage, given)
                return float(self.loss_fn(given[0], batch.target))
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None  # stages that do not take such tensors never ran so

    def gradients(self, what_if: WhatIf, microbatch: int, batch: Batch) -> Made | None:
        """Every parameter's gradient if ``what_if`` were true, by name; a tied one's is of all stages together."""
        fresh = Line(self._fresh(), self.layers, self.loss_fn, self.divisor)
        try:
            return fresh._differentiated(what_if, microbatch, batch)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None

    def alone(self, what_if: WhatIf, inputs: Tensors, received: Gradients, batch: Batch) -> Made | None:
        """What its stage gives its own parameters, by name, if ``what_if`` were true of its backward.

        ``inputs`` and ``received`` are what reaches the stage from both sides. None where it cannot be.
        """
        fresh = Line(self._fresh(), self.layers, self.loss_fn, self.divisor)
        try:
            end = fresh._forward(what_if, what_if.stage, inputs, batch)
            fresh._backward(what_if, what_if.stage, end, received)
            return fresh._gradients()
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None

    @cached_property
    def _own(self) -> Model:
        return copy.deepcopy(self.model)

    def _fresh(self) -> Model:
        """A model of our own as ``model`` is, without gradients. Made once: a copy takes longer than most steps."""
        self._own.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, as_it_was in zip(self._own.buffers(), self.model.buffers(), strict=True):
                buffer.copy_(as_it_was)
        return self._own.train()

    def _differentiated(self, what_if: WhatIf, microbatch: int, batch: Batch) -> Made | None:
        ends: list[End] = []
        given: Tensors | None = batch.inputs
        for stage in range(len(self.layers)):
            if given is not None and stage == what_if.stage:
                given = self._given(what_if, microbatch, given)
            if given is None:
                return None
            ends.append(self._forward(what_if, stage, given, batch))
            given = ends[-1][1]
        received: Gradients = ()
        for stage in reversed(range(len(ends))):
            received = self._backward(what_if, stage, ends[stage], received)
        return self._gradients()

    def _forward(self, what_if: WhatIf, stage: int, inputs: Tensors, batch: Batch) -> End:
        leaves = tuple(x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs)
        outputs = self._compute(what_if, stage, leaves)
        if stage == self._last:
            outputs = (self.loss_fn(outputs[0], batch.target) / self.divisor,)
        return leaves, outputs

    def _backward(self, what_if: WhatIf, stage: int, end: End, received: Gradients) -> Gradients:
        """Adds to the parameters' gradients, and gives those in what the stage started from."""
        (leaves, outputs), here = end, stage == what_if.stage
        if here and what_if.kept is not None:
            leaves[0].data.copy_(what_if.kept(leaves[0].data))
        if stage == self._last:
            received = (torch.ones_like(outputs[0]),)
        elif here and what_if.received is not None:
            received = what_if.received(received)
        pairs = [(y, d) for y, d in zip(outputs, received, strict=True) if d is not None and y.requires_grad]
        if pairs:
            torch.autograd.backward([y for y, _ in pairs], [d for _, d in pairs])
        return tuple(leaf.grad for leaf in leaves)

    def _gradients(self) -> Made:
        return {name: p.grad for name, p in self.model.named_parameters(remove_duplicate=False)}

    @property
    def _last(self) -> int:
        return len(self.layers) - 1

    def _given(self, what_if: WhatIf, microbatch: int, inputs: Tensors) -> Tensors | None:
        return inputs if what_if.given is None else what_if.given(microbatch, inputs)

    def _compute(self, what_if: WhatIf, stage: int, inputs: Tensors) -> Tensors:
        if stage == what_if.stage and what_if.compute is not None:
            return what_if.compute(self.model, inputs)
        return run_layers(self.model, self.layers[stage], inputs)

"""A model stage: forward, backward, and its memory between them."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from pipeproof.pipeline.boundary import Gradients, Tensors, as_tensors
from pipeproof.pipeline.split import NamedUses, SplitBackward

LossFn = Callable[..., Tensor]  # loss_fn(output of the last stage, target) -> scalar; a tuple where that is one


class StageError(ValueError):
    """A stage module or loss function that a pipeline cannot train."""


class Goal(NamedTuple):
    """The purpose of the last stage's output. The loss is divided by ``divisor`` before its backward."""

    loss_fn: LossFn
    target: object
    divisor: float


class Stage(Protocol):
    """The runtime's view of a stage. A wrapper that observes or damages one is another Stage around it."""

    @property
    def index(self) -> int: ...

    @property
    def module(self) -> nn.Module: ...

    @property
    def losses(self) -> dict[int, Tensor]:
        """Undivided loss of each microbatch in this step; empty except on the last stage."""
        ...

    def begin(self) -> None:
        """Forget everything kept from an earlier step."""
        ...

    def forward(self, microbatch: int, inputs: Tensors, goal: Goal | None) -> Tensors:
        """Run the module. ``inputs`` are leaves; if they require a gradient they get one in ``backward``.

        The last stage is given a ``goal`` and returns nothing to hand on.
        """
        ...

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        """Add to the parameters' gradients; return a gradient, or None, per input. ``gradients``: one per output."""
        ...

    def backward_input(self, microbatch: int, gradients: Gradients) -> Gradients:
        """Do the first half of ``backward``: same result, but leave the parameters' gradients unchanged."""
        ...

    def backward_weight(self, microbatch: int) -> None:
        """Do the second half of ``backward``: add to the parameters' gradients."""
        ...


class ModuleStage:
    """A stage around an ``nn.Module``, differentiated by autograd.

    ``splits``: whether its backwards will be split. ``undeferred``: work that a split backward could not defer to its
    second half, and why (see split.py).
    """

    def __init__(self, module: nn.Module, index: int, *, splits: bool = False) -> None:
        self.module = module
        self.index = index
        self.losses: dict[int, Tensor] = {}
        self.undeferred: dict[str, None] = {}
        self._splits = splits
        self._kept: dict[int, tuple[Tensors, Tensors]] = {}
        self._uses: dict[int, set[Node]] = {}
        self._halves: dict[int, SplitBackward] = {}

    def begin(self) -> None:
        self.losses = {}
        self._kept, self._uses, self._halves = {}, {}, {}

    def forward(self, microbatch: int, inputs: Tensors, goal: Goal | None) -> Tensors:
        with NamedUses() if self._splits else nullcontext() as uses:
            made = self._call(inputs)
            outputs = as_tensors(made, f"the output of stage {self.index}")
        if uses is not None:
            self._uses[microbatch] = uses.views
        if goal is None:
            self._require_gradient(outputs)
        else:
            loss = self._loss(made, goal)
            self.losses[microbatch] = loss.detach()
            outputs = (loss / goal.divisor,)
        if torch.is_grad_enabled():
            self._kept[microbatch] = (inputs, outputs)
        return outputs if goal is None else ()

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        inputs, outputs = self._kept.pop(microbatch)
        if not gradients:
            torch.autograd.backward(outputs)  # the last stage starts from its own loss
        else:
            given = [(output, grad) for output, grad in zip(outputs, gradients, strict=True) if grad is not None]
            if given:
                torch.autograd.backward([output for output, _ in given], [grad for _, grad in given])
        return tuple([tensor.grad for tensor in inputs])

    def backward_input(self, microbatch: int, gradients: Gradients) -> Gradients:
        inputs, outputs = self._kept.pop(microbatch)
        half = self._halves[microbatch] = SplitBackward(inputs, outputs, self._uses.pop(microbatch))
        result = half.input(gradients or (torch.ones_like(outputs[0]),))
        self.undeferred |= dict.fromkeys(half.undeferred)
        return result

    def backward_weight(self, microbatch: int) -> None:
        self._halves.pop(microbatch).weight()

    def _call(self, inputs: Tensors) -> object:
        try:
            return self.module(*inputs)
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):
                raise
            raise StageError(
                f"stage {self.index} changes its input in place, but its input's gradient is needed: let the first "
                "module that touches it make a new tensor (inplace=False)"
            ) from error

    def _loss(self, output: object, goal: Goal) -> Tensor:
        loss = goal.loss_fn(output, goal.target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            observed = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise StageError(f"loss_fn returned {observed}: expected one scalar per microbatch")
        self._require_gradient((loss,), what="loss_fn's result")
        return loss

    def _require_gradient(self, outputs: Tensors, *, what: str = "its output") -> None:
        if not torch.is_grad_enabled() or any([output.requires_grad for output in outputs]):
            return
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                raise StageError(
                    f"stage {self.index} can never train {name}: {what} carries no gradient. Return the tensor that "
                    "the parameters were used for, neither detached nor turned into integers"
                )

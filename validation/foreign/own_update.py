"""What an optimizer makes of a rank's gradients: a copy of it takes the step on copies of the weights."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeproof.reference.copied import copied


@dataclass(frozen=True)
class OwnUpdate:
    """Parameters by the model's names, ``before`` the step and as they must be ``after`` it."""

    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]

    @staticmethod
    def by(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], *, factor: float) -> "OwnUpdate":
        """What ``optimizer`` is going to make of ``parameters``, whose gradients are multiplied by ``factor`` first.

        To be called before its step. It takes as much memory as they and its state do once more.
        """
        own = {id(one) for group in optimizer.param_groups for one in group["params"]}
        some = {name: one for name, one in parameters.items() if id(one) in own}
        before = {name: one.detach().clone() for name, one in some.items()}
        copies, again = copied((dict(some), optimizer))
        for name, one in copies.items():
            gradient = some[name].grad
            one.grad = None if gradient is None else gradient.detach() * factor
        with torch.enable_grad():
            again.step()
        return OwnUpdate(before, {name: one.detach() for name, one in copies.items()})

"""The reference's optimizer, and what sets its learning rate, from one operation to the next."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer


class Scheduler(Protocol):
    """What sets an optimizer's learning rate after each of its steps, as those of ``torch.optim.lr_scheduler`` do."""

    def step(self) -> None:
        """Set the rate of the next step."""

    def state_dict(self) -> dict[str, Any]:
        """What it goes on with."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Go on with that."""


MakesOptimizer = Callable[[nn.Module], Optimizer | tuple[Optimizer, Scheduler]]


class OptimizerError(Exception):
    """What is to make an optimizer makes something else."""


def _steps(one: object) -> bool:
    return all(callable(getattr(one, name, None)) for name in ("step", "state_dict", "load_state_dict"))


@dataclass
class Optimizing:
    """What ``func`` makes of a model, as it was in ``state``; what its last step made of that is ``left``.

    The states are the optimizer's and, if there is one, its scheduler's.
    """

    func: MakesOptimizer
    state: tuple[dict[str, Any], ...] = ()
    left: tuple[dict[str, Any], ...] = field(default=(), init=False)

    def __call__(self, model: nn.Module) -> Optimizer:
        """The optimizer of ``model``, whose step is followed by its scheduler's. Raises ``OptimizerError``."""
        made = self.func(model)
        optimizer, *schedulers = made if isinstance(made, tuple) else (made,)
        if not isinstance(optimizer, Optimizer) or len(schedulers) > 1 or not all(map(_steps, schedulers)):
            gave = " and ".join(type(one).__name__ for one in (optimizer, *schedulers))
            raise OptimizerError(f"gave {gave}: expected an optimizer, or a pair of it and the scheduler of its rate")
        for one, state in zip((optimizer, *schedulers), self.state, strict=bool(self.state)):
            one.load_state_dict(copy.deepcopy(state))

        def stepped(*_: Any) -> None:
            for one in schedulers:
                one.step()
            self.left = tuple(one.state_dict() for one in (optimizer, *schedulers))

        optimizer.register_step_post_hook(stepped)
        return optimizer

    def next(self) -> "Optimizing":
        """The same, going on with what the last step left."""
        return Optimizing(self.func, copy.deepcopy(self.left))

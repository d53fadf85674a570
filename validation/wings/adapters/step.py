"""A framework's step on one rank, seen by its adapter: one value, and the base for every kind of check."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from pipeproof.pipeline.action import Action
from pipeproof.reference.accumulation import Accumulation
from pipeproof.whitebox.handed_back import Gradient
from pipeproof.whitebox.task import WhiteBoxError
from pipeproof.wings.adapters.drawn import Drawn


class Sight(Protocol):
    """Receives the observable moments of a step."""

    def complete(self) -> None:
        """Gradients are complete: reduced, before clipping and before the optimizer."""

    def norm(self, norm: Any) -> None:
        """The framework reports this gradient norm, a number."""


def _unknown() -> None:
    """The order of actions, for a framework that does not report it."""


def _own(parameter: nn.Parameter) -> Tensor | None:
    """Return autograd's own sum."""
    return parameter.grad


@dataclass(frozen=True)
class FrameworkStep:
    """A framework's step on one rank.

    stages: this rank's modules by the number of the stage. name: maps a stage and a parameter's name in the module to
    the reference's name. gradients: before the optimizer's step, in their current place. losses: of microbatches so
    far, undivided; empty if this rank has none. watching: informs the sight while open.

    when: true if a call of a stage counts, asked at every call; None: all do. actions: this rank's actions in order, if
    reported. unfinished: the mistake if gradients were never complete; None: final gradients count. drawn: this rank's
    observed draws of data. max_norm: the norm to which gradients were clipped, if any. masters: the optimizer updates
    copies of weights in a wider type. sum_of: the current sums of microbatches' gradients on this rank. accumulation:
    how gradients are added, apart from replicas' shares; None: each in its own type, in the order of microbatches.
    """

    stages: Mapping[int, nn.Module]
    name: Callable[[int, str], str]
    gradients: Callable[[], Mapping[nn.Parameter, Gradient]]
    losses: Callable[[], Sequence[Any]]
    watching: Callable[[Sight], AbstractContextManager[object]]
    when: Callable[[], bool] | None = None
    actions: Callable[[], Sequence[Action] | None] = _unknown
    unfinished: WhiteBoxError | None = None
    drawn: Drawn = field(default_factory=Drawn)
    max_norm: Callable[[], float | None] = _unknown
    masters: bool = False
    sum_of: Callable[[nn.Parameter], Gradient] = _own
    accumulation: Accumulation | None = None

    def completes_at_its_end(self, steps: int) -> bool:
        """True if final gradients count after this many observed steps of the optimizer.

        Raises ``unfinished``.
        """
        if not steps and self.unfinished is not None:
            raise self.unfinished
        return not steps

    def sums(self, stage: int) -> dict[str, Gradient]:
        """Return the current sums of gradients in ``stage``, by the reference's names."""
        named = self.stages[stage].named_parameters(remove_duplicate=False)
        return {self.name(stage, name): self.sum_of(one) for name, one in named}

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter of this rank under each of its names in the reference."""
        for stage, module in self.stages.items():
            for name, parameter in module.named_parameters(remove_duplicate=False):
                yield self.name(stage, name), parameter


def telling(sight: Sight, norm: Callable[[Any], Any]) -> Callable[..., Any]:
    """Wrap an optimizer's step: notify ``sight`` before it, and then of the ``norm`` in its result, if present."""

    def around(step: Callable[..., Any], *given: Any, **named: Any) -> Any:
        sight.complete()
        result = step(*given, **named)
        if (found := norm(result)) is not None:
            sight.norm(found)
        return result

    return around

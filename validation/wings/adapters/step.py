"""A framework's step on one rank, as its adapter sees it: one value, of which every kind of check is made."""

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
    """Who is told when something of a step is to be seen."""

    def complete(self) -> None:
        """Gradients are complete now: reduced, not clipped, and not taken by an optimizer yet."""

    def norm(self, norm: Any) -> None:
        """The framework told this gradient norm, a number."""


def _unknown() -> None:
    """What a framework does in which order, where it does not tell."""


def _own(parameter: nn.Parameter) -> Tensor | None:
    """Where autograd adds."""
    return parameter.grad


@dataclass(frozen=True)
class FrameworkStep:
    """A framework's step on one rank.

    stages: this rank's modules by the number of the stage. name: what the reference calls a parameter, by its stage and
    its name in the module. gradients: those that the optimizer is about to take, where they are now. losses: those of
    the microbatches so far, undivided; empty where this rank has none. watching: while it is open, the sight is told.

    when: whether a call of a stage counts, asked at every call; None: all do. actions: what this rank did, in order, if
    the framework tells. unfinished: what is wrong if gradients were never complete; None: then those at the end count.
    drawn: what this rank drew of its data while it was watched, as far as the adapter sees that. max_norm: to what norm
    gradients were clipped, once they were, if at all. masters: the optimizer updates copies of the weights in a wider
    type. sum_of: what microbatches' gradients are being added to, as far as this rank has it. accumulation: how it adds
    gradients up, but for the shares of replicas; None: each in its own type, in the order of the microbatches.
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
        """Whether gradients count as they are at the end, after so many steps of the optimizer were seen.

        Raises ``unfinished``.
        """
        if not steps and self.unfinished is not None:
            raise self.unfinished
        return not steps

    def sums(self, stage: int) -> dict[str, Gradient]:
        """What the gradients of ``stage`` are being added to, as the reference calls them."""
        named = self.stages[stage].named_parameters(remove_duplicate=False)
        return {self.name(stage, name): self.sum_of(one) for name, one in named}

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter of this rank under each of its names, as the reference calls it."""
        for stage, module in self.stages.items():
            for name, parameter in module.named_parameters(remove_duplicate=False):
                yield self.name(stage, name), parameter


def telling(sight: Sight, norm: Callable[[Any], Any]) -> Callable[..., Any]:
    """Around an optimizer's step: ``sight`` hears before it, and then of the ``norm`` that what it gave has, if any."""

    def around(step: Callable[..., Any], *given: Any, **named: Any) -> Any:
        sight.complete()
        result = step(*given, **named)
        if (found := norm(result)) is not None:
            sight.norm(found)
        return result

    return around

"""A microbatch's contribution, divided among stages."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import Tensor

from pipeproof.reference.accumulation import Gradient
from pipeproof.reference.choices import Choices

Of = TypeVar("Of")
Stage = int
Site = tuple[Stage, str]  # one stage's copy of a parameter, by its name in the model


@dataclass(frozen=True)
class Contribution:
    """One microbatch's contribution: its undivided loss, and its gradient at every site.

    uses: for a parameter used several times, by its first name, each use's gradient, if known separately. inputs: by
    number, gradients of inputs that want one, as a stage hands them on. outputs: the recipe's named outputs. choices:
    of routers.
    """

    loss: float
    gradients: Mapping[Site, Gradient]
    uses: Mapping[str, tuple[Gradient, ...]] = field(default_factory=dict)
    inputs: Mapping[int, Gradient] = field(default_factory=dict)
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    choices: Choices = field(default_factory=dict)

    def under(self, owner: Mapping[str, Stage]) -> "Contribution":
        """Move every parameter name's site to its ``owner``."""
        return replace(self, gradients={(owner[name], name): part for (_, name), part in self.gradients.items()})


def by_stage(copies: Iterable[Site], of: Mapping[Site, Of]) -> dict[Stage, Of]:
    """Values per stage for one parameter, in order: its names within a stage are one use, and equal."""
    return {site[0]: of[site] for site in sorted(copies) if site in of}

"""A microbatch's contribution, divided among stages."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import Tensor

from pipeproof.reference.accumulation import Gradient, add_parts
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


def parts_of(contributions: Sequence[Contribution], shared: Mapping[str, Iterable[Site]]) -> dict[Site, list[Gradient]]:
    """Each microbatch's gradient at every site.

    ``shared``: all sites of a parameter with separate uses only. Its stages get a use each, in order, if there are as
    many uses as stages, and all microbatches separate them. Else one site has all.
    """
    parts = {site: [one.gradients[site] for one in contributions] for site in contributions[0].gradients}
    for name, sites in shared.items():
        stages: dict[Stage, list[Site]] = {}
        for site in sites:
            stages.setdefault(site[0], []).append(site)
        given = [one.uses.get(name, ()) for one in contributions]
        if len(stages) > 1 and all(len(one) == len(stages) for one in given):
            for use, (_, own) in enumerate(sorted(stages.items())):
                parts |= {site: [one[use] for one in given] for site in own}
    return parts


def with_copies_joined(
    each: Mapping[Site, list[Gradient]], tied: Iterable[Collection[Site]]
) -> dict[Site, list[Gradient]]:
    """Every replica's sums by site, with a parameter's sites added up in its first stage."""
    joined = dict(each)
    for copies in tied:
        shares = by_stage(copies, each)
        whole = [add_parts(own) for own in zip(*shares.values(), strict=True)]
        for site in (site for site in copies if site in each):
            joined[site] = whole if site[0] == min(shares) else [None] * len(whole)
    return joined


def by_stage(copies: Iterable[Site], of: Mapping[Site, Of]) -> dict[Stage, Of]:
    """Values per stage for one parameter, in order: its names within a stage are one use, and equal."""
    return {site[0]: of[site] for site in sorted(copies) if site in of}

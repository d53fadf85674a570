"""What one microbatch gives, and how it falls to the stages."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import Tensor

from pipeproof.reference.accumulation import Gradient, added
from pipeproof.reference.choices import Choices

Of = TypeVar("Of")
Stage = int
Site = tuple[Stage, str]  # one stage's copy of a parameter, by its name in the model


@dataclass(frozen=True)
class Contribution:
    """What one microbatch gives: its undivided loss, and its gradient in every site.

    uses: of a parameter that is used several times, by its first name, what each use gives, where that is known apart.
    inputs: by number, what flows to those inputs that want a gradient, as a stage hands it on. outputs: what the recipe
    names of the model's output. choices: what routers chose for it.
    """

    loss: float
    gradients: Mapping[Site, Gradient]
    uses: Mapping[str, tuple[Gradient, ...]] = field(default_factory=dict)
    inputs: Mapping[int, Gradient] = field(default_factory=dict)
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    choices: Choices = field(default_factory=dict)

    def under(self, owner: Mapping[str, Stage]) -> "Contribution":
        """The same, with every parameter name's site at that name's ``owner``."""
        return replace(self, gradients={(owner[name], name): part for (_, name), part in self.gradients.items()})


def parts_of(contributions: Sequence[Contribution], shared: Mapping[str, Iterable[Site]]) -> dict[Site, list[Gradient]]:
    """What every microbatch gives in every site.

    ``shared``: all sites of a parameter of which nothing but its uses is apart. Its stages have a use of it each, in
    their order, where there are as many uses as stages, and all microbatches tell them apart. Else one site has them.
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
    """The sums of every replica by site, with what sites of one parameter have added up in the first stage of them."""
    joined = dict(each)
    for copies in tied:
        shares = by_stage(copies, each)
        whole = [added(own) for own in zip(*shares.values(), strict=True)]
        for site in (site for site in copies if site in each):
            joined[site] = whole if site[0] == min(shares) else [None] * len(whole)
    return joined


def by_stage(copies: Iterable[Site], of: Mapping[Site, Of]) -> dict[Stage, Of]:
    """What stages have of one parameter, in their order: names of it within a stage are one use, and have the same."""
    return {site[0]: of[site] for site in sorted(copies) if site in of}

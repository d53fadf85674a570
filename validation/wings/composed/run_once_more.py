"""What a stage's calls give when all of them are run once more: as far apart as that, no two runs are the same."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeproof.core.limits import precision_of
from pipeproof.core.tolerance import Floor
from pipeproof.observers.elements import in_fp64
from pipeproof.reference.step import Contribution, Gradient, Site

Add = Callable[[Contribution, Mapping[Site, Gradient]], Mapping[Site, Gradient]]


@dataclass(frozen=True)
class RunOnceMore:
    """The sums of another run, and the norm of the smallest part of each: kernels that add up in any order differ."""

    sums: Mapping[Site, Gradient]
    smallest: Mapping[Site, float]

    @staticmethod
    def of(contributions: Iterable[Contribution], add: Add) -> "RunOnceMore":
        """It, of what one microbatch after another gives; ``add`` adds a contribution to sums."""
        sums: Mapping[Site, Gradient] = {}
        norms: dict[Site, list[Tensor]] = {}
        for one in contributions:
            for site, part in one.gradients.items():
                if part is not None:
                    norms.setdefault(site, []).append(in_fp64(part).norm())
            sums = add(one, sums)
        return RunOnceMore(sums, {site: torch.stack(each).min().item() for site, each in norms.items()})

    def floor(self, site: Site, *, apart: float, size: float, narrowest: torch.dtype | None = None) -> Floor | None:
        """What another run makes of a gradient of this ``size``, which is so far ``apart``; None where it makes none.

        ``narrowest``: the type in which the stage computes, if that is narrower. Kernels differ by its roundings then.
        """
        other = self.sums.get(site)
        if other is None:
            return None
        fault = self.smallest[site] / size if size else math.inf
        own, narrow = precision_of(other.dtype), precision_of(narrowest or other.dtype)
        return Floor(apart, 0.0, fault, replace(narrow, least=own.least) if narrow.unit > own.unit else own)

"""Sums of gradients as ``Pairings``: contributions that are known as they are, without the graphs that made them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipeproof.reference.data import Batch
from pipeproof.reference.pairing import Contributed, Flow
from pipeproof.reference.step import Gradient, Site, Stage


class Sums:
    """What each of ``made`` gives, and ``before``, the parameters as far as they are known, all by site.

    Where ``made`` is one for all of ``batches``, their sum is all there is. ``unpaired``: why pairs are not known.
    """

    def __init__(
        self,
        made: Sequence[Mapping[Site, Gradient]],
        before: Mapping[Site, Tensor],
        batches: Sequence[Batch],
        *,
        unpaired: str,
    ) -> None:
        self._made, self._before, self.batches, self.unpaired = made, before, batches, unpaired
        self.stages = 1 + max((stage for stage, _ in made[0]), default=0)

    @property
    def microbatches(self) -> int:
        return len(self._made)

    def parameters(self, stage: Stage) -> Mapping[str, Tensor]:
        """The parameters of ``stage`` that have a gradient."""
        own = {site: one for site, one in self._made[0].items() if site[0] == stage and one is not None}
        return {site[1]: self._before.get(site, torch.zeros_like(one)) for site, one in own.items()}

    def contribution(self, stage: Stage, j: int) -> Contributed:
        """What ``made[j]`` gives."""
        own = {site[1]: one for site, one in self._made[j].items() if site[0] == stage}
        return Contributed({name: None if one is None else one.cpu().double() for name, one in own.items()}, ())

    def paired(self, stage: Stage, i: int, flows: Sequence[Flow]) -> list[Contributed | None]:
        """Nothing: what flows where is not known."""
        return [None] * len(flows)

    def seed(self, stage: Stage, j: int) -> Flow:
        """A flow that fits nothing."""
        return lambda _: None

    def flow(self, stage: Stage, j: int) -> Flow:
        """A flow that fits nothing."""
        return lambda _: None

"""Summed gradients for ``Pairings``: known contributions without their graphs."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipeproof.reference.data import Batch
from pipeproof.reference.pairing import Contributed, Flow
from pipeproof.reference.step import Gradient, Site, Stage


class Sums:
    """Contributions ``made``, and ``before``, the parameters as far as known, all by site.

    A single one for all ``batches`` is their sum. ``unpaired``: why pairs are unknown.
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
        """Parameters with a gradient on the stage."""
        own = {site: one for site, one in self._made[0].items() if site[0] == stage and one is not None}
        return {site[1]: self._before.get(site, torch.zeros_like(one)) for site, one in own.items()}

    def contribution(self, stage: Stage, j: int) -> Contributed:
        """Gradients in ``made[j]``."""
        own = {site[1]: one for site, one in self._made[j].items() if site[0] == stage}
        return Contributed({name: None if one is None else one.cpu().double() for name, one in own.items()}, ())

    def pair(self, stage: Stage, i: int, flows: Sequence[Flow]) -> list[Contributed | None]:
        """Nothing: flow between stages is unknown."""
        return [None] * len(flows)

    def seed(self, stage: Stage, j: int) -> Flow:
        """Return a flow that never fits."""
        return lambda _: None

    def flow(self, stage: Stage, j: int) -> Flow:
        """Return a flow that never fits."""
        return lambda _: None

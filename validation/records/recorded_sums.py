"""Gradients of a record as ``Pairings``: sums that are known as they are, without the graphs that made them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from reference.data import Batch
from reference.pairing import Contributed, Flow
from reference.step import Gradient, Site, Stage

_UNKNOWN = Batch((), torch.empty(0), 0)  # nobody kept what the microbatches were


class RecordedSums:
    """What a record says of one operation. All microbatches together are taken for one: their sum is all there is.

    ``gradients`` are what the operation gives, and ``before`` the parameters that it began with as far as they are
    known, both by site.
    """

    microbatches = 1
    unpaired = "a record has only sums over all microbatches: SingleDevice, beside the job, tells them apart"

    def __init__(self, gradients: Mapping[Site, Gradient], before: Mapping[Site, Tensor], microbatches: int) -> None:
        self._gradients, self._before = gradients, before
        self.stages = 1 + max((stage for stage, _ in gradients), default=0)
        self.batches = [_UNKNOWN] * microbatches

    def parameters(self, stage: Stage) -> Mapping[str, Tensor]:
        """The parameters of ``stage`` that have a gradient."""
        own = {site: one for site, one in self._gradients.items() if site[0] == stage and one is not None}
        return {site[1]: self._before.get(site, torch.zeros_like(one)) for site, one in own.items()}

    def contribution(self, stage: Stage, j: int) -> Contributed:
        """What all microbatches give together."""
        own = {site[1]: one for site, one in self._gradients.items() if site[0] == stage}
        return Contributed({name: None if one is None else one.cpu().double() for name, one in own.items()}, ())

    def paired(self, stage: Stage, i: int, flows: Sequence[Flow]) -> list[Contributed | None]:
        """Nothing: what flows where is not recorded."""
        return [None] * len(flows)

    def within(self, stage: Stage, name: str) -> Mapping[tuple[int, int], Tensor]:
        """Nothing, for the same reason."""
        return {}

    def seed(self, stage: Stage, j: int) -> Flow:
        """A flow that fits nothing."""
        return lambda _: None

    def flow(self, stage: Stage, j: int) -> Flow:
        """A flow that fits nothing."""
        return lambda _: None

"""An update: the gradients that one optimizer step used, and all that attribution explains them from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from reference.pairing import Pairing, Pairings
from reference.step import Gradient, Site, Stage


@dataclass(frozen=True)
class Update:
    """All that attribution works from.

    ``observed`` and ``expected``: an update's gradients by site, after tied copies are summed. ``now``: the operation
    that made the update; ``earlier``: the accumulating calls before it, latest first; ``before``: the last operation
    of the update before, and ``old``, that update's gradients. ``tied``: parameters with copies in several stages, the
    name by stage. ``evaluated``: evaluations before the update, as if they had been
    steps. ``placement``: each stage's rank, or the first of several; ``ranks``: how many a replica has, if somebody
    knows; ``replicas``: how many of the model there are.
    """

    observed: Mapping[Site, Gradient]
    expected: Mapping[Site, Gradient]
    now: Pairings
    earlier: tuple[Pairing, ...] = ()
    before: Pairing | None = None
    old: Mapping[Site, Gradient] = field(default_factory=dict)
    tied: Sequence[Mapping[Stage, str]] = ()
    evaluated: Sequence[Pairing] = ()
    placement: Sequence[int] = ()
    ranks: int | None = None
    replicas: int = 1

    @cached_property
    def shared(self) -> frozenset[Site]:
        """The sites of parameters that have copies in several stages."""
        return frozenset(site for copies in self.tied for site in copies.items())

    @property
    def own(self) -> Pairing:
        """``now``, where there is a step before."""
        assert isinstance(self.now, Pairing), "only plans of our own have a step before"
        return self.now

    @cached_property
    def old_data(self) -> Pairing | None:
        """The step before's microbatches in today's model."""
        return None if self.before is None else self.own.with_batches(self.before.batches)

    @cached_property
    def old_weights(self) -> Pairing | None:
        """Today's microbatches in the step before's model."""
        return None if self.before is None else self.before.with_batches(self.now.batches)

"""What there is of a record's sums beside the sums themselves: who holds what, and what each rank has of it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pipeproof.diagnosis.members import Replicas
from pipeproof.observers.recording import Site
from pipeproof.reference.step import Gradient


@dataclass(frozen=True)
class RecordSums:
    """What a record adds to the sums that it consists of.

    ``copies``: of each parameter that several hold, with their stages, each rank's gradient. ``left_out``: wrong
    gradients that were not kept.
    ``max_norm`` is what gradients are clipped to, where somebody says so. ``alike``: all microbatches are the same, and
    known together alone. ``replicas``: who worked on what, where that is known. ``places``: the ranks that hold a
    parameter, with the stage that each has it in, but for those held in parts. ``begun``: by name the ranks and
    stages that had something in ``.grad`` before the step; None where that is not known of all.
    """

    copies: Mapping[tuple[str, tuple[int, ...]], Mapping[int, Gradient]] = field(default_factory=dict)
    left_out: int = 0
    max_norm: float | None = None
    alike: bool = False
    replicas: Replicas | None = None
    places: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    begun: Mapping[str, Collection[tuple[int, int]]] | None = None

    def holders(self, stage: int) -> set[int]:
        """The ranks that hold parameters of ``stage``."""
        return {rank for at in self.places.values() for rank, where in at if where == stage}

    def held(self, rank: int, sites: Collection[Site]) -> frozenset[Site] | None:
        """Those of ``sites`` whose gradients ``rank`` has; None where any is held in parts, or by nobody known."""
        if any(not self.places.get(name) for _, name in sites):
            return None
        return frozenset(site for site in sites if rank in dict(self.places[site[1]]))

"""What a diagnosis of a recorded step rests on: what was seen of the step, and what was expected."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from reference.passage import Passage
from reference.step import Expected, Gradient, Site
from validation.diagnosis.atoms import Update
from validation.diagnosis.evidence import Evidence, Sums
from validation.judging.verdict import Verdict
from validation.observers.sketch import Sketch
from validation.records.record import RankStage, RecordedOperation
from validation.records.recorded_sums import RecordedSums


@dataclass(frozen=True)
class Seen:
    """A step by its parameters' names, as far as it was compared.

    ``begun``: what the gradients were before it, or those of the step before. ``norms`` of each rank, None from one
    that reports none. ``left_out`` wrong gradients are not among ``gradients``. ``copies``: each rank's gradient of
    what several hold.
    """

    gradients: Mapping[str, Gradient]
    begun: Mapping[str, Gradient]
    norms: Sequence[float | None]
    left_out: int = 0
    copies: Mapping[str, Mapping[int, Gradient]] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """A step that was held against ``due``, the operation ``number`` of a record, with the places of its parameters.

    ``max_norm`` is what the record clips to, where it says so. ``model``: where there is more of the reference than a
    record, the step as attribution sees it beside that.
    """

    due: RecordedOperation
    seen: Seen
    places: Mapping[str, Sequence[RankStage]]
    number: int = 0
    max_norm: float | None = None
    model: "Callable[[Step], Update] | None" = None

    def evidence(self, verdict: Verdict) -> Evidence:
        """All that is known of the step, on which ``verdict`` is."""
        microbatches, alike = len(self.due.microbatches), len(set(self.due.microbatches)) == 1
        copies = {(n, tuple(stage for _, stage in self.places[n])): each for n, each in self.seen.copies.items()}
        alike = alike and self.model is None and microbatches > 1
        return Evidence(
            verdict,
            self.placement,
            microbatches,
            len(self.seen.norms),
            gradients=self.gradients,
            norms=self.seen.norms,
            number=self.number,
            operation=self.due.operation,
            due=self,
            sums=Sums(copies, self.seen.left_out, self.max_norm, alike),
            strange=any(m.what == "held" and m.due == 0 for m in verdict.mismatches),
            renamed_by="rename=",
        )

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of every stage; a stage without parameters is where the one before it is."""
        ranks = {stage: rank for found in self.places.values() for rank, stage in found[:1]}
        found: list[int] = []
        for stage in range(1 + max(ranks, default=0)):
            found.append(ranks.get(stage, found[-1] if found else 0))
        return tuple(found)

    def site(self, name: str) -> Site:
        """Where a parameter is: in the only stage, if nobody says."""
        found = self.places.get(name)
        return (found[0][1] if found else 0), name

    @cached_property
    def gradients(self) -> Mapping[Site, Gradient]:
        """Those that were seen."""
        return {self.site(name): gradient for name, gradient in self.seen.gradients.items()}

    @cached_property
    def expected(self) -> Expected:
        """What the step must give, of what was compared."""
        due = self.due
        gradients = {self.site(name): due.gradients[name] for name in self.seen.gradients}
        return Expected(due.operation, due.losses, due.loss or 0.0, gradients=gradients, norm=due.norm)

    @cached_property
    def update(self) -> Update:
        """The step as attribution sees it."""
        return self.of_record if self.model is None else self.model(self)

    @property
    def of_record(self) -> Update:
        """The same, where there is nothing but the record."""
        due, begun = self.expected.gradients, {self.site(name): one for name, one in self.seen.begun.items()}
        before = {site: self.due.before[site[1]] for site in due if site[1] in self.due.before}
        now = RecordedSums(due, before, len(self.due.microbatches))
        return Update(self.gradients, due, now, old=begun, placement=self.placement)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self.due.before

    @property
    def divisor(self) -> None:
        """Nobody knows it."""

    def ends(self, stage: int) -> Collection[str]:
        """Nothing: a record knows no places in a model."""
        return ()

    def lacks(self, microbatch: int, seen: Sketch) -> bool:
        """Unknown: no tensor was kept."""
        return False

    def played(self, microbatch: int, passages: Sequence[Passage]) -> None:
        """Nobody can say."""

"""What a diagnosis of a recorded step rests on: the broken laws, what was seen of the step, and what was expected."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from pipeline.schedule import Schedule
from reference.step import Expected, Gradient, Site
from validation.diagnosis.attribution import Attribution, attribute
from validation.diagnosis.rules.update import Factor
from validation.diagnosis.update import Update
from validation.judging.judge import one_thread
from validation.judging.tolerance import precision_of
from validation.judging.verdict import Mismatch, Size, Verdict
from validation.observers.observed import Observed, RankOperation
from validation.records.record import Place, RecordedOperation
from validation.records.recorded_sums import RecordedSums

_ROOM = 16  # roundings of a parameter that stand between its movement and what is seen of it
_OF_GRADIENTS = ("gradient", "presence")


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
class RecordFacts:
    """A failed verdict on a step that was held against ``due``, the operation ``number`` of a record.

    ``places`` has the rank and stage of each parameter; ``max_norm`` is what the record clips to, where it says so.
    ``model``: where there is more of the reference than a record, the step as attribution sees it beside that.
    """

    verdict: Verdict
    due: RecordedOperation
    seen: Seen
    places: Mapping[str, Sequence[Place]]
    number: int = 0
    max_norm: float | None = None
    model: "Callable[[RecordFacts], Update] | None" = None
    unseen: frozenset[int] = field(default=frozenset())
    recording: None = None

    @property
    def operation(self) -> str:
        return self.due.operation

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def microbatches(self) -> int:
        return len(self.due.microbatches)

    @property
    def ranks(self) -> int:
        return len(self.seen.norms)

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

    def differs(self, law: str) -> bool:
        """Whether ``law`` has a mismatch."""
        return any(mismatch.law == law for mismatch in self.verdict.mismatches)

    @cached_property
    def expected(self) -> Expected:
        """What the step must give, of what was compared."""
        gradients = {self.site(name): self.due.gradients[name] for name in self.seen.gradients}
        return Expected(self.operation, self.due.losses, self.due.loss or 0.0, gradients=gradients, norm=self.due.norm)

    @cached_property
    def observed(self) -> Observed:
        """What ranks are known to have given: all gradients from the first, which nothing depends on."""
        gradients = {self.site(name): gradient for name, gradient in self.seen.gradients.items()}
        rows = [
            RankOperation(self.operation, (), (), norm=norm, gradients=gradients if rank == 0 else {})
            for rank, norm in enumerate(self.seen.norms)
        ]
        nothing = tuple(RankOperation("eval", (), ()) for _ in range(self.number))
        schedule = Schedule("recorded", self.microbatches, self.placement, tuple(() for _ in rows))
        return Observed(schedule, tuple((*nothing, row) for row in rows))

    def judged(self, law: str) -> bool:
        """Whether anything was entered under ``law``."""
        return self.verdict.law(law).checked > 0

    def agrees(self, law: str) -> bool:
        """Whether all that was entered under ``law`` held, which was something."""
        return self.verdict.law(law).outcome == "pass"

    @property
    def indistinct(self) -> bool:
        """Whether a sum of some microbatches is a multiple of the sum of all."""
        return self.model is None and self.microbatches > 1 == len(set(self.due.microbatches))

    @cached_property
    def attribution(self) -> Attribution | None:
        """What the gradients are made of; None where they are right, or nobody knows them."""
        if not self.seen.gradients or not any(map(self.differs, _OF_GRADIENTS)):
            return None
        with one_thread():
            return attribute(self.update)

    @property
    def unexplained(self) -> tuple[str, ...]:
        """What attribution says of gradients that it finds nothing for, and what it could not try."""
        if self.attribution is None:
            return ()
        if self.indistinct:
            return ("all microbatches are the same: a multiple of their sum may be a sum of fewer, or more, of them",)
        if self.attribution.right:
            return (
                "gradients are off by more than rounding explains, and are made of what they should be nevertheless",
            )
        if not self.attribution.unknown:
            return ()
        return tuple(filter(None, (*self.attribution.unknown, getattr(self.update.now, "unpaired", ""))))

    @cached_property
    def update(self) -> Update:
        """The step as attribution sees it."""
        return self.of_record if self.model is None else self.model(self)

    @cached_property
    def moved(self) -> Mapping[Site, Factor]:
        """How many times as far as it should have each parameter moved that is not where it should be."""
        found = [m for m in self.verdict.mismatches if m.law == "updated-parameters" and m.parameter is not None]
        return {self.site(m.parameter): _moved(m, self.due.before[m.parameter]) for m in found if m.parameter}

    @property
    def begun(self) -> Mapping[Site, Gradient]:
        """What the step began with."""
        return {self.site(name): gradient for name, gradient in self.seen.begun.items()}

    @property
    def of_record(self) -> Update:
        """The same, where there is nothing but the record."""
        seen, due = self.observed.gradients(self.number), self.expected.gradients
        before = {site: self.due.before[site[1]] for site in due if site[1] in self.due.before}
        now = RecordedSums(due, before, self.microbatches)
        return Update(seen, due, now, old=self.begun, placement=self.placement)


def _moved(mismatch: Mismatch, before: Tensor) -> Factor:
    """How many times as far as it should have a parameter moved; NaN where it went elsewhere."""
    seen, due = mismatch.found, mismatch.due
    if not isinstance(seen, Size) or not isinstance(due, Size) or seen.norm is None or not due.norm:
        return Factor(math.nan, 0.0)
    value, cosine = (0.0, 1.0) if not seen.norm else (seen.factor or 0.0, seen.cosine or 0.0)
    noise = _ROOM * precision_of(before.dtype).unit * (due.began or 0.0) / due.norm
    rest = seen.norm * math.sqrt(max(0.0, 1.0 - cosine**2))
    multiple = rest <= max(1e-3, noise) * max(seen.norm, due.norm)
    return Factor(value if multiple else math.nan, noise)

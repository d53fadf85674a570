"""What a diagnosis rests on: the broken laws, the reference's operations, and what a recording shows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from reference.step import Expected
from validation.diagnosis.attribution import Attribution, attribute_run
from validation.diagnosis.broken import Broken
from validation.diagnosis.divergence import Divergence, Ground, Positions, divergences
from validation.diagnosis.flow import Played, parts_of, play
from validation.diagnosis.hypotheses import Tried
from validation.diagnosis.interference import Known, broken_between
from validation.diagnosis.setup import Setup
from validation.diagnosis.sums import broken_additions
from validation.judging.oracle import copies_apart
from validation.judging.tolerance import PRECISIONS
from validation.judging.verdict import Verdict
from validation.observers.observed import Observed
from validation.observers.recording import Addition, Recording, Site

Gradients = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Evidence:
    """A failed verdict with the run that it is about. What is costly is worked out when first asked for."""

    setup: Setup
    observed: Observed
    verdict: Verdict

    @property
    def number(self) -> int:
        """The operation that disagrees."""
        return min(mismatch.operation for mismatch in self.verdict.mismatches) - 1

    @property
    def operation(self) -> str:
        return self.setup.plan[self.number]

    @property
    def stages(self) -> int:
        return self.setup.stages

    @property
    def microbatches(self) -> int:
        return self.setup.microbatches

    @property
    def ranks(self) -> int:
        return self.setup.ranks

    @property
    def unseen(self) -> tuple[int, ...]:
        """No stage: our own runtime says what every one did, or of none of them."""
        return ()

    @cached_property
    def concerned(self) -> range:
        """The operations whose gradients the failing one uses; an error may lie in any of them."""
        updates = [k for k in range(self.number) if self.setup.plan[k] == "train"]
        return range(updates[-1] + 1 if updates else 0, self.number + 1)

    @cached_property
    def played(self) -> list[Played]:
        """The reference's operations up to the failing one."""
        return play(self.setup, self.observed, self.number)

    @property
    def expected(self) -> Expected:
        """What the failing operation must give."""
        return self.played[self.number].expected

    @cached_property
    def recording(self) -> Recording | None:
        """The failing operation's; None where the run was not recorded."""
        return self.observed.recording(self.number)

    @property
    def limit(self) -> float:
        """The largest relative error that rounding explains, as the laws measured it."""
        least = PRECISIONS[self.setup.dtype].least
        return max(
            [
                least,
                *(m.limit for m in self.verdict.mismatches if m.limit is not None),
            ]
        )

    @cached_property
    def divergences(self) -> list[Divergence]:
        """The roots in the first operation concerned that has any."""
        return self._first[1]

    @property
    def diverged(self) -> int:
        """The operation that the divergences are of."""
        return self._first[0]

    @cached_property
    def _first(self) -> tuple[int, list[Divergence]]:
        each = ((number, self._divergences(number)) for number in self.concerned)
        return next((one for one in each if one[1]), (self.number, []))

    @cached_property
    def broken_sums(self) -> list[Broken]:
        """What is wrong with sums of gradients, from the last stage down, as gradients flow."""
        found: list[Broken] = []
        start: dict[int, Gradients] = {}
        for number in self.concerned:
            recording = self.observed.recording(number)
            if recording is None or self.setup.plan[number] == "eval":
                continue
            for stage in reversed(range(self.setup.stages)):
                found += self._broken(number, stage, recording, start)
        return found

    @cached_property
    def tried(self) -> Tried:
        """What each stage may have computed in place of what it should, as far as that is still open."""
        return {}

    @cached_property
    def shared(self) -> frozenset[Site]:
        """The copies of parameters that several stages hold."""
        return frozenset(site for copies in self.tied for site in copies)

    @cached_property
    def tied(self) -> list[list[Site]]:
        """For each parameter that several stages hold, its copies."""
        return [list(copies.items()) for copies in copies_apart(self.played[0].model, self.setup.owner)]

    @cached_property
    def attribution(self) -> Attribution | None:
        """What the gradients of the update that the failing operation is part of are made of; None without one."""
        updates = [k for k in range(self.number, len(self.setup.plan)) if self.setup.plan[k] == "train"]
        if not updates:
            return None
        played = self.played if updates[0] == self.number else play(self.setup, self.observed, updates[0])
        return attribute_run(self.setup, self.observed, played)

    @property
    def unexplained(self) -> tuple[str, ...]:
        """What attribution says of gradients that it finds nothing for."""
        return self.attribution.unknown if self.attribution is not None else ()

    def differs(self, law: str) -> bool:
        """Whether ``law`` has a mismatch."""
        return any(mismatch.law == law for mismatch in self.verdict.mismatches)

    def earlier(self, stage: int) -> Gradients:
        """A stage's gradients in the training step before the failing one."""
        steps = [k for k in range(self.number) if self.setup.plan[k] == "train"]
        return of_stage(self.observed.gradients(steps[-1]), stage) if steps else {}

    def _divergences(self, number: int) -> list[Divergence]:
        recording = self.observed.recording(number)
        if recording is None:
            return []
        earlier = [one.tensors() for one in reversed(self.played[:number])]
        ground = Ground(self.played[number].tensors(), earlier, self.limit)
        executed = [rank[number].executed for rank in self.observed.ranks]
        slots = {str(action): slot for actions in executed for slot, action in enumerate(actions)}
        return divergences(recording, ground, Positions(self.observed.schedule.placement, slots))

    def _broken(self, number: int, stage: int, recording: Recording, start: dict[int, Gradients]) -> list[Broken]:
        additions: Sequence[Addition] = recording.additions.get(stage, ())
        expected = self.played[number].expected
        again = [m for (s, m), ran in recording.graphs.items() if s == stage and len(ran) > 1]
        found = broken_additions(stage, additions, parts_of(expected), repeated=again)
        last: Gradients = additions[-1].after if additions else {}
        end = of_stage(recording.summed, stage) or last
        begun = start.get(stage, {})
        known = Known(earlier=self.earlier(stage), parameters=of_stage(recording.parameters, stage))
        found += broken_between(stage, additions, start=begun, end=end, known=known)
        start[stage] = last if self.setup.plan[number] == "accumulate" else {}
        return found


def of_stage(gradients: Mapping[Site, Tensor | None], stage: int) -> dict[str, Tensor | None]:
    """One stage's part of ``gradients``, by name."""
    return {name: gradient for (owner, name), gradient in gradients.items() if owner == stage}

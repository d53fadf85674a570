"""The cause of a checked step's failure: rank 0 looks for it, in what all ranks kept, and tells the others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from reference.step import Gradient
from validation.diagnosis.atoms import Update
from validation.diagnosis.diagnose import explained as explained_evidence
from validation.diagnosis.diagnose import sought
from validation.diagnosis.evidence import Evidence
from validation.judging.ledger import NOWHERE
from validation.judging.oracle import copies_apart
from validation.judging.verdict import Verdict
from validation.records.rank_part import Kept, Notes, address
from validation.records.record import RankStage, Record
from validation.records.record_evidence import Seen, Step
from validation.records.single_device import SingleDevice
from validation.records.step_record import Pairs
from validation.worlds.exchange import Exchange
from validation.worlds.side_store import RanksAbsent


@dataclass(frozen=True)
class Beside:
    """The reference beside the job: how it was given, with the weights that the step began with, and what it ran."""

    source: SingleDevice
    model: nn.Module
    microbatches: Pairs

    def update(self, step: Step) -> Update:
        """The step as attribution sees it. The model is made to run each microbatch once more."""
        held = [step.site(name) for name in step.places]
        now = self.source.traced(self.model, self.microbatches, held=held, losses=step.due.losses)
        stage_of = {name: stage for stage, name in held}
        owner = {name: stage_of.get(name, NOWHERE) for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return replace(step.of_record, now=now, tied=copies_apart(self.model, owner))


@dataclass(frozen=True)
class Checked:
    """A step that was checked: against which operation of which record, where its parameters are, and what ranks kept.

    ``notes`` and ``norms`` are of each rank; ``fetch`` gets what a rank laid out.
    """

    record: Record
    number: int
    places: Mapping[str, Sequence[RankStage]]
    notes: Sequence[Notes]
    norms: Sequence[float | None]
    fetch: Callable[[str], Tensor]
    beside: Beside | None = None

    def evidence(self, verdict: Verdict) -> Evidence:
        """What the search for the cause rests on."""
        due, wrong = self.record.operations[self.number], dict(self._wrong())
        right = {name: due.gradients[name] for one in self.notes for name in one.right}
        first = {name: next(iter(by_rank.values())) for name, by_rank in wrong.items()}
        copies = {
            name: {rank: wrong.get(name, {}).get(rank, right.get(name)) for rank, _ in found}
            for name, found in self.places.items()
            if len(found) > 1
        }
        places = {n: sorted(at, key=lambda one: one[0] not in wrong.get(n, {})) for n, at in self.places.items()}
        seen = Seen(
            right | first,
            {**self.record.before(self.number), **self._begun()},
            self.norms,
            left_out=sum(len(one.left_out) for one in self.notes),
            copies=copies,
        )
        step = Step(
            due,
            seen,
            dict(sorted(places.items(), key=lambda item: item[0] in wrong)),  # so that who is wrong is named
            number=self.number,
            max_norm=self.record.max_norm,
            model=None if self.beside is None else self.beside.update,
        )
        return step.evidence(verdict)

    def _wrong(self) -> Mapping[str, Mapping[int, Gradient]]:
        """The gradients that are wrong as they are, by the ranks that have them so."""
        found: dict[str, dict[int, Gradient]] = {}
        for rank, one in enumerate(self.notes):
            for name in one.wrong:
                found.setdefault(name, {})[rank] = self.fetch(address("wrong", name, rank))
            for name in one.absent:
                found.setdefault(name, {})[rank] = None
        return found

    def _begun(self) -> Mapping[str, Gradient]:
        every = [(name, rank) for rank, one in enumerate(self.notes) for name in one.begun]
        return {name: self.fetch(address("begun", name, rank)) for name, rank in reversed(every)}


def explained(
    verdict: Verdict, kept: Kept, exchange: Exchange, *, look: Callable[[], Evidence], bound_s: float
) -> Verdict:
    """``verdict`` with the causes that rank 0 finds in what it has a ``look`` at, the same on every rank.

    Every rank calls this, and waits for rank 0 no longer than the bound in seconds.
    """
    given = dict(kept.tensors(exchange.rank))
    try:
        for name, tensor in given.items():
            exchange.give(name, tensor)
        mine = sought(verdict, lambda: explained_evidence(look())) if exchange.rank == 0 else None
        found: Verdict = exchange.finish(mine, what="the cause of what is wrong", bound_s=bound_s)[0]
    except RanksAbsent as absent:
        return replace(verdict, undecided=(f"the cause was not found in time: {absent}",))
    finally:
        exchange.clear(given)
    return found

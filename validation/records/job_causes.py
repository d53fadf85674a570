"""The cause of a checked step's failure: rank 0 looks for it, in what all ranks kept, and tells the others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from reference.step import Gradient
from validation.diagnosis.atoms import Update
from validation.diagnosis.diagnose import explained as explained_evidence
from validation.diagnosis.diagnose import sought
from validation.diagnosis.evidence import Evidence
from validation.judging.verdict import Verdict
from validation.records.rank_part import Kept, Notes
from validation.records.record import RankStage, Record
from validation.records.record_evidence import Step
from validation.worlds.exchange import Exchange
from validation.worlds.side_store import RanksAbsent


def checked(
    record: Record,
    number: int,
    places: Mapping[str, Sequence[RankStage]],
    *,
    notes: Sequence[Notes],
    norms: Sequence[float | None],
    fetch: Callable[[str], Tensor],
    model: Callable[[Step], Update] | None,
) -> Step:
    """A step that was checked by operation ``number`` of ``record``, of what each rank has in its ``notes``.

    ``fetch`` gets what a rank laid out; ``places``, ``norms`` and ``model`` are as the step has them.
    """
    due, begun = record.operations[number], dict(record.before(number))
    wrong: dict[str, dict[int, Gradient]] = {}
    for rank, one in enumerate(notes):
        for name, address in one.wrong.items():
            wrong.setdefault(name, {})[rank] = None if address is None else fetch(address)
    for one in reversed(notes):
        begun |= {name: fetch(address) for name, address in one.begun.items()}
    right = {name: due.gradients[name] for one in notes for name in one.right}
    first = {name: next(iter(by_rank.values())) for name, by_rank in wrong.items()}
    copies = {
        name: {rank: wrong.get(name, {}).get(rank, right.get(name)) for rank, _ in found}
        for name, found in places.items()
        if len(found) > 1
    }
    blamed = {n: sorted(at, key=lambda one: one[0] not in wrong.get(n, {})) for n, at in places.items()}
    return Step(
        due,
        right | first,
        begun,
        norms,
        dict(sorted(blamed.items(), key=lambda item: item[0] in wrong)),  # so that who is wrong is named
        number=number,
        left_out=sum(len(one.left_out) for one in notes),
        copies=copies,
        max_norm=record.max_norm,
        model=model,
    )


def explained(
    verdict: Verdict, kept: Kept, exchange: Exchange, *, look: Callable[[], Evidence], bound_s: float
) -> Verdict:
    """``verdict`` with the causes that rank 0 finds in what it has a ``look`` at, the same on every rank.

    Every rank calls this, and waits for rank 0 no longer than the bound in seconds.
    """
    try:
        for address, tensor in kept.tensors.items():
            exchange.give(address, tensor)
        mine = sought(verdict, lambda: explained_evidence(look())) if exchange.rank == 0 else None
        found: Verdict = exchange.finish(mine, what="the cause of what is wrong", bound_s=bound_s)[0]
    except RanksAbsent as absent:
        return replace(verdict, undecided=(f"the cause was not found in time: {absent}",))
    finally:
        exchange.clear(kept.tensors)
    return found

"""What a step has made of a rank's weights, beside what its optimizer should have made of them."""

from collections.abc import Mapping

from pipeproof.foreign.own_update import OwnUpdate
from pipeproof.foreign.unmeasured import Unmeasured
from pipeproof.judging.comparison import Comparison, Due
from pipeproof.judging.ledger import Ledger
from pipeproof.judging.tolerance import precision_among
from pipeproof.observers.shards import held_here
from pipeproof.observers.sketch import digest
from pipeproof.records.rank_part import RankStages

_LAW = "updated-parameters"


def enter_weights_after(
    ledger: Ledger, update: OwnUpdate, own: RankStages, begun: Mapping[int, Mapping[str, bytes]], *, rank: int
) -> None:
    """Enter what became of the parameters that ``own`` has, after ``update`` was foreseen.

    ``begun``: the digests of the weights that the step began with, by stage and name in it, as far as they are known.
    """
    due = Due("train", (), (), before=update.before, parameters=update.after)
    at = Comparison(due, Unmeasured(precision_among(update.before.values())), ledger)
    for name, one in own.parameters.items():
        if name in update.after:
            at.parameter(name, one, rank=rank, stage=own.places[name])
    if update.why:
        return
    trained, moved = list[str](), list[str]()
    for stage, before in begun.items():
        for name, one in own.modules[stage].named_parameters(remove_duplicate=False):
            if (full := own.rename(stage, name)) not in update.after:
                if one.requires_grad:
                    trained.append(full)
                elif digest(held_here(one)) != before[name]:
                    moved.append(full)
    ledger.leave_out(_LAW, trained, "optimizer= does not hold them")
    ledger.leave_out(_LAW, moved, "they moved, and optimizer= does not hold them")

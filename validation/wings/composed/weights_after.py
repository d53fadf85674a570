"""What a step has made of a rank's weights, beside what its optimizer should have made of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer

from pipeproof.core.cause import Cause
from pipeproof.core.comparison import Comparison, Due
from pipeproof.core.ledger import Ledger
from pipeproof.core.limits import precision_among
from pipeproof.core.reason import Reason
from pipeproof.observers.digest import digest
from pipeproof.observers.shards import held_here
from pipeproof.records.rank_part import RankStages
from pipeproof.wings.composed.master_weights import MasterWeights
from pipeproof.wings.composed.own_update import OwnUpdate
from pipeproof.wings.composed.unmeasured import Unmeasured

LAW = "updated-parameters"


@dataclass
class WeightsAfter:
    """The weights that ``own`` has: what optimizers make of them is foreseen before their step, and compared after it.

    ``masters``: what optimizers hold in place of weights, where they hold copies in a wider type.
    """

    own: RankStages
    ledger: Ledger
    masters: MasterWeights
    _update: OwnUpdate | None = field(default=None, init=False)

    @property
    def foreseen(self) -> bool:
        """Whether anybody asked what optimizers make of them."""
        return self._update is not None

    def foresee(
        self,
        optimizers: Sequence[Optimizer],
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, object],
        *,
        factor: float | None,
    ) -> None:
        """Note what ``optimizers`` are going to make of ``parameters``, as ``OwnUpdate.by`` has it.

        ``gradients``: those that master copies are going to be given.
        """
        held = {name: self.masters.held.get(name, one) for name, one in parameters.items()}
        given = {name: one for name, one in gradients.items() if name in self.masters.held}
        self._update = OwnUpdate.by(optimizers, held, factor=factor, given=given)
        if self._update.why:
            self.ledger.doubt(LAW, self._update.why, Reason.OPTIMIZER)

    def give_up(self, why: str, *, asked: bool) -> None:
        """Nobody can foresee it: that is ``why``. ``asked``: somebody wants to know."""
        self.ledger.doubt(LAW, why)
        self._update = OwnUpdate.unknown(why) if asked else None

    def enter(self, begun: Mapping[int, Mapping[str, bytes]], *, rank: int) -> None:
        """Enter what became of them.

        ``begun``: the digests of the weights that the step began with, by stage and name in it, as far as they are
        known.
        """
        update = self._update
        if update is None:
            return
        due = Due("train", (), (), before=update.before, parameters=update.after)
        at = Comparison(due, Unmeasured(precision_among(update.before.values())), self.ledger)
        for name, one in self.own.parameters.items():
            if name in update.after:
                at.parameter(name, self.masters.held.get(name, one), rank=rank, stage=self.own.places[name])
        self.masters.enter(self.ledger, rank=rank)
        if not update.why:
            self._leave_out(update, begun)

    def causes(self, *, rank: int) -> list[Cause]:
        """What is wrong with weights that have master copies, where these were compared."""
        return [] if self._update is None else self.masters.causes(rank=rank)

    def _leave_out(self, update: OwnUpdate, begun: Mapping[int, Mapping[str, bytes]]) -> None:
        trained, moved = list[str](), list[str]()
        for stage, before in begun.items():
            for name, one in self.own.modules[stage].named_parameters(remove_duplicate=False):
                if (full := self.own.rename(stage, name)) not in update.after:
                    if one.requires_grad:
                        trained.append(full)
                    elif digest(held_here(one)) != before[name]:
                        moved.append(full)
        self.ledger.leave_out(LAW, trained, "optimizer= does not hold them", Reason.OPTIMIZER)
        self.ledger.leave_out(LAW, moved, "they moved, and optimizer= does not hold them", Reason.OPTIMIZER)


def masters_of(own: RankStages, given: Mapping[nn.Parameter, Tensor] | None) -> MasterWeights:
    """The master copies of the weights that ``own`` has, as they are when the step begins."""
    by_parameter = {id(parameter): master for parameter, master in (given or {}).items()}
    held = {name: by_parameter[id(one)] for name, one in own.parameters.items() if id(one) in by_parameter}
    return MasterWeights(own, held)

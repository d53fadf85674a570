"""A rank's gradients, compared with what its stages give when they are run again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from pipeproof.core.cause import Cause
from pipeproof.core.comparison import Comparison, Due
from pipeproof.core.ledger import Ledger
from pipeproof.core.limits import FP32
from pipeproof.core.reason import Reason
from pipeproof.records.rank_part import RankStages
from pipeproof.wings.composed.collect import Begun
from pipeproof.wings.composed.division import Division
from pipeproof.wings.composed.held_gradients import AllowedOf, differing, has_hooks
from pipeproof.wings.composed.lines import RankLines
from pipeproof.wings.composed.own_causes import HeldGradients, own_causes
from pipeproof.wings.composed.rerun import StageRerun
from pipeproof.wings.composed.shards import OwnShards
from pipeproof.wings.composed.sums import ReplicaSums, sketched
from pipeproof.wings.composed.ties import StageShares
from pipeproof.wings.composed.whole import HOOKED, OwnPart, not_known

Gradients = Mapping[str, Tensor | None]
_BY_HOOK = "DDP's communication hook {} may have made others of them: check a run without it"
_UNREACHED = (
    "stage {} has parameters to be trained, and none of its calls gives one a gradient: is its graph cut inside?"
)
_NO_CAUSE = (
    "gradients of replicas are no multiple of their sum, nor what a rank has alone, nor more by those of the step "
    "before: no other cause was sought there"
)


@dataclass(frozen=True)
class OwnGradients:
    """What a rank knows of its own gradients, and enters into its ``ledger``.

    ``shards``, ``replicas`` and ``shares``: who else has parts of them. ``placement``: the rank of every stage.
    ``by_scale``: gives a cause the name that it has where losses are scaled. ``begun``: what they were before the step.
    ``lost``: the stages of which it is not known what they give. ``only``: the one that is run again, if not all are.
    """

    own: RankStages
    ledger: Ledger
    shards: OwnShards
    replicas: ReplicaSums
    shares: StageShares
    way: Division
    lines: RankLines
    placement: Sequence[int]
    by_scale: Callable[[Cause], Cause]
    begun: Begun = field(default_factory=lambda: Begun(Tensor.clone))
    lost: frozenset[int] = frozenset()
    only: int | None = None

    def compared(
        self, part: OwnPart, stage: StageRerun, numbers: Sequence[int], expected: Gradients, observed: Mapping[str, Any]
    ) -> OwnPart:
        """``part`` with what is wrong with the gradients of ``stage``, and why.

        ``numbers``: the microbatches of its calls. Both gradients are by the model's names.
        """
        names = {full: name for full, name in self._comparable(stage).items() if full not in part.unsure}
        if not stage.closed:
            return part
        self._note_untrained(stage)
        allowed = AllowedOf(FP32, stage, names, self.replicas.floor, self.replicas.size, observed, expected)
        due = Due("train", (), (), gradients={name: expected[name] for name in names})
        hooked = self._hooked(names, observed, due, allowed)
        for why in dict.fromkeys(hooked.values()):
            self.ledger.leave_out("gradient", [name for name in hooked if hooked[name] == why], why)
        names = {full: name for full, name in names.items() if full not in hooked}
        before = len(self.ledger.mismatches)
        at = Comparison(due, allowed, self.ledger)
        for name in [one for one in reversed(names) if one in observed]:
            at.gradient(name, observed[name], rank=self.lines.rank, stage=stage.stage)
        at.close()
        self.ledger.leave_out("gradient", [one for one in names if one not in observed], "not compared")
        part = replace(part, unsure={**part.unsure, **hooked})
        wrong = {str(one.parameter) for one in self.ledger.mismatches[before:]}
        if not wrong:
            return part
        observed, shared = self.way.undivided(observed), self.shares.stages_of(names)
        limits = {name: allowed.gradient(name).limit for name in names if name in shared and name in observed}
        copies = [self.shares.looked_at(name, observed[name], limit) for name, limit in limits.items()]
        part = replace(part, copies=(*part.copies, *copies))
        own = {full: name for full, name in names.items() if full not in shared}
        whole = {full: one for full, one in self.way.undivided(expected).items() if full in wrong and full in own}
        return self._explained(part, stage, numbers, own, whole, observed) if whole else part

    def _comparable(self, stage: StageRerun) -> dict[str, str]:
        """The gradients of a stage that are compared here: by the model's names, those in the stage."""
        every = {self.own.rename(stage.stage, name): name for name in stage.gradients}
        names = {full: name for full, name in every.items() if not self.shards.is_empty(full)}
        if not stage.closed:
            self.ledger.leave_out("gradient", list(names), not_known([stage.stage]))
            return names
        for name, why in self.replicas.untiled.items():
            self.ledger.leave_out("gradient", [name] if name in names else [], why, Reason.PARTS)
        for name, stages in self.shares.stages_of(names).items():
            if self.only is not None:
                self.ledger.remark("gradient", f"{name} is in other stages, too, and is compared where all are rerun")
                del names[name]
            elif self.lost & stages:
                self.ledger.leave_out("gradient", [name], not_known(self.lost & stages))
                del names[name]
        return names

    def _note_untrained(self, stage: StageRerun) -> None:
        """Note that no call gives gradients; where one stage alone is run again, it may have nothing to train."""
        every = {self.own.rename(stage.stage, name): one for name, one in stage.model.named_parameters()}
        wanting = [name for name, one in every.items() if one.requires_grad]
        if wanting and len(stage.unreached) == len(wanting):
            self.ledger.remark("presence", _UNREACHED.format(stage.stage))
        shared = self.shares.stages_of(every)
        told = f"stage {stage.stage}, which alone was run again, has no weights of its own"
        if self.only is not None and len(shared) == len(every):
            self.ledger.skip("presence", told)
        if self.only is not None and all(name in shared for name in wanting):
            self.ledger.skip("gradient", told if len(shared) == len(every) else f"{told} to train")

    def _hooked(
        self, names: Mapping[str, str], observed: Mapping[str, Any], due: Due, allowed: AllowedOf
    ) -> dict[str, str]:
        """The gradients that are not the expected ones, where hooks may have made them so, and why."""
        hooks = {name: _BY_HOOK.format(hook) for name, hook in self.replicas.hooks.items() if name in names}
        parameters = self.shards.parameters
        hooks |= {name: HOOKED for name in names if has_hooks(parameters[name], observed.get(name))}
        return {name: Reason.HOOKS.doubt(hooks[name]) for name, _, _ in differing(hooks, observed, due, allowed)}

    def _explained(
        self,
        part: OwnPart,
        stage: StageRerun,
        numbers: Sequence[int],
        names: Mapping[str, str],
        wrong: Gradients,
        observed: Mapping[str, Any],
    ) -> OwnPart:
        """``part`` with why gradients are not what they should be: those that are ``wrong``, of all with ``names``."""
        shards = self.shards
        whole = [name for name in wrong if self.lines.together > 1 or not shards.lies(name)]
        sums = {**part.wrong, **sketched(stage.stage, whole, observed, wrong)}
        if self.lines.count > 1:
            part = replace(part, wrong=sums)
        if self.lines.replicas > 1:
            pairs = {name: (shards.part(name, one), shards.part(name, observed[name])) for name, one in wrong.items()}
            begun = self.way.undivided({name: self.begun.get(name) for name in wrong})
            told = [*map(self.by_scale, self.replicas.causes(stage.stage, pairs, begun, self.way.scale))]
            undecided = part.undecided if told else (*part.undecided, _NO_CAUSE)
            return replace(part, causes=(*part.causes, *told), undecided=undecided)
        if stage.speaks:
            why = f"the cause was not sought: stage {stage.stage} communicates and can be rerun once only"
            return replace(part, undecided=(*part.undecided, why))
        held = HeldGradients(
            {full: shards.alone(full, observed[full]) for full in names if full in observed},
            names,
            {full: shards.in_place(full, self.begun.get(full)) for full in names},
            shards.alone,
        )
        found = own_causes(stage, self.ledger, numbers, held, placement=self.placement)
        unsought = [f"the cause was not sought: {found.unsought}"] if found.unsought else []
        causes = (*part.causes, *map(self.by_scale, found.cause))
        return replace(part, causes=causes, undecided=(*part.undecided, *found.undecided, *unsought))

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
from pipeproof.wings.composed.composed_parts import HOOKED, OwnPart, not_known
from pipeproof.wings.composed.division import Division
from pipeproof.wings.composed.held_gradients import AllowedOf, differing, has_hooks
from pipeproof.wings.composed.own_causes import HeldGradients, own_causes
from pipeproof.wings.composed.own_shards import OwnShards
from pipeproof.wings.composed.part_sums import sketched
from pipeproof.wings.composed.rank_lines import RankLines
from pipeproof.wings.composed.replica_sums import ReplicaSums
from pipeproof.wings.composed.rerun import StageRerun
from pipeproof.wings.composed.shares import StageShares

Gradients = Mapping[str, Tensor | None]
_UNREACHED = " has parameters to be trained, and none of its calls gives one a gradient: is its graph cut inside?"
_NO_MORE = (
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
        self, part: OwnPart, stage: StageRerun, numbers: Sequence[int], due: Gradients, seen: Mapping[str, Any]
    ) -> OwnPart:
        """``part`` with what is wrong with the gradients of ``stage``, and why.

        ``numbers``: the microbatches of its calls. Both gradients are by the model's names.
        """
        names = {full: name for full, name in self._comparable(stage).items() if full not in part.unsure}
        if not stage.closed:
            return part
        self._skip_untrained(stage)
        wanting = [name for name, one in stage.model.named_parameters() if one.requires_grad]
        if wanting and stage.unreached == wanting:
            self.ledger.remark("presence", f"stage {stage.stage}{_UNREACHED}")
        allowed = AllowedOf(FP32, stage, names, self.replicas.floor, self.replicas.size, seen, due)
        before = len(self.ledger.mismatches)
        wanted = Due("train", (), (), gradients={name: due[name] for name in names})
        otherwise = self._hooked(names, seen, wanted, allowed)
        for why in dict.fromkeys(otherwise.values()):
            self.ledger.leave_out("gradient", [one for one in otherwise if otherwise[one] == why], why)
        names = {full: name for full, name in names.items() if full not in otherwise}
        at = Comparison(wanted, allowed, self.ledger)
        for name in [one for one in reversed(names) if one in seen]:
            at.gradient(name, seen[name], rank=self.lines.rank, stage=stage.stage)
        at.close()
        self.ledger.leave_out("gradient", [one for one in names if one not in seen], "not compared")
        wrong = {str(one.parameter) for one in self.ledger.mismatches[before:]}
        seen, shared = self.way.undivided(seen), self._shared
        copies = [
            self.shares.looked_at(name, seen[name], allowed.gradient(name).limit)
            for name in names
            if wrong and name in shared
        ]
        part = replace(part, unsure={**part.unsure, **otherwise}, copies=(*part.copies, *copies))
        if wrong <= shared:
            return part
        alone = {full: name for full, name in names.items() if full not in shared}
        whole = {full: one for full, one in self.way.undivided(due).items() if full in wrong - shared}
        return self._explained(part, stage, numbers, alone, whole, seen)

    def _skip_untrained(self, stage: StageRerun) -> None:
        """Where one stage alone is run again, and has nothing to train of its own, no law about that applies."""
        every = {self.own.rename(stage.stage, name): one for name, one in stage.model.named_parameters()}
        alone = {name: one for name, one in every.items() if name not in self.shares.stages_of(every)}
        told = f"stage {stage.stage}, which alone was run again, has no weights of its own"
        if self.only is not None and not alone:
            self.ledger.skip("presence", told)
        if self.only is not None and not any(one.requires_grad for one in alone.values()):
            self.ledger.skip("gradient", f"{told} to train" if alone else told)

    def _hooked(
        self, names: Mapping[str, str], seen: Mapping[str, Any], due: Due, allowed: AllowedOf
    ) -> dict[str, str]:
        """The gradients that are not what they must be, and why hooks may have made them so."""
        found, hooks = dict[str, str](), self.replicas.hooks
        parameters = self.shards.parameters
        some = [one for one in names if one in hooks or has_hooks(parameters[one], seen.get(one))]
        for name, one, wanted in differing(some, seen, due, allowed):
            hook = hooks.get(name)
            if has_hooks(parameters[name], one):
                found[name] = Reason.HOOKS.doubt(HOOKED)
            elif hook is not None and self.replicas.may_be_of(hook, name, one, wanted):
                found[name] = Reason.HOOKS.doubt(hook.told)
        return found

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
                del names[name]  # other stages' shares are not known
            elif self.lost & stages:
                self.ledger.leave_out("gradient", [name], not_known(self.lost & stages))
                del names[name]
        return names

    @property
    def _shared(self) -> set[str]:
        """The parameters of which other stages have a copy."""
        return {name for names in self.shares.copies.values() for name in names.values()}

    def _explained(
        self,
        part: OwnPart,
        stage: StageRerun,
        numbers: Sequence[int],
        names: Mapping[str, str],
        due: Gradients,
        seen: Mapping[str, Any],
    ) -> OwnPart:
        """``part`` with why those gradients are wrong of which it has what is ``due``, of all that have ``names``."""
        mine = [full for full in names if full in due]
        whole = [name for name in mine if self.lines.together > 1 or not self.shards.lies(name)]
        if self.lines.count > 1:
            wrong = {**part.wrong, **sketched(stage.stage, whole, seen, due)}
            part = replace(part, wrong=wrong, alone=self.replicas.alone)
        if self.lines.replicas > 1:
            pairs = {n: (self.shards.part(n, due[n]), self.shards.part(n, seen[n])) for n in mine}
            begun = self.way.undivided({n: self.begun.get(n) for n in mine})
            told = [*map(self.by_scale, self.replicas.causes(stage.stage, pairs, begun, self.way.scale))]
            undecided = part.undecided if told else (*part.undecided, _NO_MORE)
            return replace(part, causes=(*part.causes, *told), undecided=undecided)
        if stage.speaks:
            why = f"the cause was not sought: stage {stage.stage} speaks to other ranks when it is run"
            return replace(part, undecided=(*part.undecided, why))
        held = HeldGradients(
            {full: self.shards.alone(full, seen[full]) for full in names if full in seen},
            names,
            {full: self.shards.in_place(full, self.begun.get(full)) for full in names},
            self.shards.alone,
        )
        found = own_causes(stage, self.ledger, numbers, held, placement=self.placement)
        if not found.cause and self.lines.count == 1:
            part = replace(part, wrong={**part.wrong, **sketched(stage.stage, whole, seen, due)})
        unsought = [f"the cause was not sought: {found.unsought}"] if found.unsought else []
        causes, undecided = map(self.by_scale, found.cause), (*found.undecided, *unsought)
        return replace(part, causes=(*part.causes, *causes), undecided=(*part.undecided, *undecided))

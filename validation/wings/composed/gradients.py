"""A rank's gradients, compared with what its stages give when they are run again."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipeproof.core.comparison import Comparison, Due
from pipeproof.core.ledger import Ledger
from pipeproof.core.limits import FP32
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import raised
from pipeproof.observers.sketch import sketch
from pipeproof.records.rank_part import RankStages
from pipeproof.wings.composed.causes import OwnEvidence
from pipeproof.wings.composed.collect import Begun
from pipeproof.wings.composed.division import Division
from pipeproof.wings.composed.held_gradients import AllowedOf, has_hooks
from pipeproof.wings.composed.lines import RankLines
from pipeproof.wings.composed.own_causes import HeldGradients, causes_of_sums, own_causes
from pipeproof.wings.composed.rerun import StageRerun
from pipeproof.wings.composed.shards import OwnShards
from pipeproof.wings.composed.sums import ReplicaSums
from pipeproof.wings.composed.ties import StageShares
from pipeproof.wings.composed.whole import not_known

Gradients = Mapping[str, Tensor | None]
_HOOKED = "hooks on its gradient may have made another of it, and are not run again: they may speak to other ranks"
_BY_HOOK = "DDP's communication hook {} may have made others of them: check a run without it"
_UNREACHED = (
    "stage {} has parameters to be trained, and none of its calls gives one a gradient: is its graph cut inside?"
)
_NO_CAUSE = (
    "gradients of replicas are no multiple of their sum, nor more by those of the step "
    "before: no other cause was sought there"
)
_UNSOUGHT = "the cause was not sought: {}"


@dataclass
class OwnGradients:
    """What a rank knows of its own gradients, and enters into its ``ledger``.

    ``shards``, ``replicas`` and ``shares``: who else has parts of them. ``placement``: the rank of every stage.
    ``begun``: what they were before the step. ``lost``: the stages of which it is not known what they give. ``only``:
    the one that is run again, if not all are. ``unsure``: why some are not compared, by name. ``found``: what tells why
    others are wrong.
    """

    own: RankStages
    ledger: Ledger
    shards: OwnShards
    replicas: ReplicaSums
    shares: StageShares
    way: Division
    lines: RankLines
    placement: Sequence[int]
    begun: Begun = field(default_factory=lambda: Begun(Tensor.clone))
    lost: frozenset[int] = frozenset()
    only: int | None = None
    unsure: dict[str, str] = field(default_factory=dict)
    found: OwnEvidence = field(default_factory=OwnEvidence)

    def compare(
        self, stage: StageRerun, numbers: Sequence[int], expected: Gradients, observed: Mapping[str, Any]
    ) -> None:
        """Enter what is wrong with the gradients of ``stage``, and find out why.

        ``numbers``: the microbatches of its calls. Both gradients are by the model's names.
        """
        names = {full: name for full, name in self._comparable(stage).items() if full not in self.unsure}
        if not stage.closed:
            return
        self._note_untrained(stage)
        allowed = AllowedOf(FP32, stage, names, self.replicas.floor, self.replicas.size, observed, expected)
        hooked = {name: why for name, why in self._hooked(names, observed).items() if not allowed.explains(name)}
        for why in dict.fromkeys(hooked.values()):
            self.ledger.leave_out("gradient", [name for name in hooked if hooked[name] == why], why)
        self.unsure |= hooked
        names = {full: name for full, name in names.items() if full not in hooked}
        before = len(self.ledger.mismatches)
        due = Due("train", (), (), gradients={name: expected[name] for name in names})
        at = Comparison(due, allowed, self.ledger)
        for name in [one for one in reversed(names) if one in observed]:
            at.gradient(name, observed[name], rank=self.lines.rank, stage=stage.stage)
        at.close()
        self.ledger.leave_out("gradient", [one for one in names if one not in observed], "not compared")
        wrong = {str(one.parameter) for one in self.ledger.mismatches[before:]}
        try:
            if wrong:
                self._explain(stage, numbers, names, wrong, allowed)
        except Exception as error:  # no one type: what is wrong stays so, whatever happens while a cause is sought
            self.found.undecided.append(_UNSOUGHT.format(f"looking for it raised {raised(error)}"))

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
            self.ledger.skip("gradient", f"{told} to train")

    def _hooked(self, names: Mapping[str, str], observed: Mapping[str, Any]) -> dict[str, str]:
        """The gradients that hooks may have changed, and why nobody knows."""
        hooks = {name: _BY_HOOK.format(hook) for name, hook in self.replicas.hooks.items() if name in names}
        parameters = self.shards.parameters
        hooks |= {name: _HOOKED for name in names if has_hooks(parameters[name], observed.get(name))}
        return {name: Reason.HOOKS.doubt(why) for name, why in hooks.items()}

    def _explain(
        self,
        stage: StageRerun,
        numbers: Sequence[int],
        names: Mapping[str, str],
        wrong: Collection[str],
        allowed: AllowedOf,
    ) -> None:
        """Find why gradients are not what they should be: those that are ``wrong``, of all with ``names``."""
        observed, shared = self.way.undivided(allowed.seen), self.shares.stages_of(names)
        for name in [one for one in names if one in shared and one in observed]:
            copy = self.shares.looked_at(name, observed[name], allowed.gradient(name).limit)
            self.found.copies.append(copy)
        names = {full: name for full, name in names.items() if full not in shared}
        due = {full: one for full, one in self.way.undivided(allowed.due).items() if full in wrong and full in names}
        if due:
            self._explain_own(stage, numbers, names, due, observed)

    def _explain_own(
        self,
        stage: StageRerun,
        numbers: Sequence[int],
        names: Mapping[str, str],
        wrong: Gradients,
        observed: Mapping[str, Any],
    ) -> None:
        """Find why gradients that no other stage shares are wrong."""
        part, found, rank = self.shards.part, self.found, self.lines.rank
        seen = {name: (observed.get(name), due) for name, due in wrong.items()}
        pairs = {n: (part(n, one), part(n, due)) for n, (one, due) in seen.items() if not (one is None or due is None)}
        if self.lines.count > 1:
            found.wrong |= {(stage.stage, name): (sketch(one), sketch(due)) for name, (one, due) in pairs.items()}
        if self.lines.replicas > 1:
            begun = self.way.undivided({name: self.begun.get(name) for name in wrong})
            told = causes_of_sums(pairs, begun, rank, stage.stage)
            found.causes += told
            found.undecided += [] if told else [_NO_CAUSE]
        elif stage.speaks:
            found.undecided.append(_UNSOUGHT.format(f"stage {stage.stage} communicates and can be rerun once only"))
        else:
            held = HeldGradients({name: full for full, name in names.items()}, observed, self.begun, self.shards)
            made = own_causes(stage, self.ledger, numbers, held, placement=self.placement)
            found.causes += made.cause
            unsought = [_UNSOUGHT.format(made.unsought)] if made.unsought else []
            found.undecided += [*made.undecided, *unsought]

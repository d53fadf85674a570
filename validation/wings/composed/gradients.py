"""A rank's gradients, compared with the gradients from its rerun stages."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from pipeproof.core.comparison import Comparison, ExpectedOperation
from pipeproof.core.ledger import Ledger
from pipeproof.core.limits import FP32, LEAD
from pipeproof.core.observe.shards import local_tensor
from pipeproof.core.observe.sketch import sketch
from pipeproof.core.reason import Reason
from pipeproof.core.tolerance import Floor, default_floor, lead, same_bits
from pipeproof.core.verdict import describe_error
from pipeproof.reference.step import Gradient
from pipeproof.wings.composed.causes import OwnEvidence, StageGradients, causes_of_sums, own_causes
from pipeproof.wings.composed.collect import Begun
from pipeproof.wings.composed.loss import Division
from pipeproof.wings.composed.rerun import StageRerun
from pipeproof.wings.composed.rounding import Unmeasured
from pipeproof.wings.composed.shards import OwnShards
from pipeproof.wings.composed.start import Agreed
from pipeproof.wings.composed.sums import ReplicaSums, StageShares
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


@dataclass(frozen=True)
class Allowed(Unmeasured):
    """Rounding of a stage's gradients, measured once one differs in a bit.

    ``names``: the ``stage``'s name of each compared gradient, by the model's names. ``sums``: sums over all replicas.
    """

    stage: StageRerun
    names: Mapping[str, str]
    sums: ReplicaSums
    observed: Mapping[str, Any]
    expected: Mapping[str, Gradient]

    def gradient(self, name: str) -> Floor:
        stage, own = self.stage, self.stage.gradients[self.names[name]]
        measured = None if own is None else stage.floor(self.names[name], self.sums.size(name, own))
        floor = default_floor(self.precision) if measured is None else measured
        whole = self.sums.floor(name, floor if stage.inside is None else floor.through(stage.inside))
        observed, expected = self.observed.get(name), self.expected.get(name)
        # Where there are no replicas, and all that flows is as it was, sums alone may differ. How far they lead then
        # is known of narrow types.
        if whole is not measured or stage.other or whole.precision.unit <= FP32.unit:
            return whole
        if not isinstance(observed, Tensor) or expected is None or observed.shape != expected.shape:
            return whole
        far = lead(observed.detach(), expected) > LEAD * whole.precision.unit
        return replace(whole, lead=whole.led) if far else whole

    def explains(self, name: str) -> bool:
        """True if rounding alone may explain the gradient's mismatch."""
        observed, expected = self.observed.get(name), self.expected.get(name)
        if not isinstance(observed, Tensor) or expected is None or same_bits(observed.detach(), expected):
            return True
        return self.gradient(name).compare(observed.detach(), expected)[1] == "pass"


@dataclass
class OwnGradients:
    """This rank's own gradients; mismatches are entered into its ``ledger``.

    ``shards``, ``replicas`` and ``shares``: other holders of parts. ``begun``: values before the step. ``lost``: stages
    with unknown results. ``unsure``: reasons for leaving some out, by name. ``found``: evidence for causes.
    """

    ledger: Ledger
    agreed: Agreed
    division: Division
    shards: OwnShards
    replicas: ReplicaSums
    shares: StageShares
    begun: Begun
    lost: frozenset[int]
    unsure: dict[str, str]
    found: OwnEvidence

    def compare(
        self, stage: StageRerun, numbers: Sequence[int], expected: Gradients, observed: Mapping[str, Any]
    ) -> None:
        """Compare the gradients of ``stage``; enter mismatches and find their causes.

        ``numbers``: the microbatches of its calls. Both gradients are by the model's names.
        """
        names = {full: name for full, name in self._comparable(stage).items() if full not in self.unsure}
        if not stage.closed:
            return
        self._note_untrained(stage)
        allowed = Allowed(FP32, stage, names, self.replicas, observed, expected)
        hooked = {name: why for name, why in self._list_hooked(names, observed) if not allowed.explains(name)}
        for why in dict.fromkeys(hooked.values()):
            self.ledger.leave_out("gradient", [name for name in hooked if hooked[name] == why], why)
        self.unsure |= hooked
        names = {full: name for full, name in names.items() if full not in self.unsure}
        before = len(self.ledger.mismatches)
        operation = ExpectedOperation("train", (), (), gradients={name: expected[name] for name in names})
        at = Comparison(operation, allowed, self.ledger)
        for name in [one for one in reversed(names) if one in observed]:
            at.gradient(name, observed[name], rank=self.agreed.lines.rank, stage=stage.stage)
        at.close()
        self.ledger.leave_out("gradient", [one for one in names if one not in observed], "not compared")
        wrong = {str(one.parameter) for one in self.ledger.mismatches[before:]}
        try:
            if wrong:
                self._explain(stage, numbers, names, wrong, allowed)
        except Exception as error:  # all types: the mismatch stays, even if the search for a cause fails
            self.found.undecided.append(_UNSOUGHT.format(f"looking for it raised {describe_error(error)}"))

    def _comparable(self, stage: StageRerun) -> dict[str, str]:
        """Return the compared gradients of a stage: its names, by the model's names."""
        every = {self.shards.stages.rename(stage.stage, name): name for name in stage.gradients}
        names = {full: name for full, name in every.items() if not self.shards.is_empty(full)}
        if not stage.closed:
            self.ledger.leave_out("gradient", list(names), not_known([stage.stage]))
            return names
        for name, why in self.replicas.untiled.items():
            self.ledger.leave_out("gradient", [name] if name in names else [], why, Reason.PARTS)
        for name, stages in self.shares.stages_of(names).items():
            if self.agreed.only is not None:
                self.ledger.remark("gradient", f"{name} is in other stages, too, and is compared where all are rerun")
                del names[name]
            elif self.lost & stages:
                self.ledger.leave_out("gradient", [name], not_known(self.lost & stages))
                del names[name]
        return names

    def _note_untrained(self, stage: StageRerun) -> None:
        """Note a stage without gradients; a stage rerun alone may have nothing to train."""
        every = {self.shards.stages.rename(stage.stage, name): one for name, one in stage.model.named_parameters()}
        wanting = [name for name, one in every.items() if one.requires_grad]
        if wanting and len(stage.unreached) == len(wanting):
            self.ledger.remark("presence", _UNREACHED.format(stage.stage))
        if self.agreed.only is None:
            return
        shared = self.shares.stages_of(every)
        reason = f"stage {stage.stage}, which alone was run again, has no weights of its own"
        if len(shared) == len(every):
            self.ledger.skip("presence", reason)
        if all(name in shared for name in wanting):
            self.ledger.skip("gradient", f"{reason} to train")

    def _list_hooked(self, names: Mapping[str, str], observed: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield gradients that hooks may have changed, each with the reason for doubt."""
        parameters = self.shards.parameters
        for name in names:
            if _has_hooks(parameters[name], observed.get(name)):
                yield name, Reason.HOOKS.doubt(_HOOKED)
            elif name in self.replicas.hooks:
                yield name, Reason.HOOKS.doubt(_BY_HOOK.format(self.replicas.hooks[name]))

    def _explain(
        self,
        stage: StageRerun,
        numbers: Sequence[int],
        names: Mapping[str, str],
        wrong: Collection[str],
        allowed: Allowed,
    ) -> None:
        """Find causes of the ``wrong`` gradients, among all with ``names``."""
        observed, expected = self.division.undo(allowed.observed), self.division.undo(allowed.expected)
        shared, found, lines = self.shares.stages_of(names), self.found, self.agreed.lines
        for name in [one for one in names if one in shared and one in observed]:
            found.copies.append(self.shares.look_at(name, observed[name], allowed.gradient(name).limit))
        names = {full: name for full, name in names.items() if full not in shared}
        both = {full: (observed.get(full), one) for full, one in expected.items() if full in wrong and full in names}
        if not both:
            return
        part = self.shards.part
        pairs = {
            name: (part(name, one), part(name, right))
            for name, (one, right) in both.items()
            if one is not None and right is not None
        }
        if lines.count > 1:
            found.wrong |= {(stage.stage, name): (sketch(one), sketch(right)) for name, (one, right) in pairs.items()}
        if lines.replicas > 1:
            begun = self.division.undo({name: self.begun.get(name) for name in both})
            causes = causes_of_sums(pairs, begun, lines.rank, stage.stage)
            found.causes += causes
            found.undecided += [] if causes else [_NO_CAUSE]
        elif stage.speaks:
            found.undecided.append(_UNSOUGHT.format(f"stage {stage.stage} communicates and can be rerun once only"))
        else:
            own = StageGradients({name: full for full, name in names.items()}, observed, self.begun, self.shards)
            verdict = own_causes(stage, self.ledger, numbers, own, placement=self.agreed.placement)
            found.causes += verdict.causes
            unsought = [_UNSOUGHT.format(verdict.unsought)] if verdict.unsought else []
            found.undecided += [*verdict.undecided, *unsought]


def _has_hooks(parameter: Tensor, gradient: object) -> bool:
    """True if hooks may have changed ``gradient``; hooks registered now would change ``.grad``."""
    if not isinstance(gradient, Tensor):
        return False
    own = parameter.grad if parameter.is_leaf else None
    last = getattr(parameter, "_post_accumulate_grad_hooks", None) if own is not None else None
    changed = bool(last) and local_tensor(own).data_ptr() == gradient.data_ptr()  # type: ignore[arg-type]  # it is there
    return bool(parameter._backward_hooks) or changed

"""A rank's gradients, compared with what its stages give when they are run again."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from pipeproof.core.comparison import Comparison, Due
from pipeproof.core.ledger import Ledger
from pipeproof.core.limits import FP32, LEAD
from pipeproof.core.observe.shards import held_here
from pipeproof.core.observe.sketch import sketch
from pipeproof.core.reason import Reason
from pipeproof.core.tolerance import Floor, lead, same_bits, unmeasured
from pipeproof.core.verdict import raised
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
    """What rounding may do to a stage's gradients, measured where one is not as it was to the bit.

    ``names``: what the ``stage`` calls each that is compared, by the model's names; ``sums``: those over all replicas.
    """

    stage: StageRerun
    names: Mapping[str, str]
    sums: ReplicaSums
    observed: Mapping[str, Any]
    expected: Mapping[str, Gradient]

    def gradient(self, name: str) -> Floor:
        stage, own = self.stage, self.stage.gradients[self.names[name]]
        measured = None if own is None else stage.floor(self.names[name], self.sums.size(name, own))
        floor = unmeasured(self.precision) if measured is None else measured
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
        """Whether rounding is all that may be wrong with a gradient."""
        observed, expected = self.observed.get(name), self.expected.get(name)
        if not isinstance(observed, Tensor) or expected is None or same_bits(observed.detach(), expected):
            return True
        return self.gradient(name).compared(observed.detach(), expected)[1] == "pass"


@dataclass
class OwnGradients:
    """What a rank knows of its own gradients, and enters into its ``ledger``.

    ``shards``, ``replicas`` and ``shares``: who else has parts of them. ``begun``: what they were before the step.
    ``lost``: the stages of which it is not known what they give. ``unsure``: why some are not compared, by name.
    ``found``: what tells why others are wrong.
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
        """Enter what is wrong with the gradients of ``stage``, and find out why.

        ``numbers``: the microbatches of its calls. Both gradients are by the model's names.
        """
        names = {full: name for full, name in self._comparable(stage).items() if full not in self.unsure}
        if not stage.closed:
            return
        self._note_untrained(stage)
        allowed = Allowed(FP32, stage, names, self.replicas, observed, expected)
        hooked = {name: why for name, why in self._hooked(names, observed) if not allowed.explains(name)}
        for why in dict.fromkeys(hooked.values()):
            self.ledger.leave_out("gradient", [name for name in hooked if hooked[name] == why], why)
        self.unsure |= hooked
        names = {full: name for full, name in names.items() if full not in self.unsure}
        before = len(self.ledger.mismatches)
        due = Due("train", (), (), gradients={name: expected[name] for name in names})
        at = Comparison(due, allowed, self.ledger)
        for name in [one for one in reversed(names) if one in observed]:
            at.gradient(name, observed[name], rank=self.agreed.lines.rank, stage=stage.stage)
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
        """Note that no call gives gradients; where one stage alone is run again, it may have nothing to train."""
        every = {self.shards.stages.rename(stage.stage, name): one for name, one in stage.model.named_parameters()}
        wanting = [name for name, one in every.items() if one.requires_grad]
        if wanting and len(stage.unreached) == len(wanting):
            self.ledger.remark("presence", _UNREACHED.format(stage.stage))
        if self.agreed.only is None:
            return
        shared = self.shares.stages_of(every)
        told = f"stage {stage.stage}, which alone was run again, has no weights of its own"
        if len(shared) == len(every):
            self.ledger.skip("presence", told)
        if all(name in shared for name in wanting):
            self.ledger.skip("gradient", f"{told} to train")

    def _hooked(self, names: Mapping[str, str], observed: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """The gradients that hooks may have changed, and why that is not known."""
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
        """Find why gradients are not what they should be: those that are ``wrong``, of all with ``names``."""
        observed, expected = self.division.undivided(allowed.observed), self.division.undivided(allowed.expected)
        shared, found, lines = self.shares.stages_of(names), self.found, self.agreed.lines
        for name in [one for one in names if one in shared and one in observed]:
            found.copies.append(self.shares.looked_at(name, observed[name], allowed.gradient(name).limit))
        names = {full: name for full, name in names.items() if full not in shared}
        both = {full: (observed.get(full), one) for full, one in expected.items() if full in wrong and full in names}
        if not both:
            return
        part = self.shards.part
        pairs = {
            name: (part(name, one), part(name, due))
            for name, (one, due) in both.items()
            if one is not None and due is not None
        }
        if lines.count > 1:
            found.wrong |= {(stage.stage, name): (sketch(one), sketch(due)) for name, (one, due) in pairs.items()}
        if lines.replicas > 1:
            begun = self.division.undivided({name: self.begun.get(name) for name in both})
            causes = causes_of_sums(pairs, begun, lines.rank, stage.stage)
            found.causes += causes
            found.undecided += [] if causes else [_NO_CAUSE]
        elif stage.speaks:
            found.undecided.append(_UNSOUGHT.format(f"stage {stage.stage} communicates and can be rerun once only"))
        else:
            own = StageGradients({name: full for full, name in names.items()}, observed, self.begun, self.shards)
            verdict = own_causes(stage, self.ledger, numbers, own, placement=self.agreed.placement)
            found.causes += verdict.cause
            unsought = [_UNSOUGHT.format(verdict.unsought)] if verdict.unsought else []
            found.undecided += [*verdict.undecided, *unsought]


def _has_hooks(parameter: Tensor, gradient: object) -> bool:
    """Whether hooks may have made ``gradient`` of another. Those that run when it is there make others of ``.grad``."""
    if not isinstance(gradient, Tensor):
        return False
    own = parameter.grad if parameter.is_leaf else None
    last = getattr(parameter, "_post_accumulate_grad_hooks", None) if own is not None else None
    changed = bool(last) and held_here(own).data_ptr() == gradient.data_ptr()  # type: ignore[arg-type]  # it is there
    return bool(parameter._backward_hooks) or changed

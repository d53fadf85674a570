"""A rank's gradients, compared with the gradients from its rerun stages."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from pipeproof.core.cause import Cause
from pipeproof.core.comparison import Allowed, Comparison, ExpectedOperation
from pipeproof.core.judge import conclude
from pipeproof.core.ledger import Ledger
from pipeproof.core.limits import FP32, LEAD
from pipeproof.core.observe.shards import local_tensor
from pipeproof.core.observe.sketch import sketch
from pipeproof.core.reason import Reason
from pipeproof.core.tolerance import Floor, lead, same_bits
from pipeproof.core.verdict import Verdict, describe_error
from pipeproof.explain.atoms import Update
from pipeproof.explain.cause_rules import STALE
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.explain import explain_safely, explain_verdict
from pipeproof.reference.copied import deep_copy
from pipeproof.reference.step import Gradient, Site, dense
from pipeproof.reference.traced import Traced
from pipeproof.whitebox.crossings import is_near
from pipeproof.wings.composed.causes import OwnEvidence, RightStep
from pipeproof.wings.composed.collect import Begun
from pipeproof.wings.composed.loss import Division
from pipeproof.wings.composed.rerun import StageRerun
from pipeproof.wings.composed.shards import OwnShards
from pipeproof.wings.composed.start import Agreed
from pipeproof.wings.composed.sums import ReplicaSums, StageShares
from pipeproof.wings.composed.whole import not_known
from pipeproof.worlds.settings import drawing_apart

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
_SEVERAL = "several calls have the number of one microbatch, so a number does not say which of them a gradient lacks"
_UNSOUGHT = "the cause was not sought: {}"


@dataclass(frozen=True)
class StageFloors(Allowed):
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
        floor = self.floor if measured is None else measured
        whole = self.sums.floor(name, floor if stage.inside is None else floor.through(stage.inside))
        observed, expected = self.observed.get(name), self.expected.get(name)
        # Where there are no replicas, and all that flows is as it was, sums alone may differ. How far they lead then
        # is known of narrow types.
        alone = whole is measured and not any(link.limits for link in stage.links) and whole.precision.unit > FP32.unit
        if not alone or not isinstance(observed, Tensor) or expected is None or observed.shape != expected.shape:
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
        every = {self.shards.stages.rename(stage.stage, name): name for name in stage.gradients}
        names = {full: name for full, name in every.items() if not self.shards.is_empty(full)}
        if not stage.closed:
            self.ledger.leave_out("gradient", list(names), not_known([stage.stage]))
            return
        for name, why in self.replicas.untiled.items():
            self.ledger.leave_out("gradient", [name] if name in names else [], why, Reason.PARTS)
        for name, stages in self.shares.stages_of(names).items():
            if self.agreed.only is not None:
                self.ledger.remark("gradient", f"{name} is in other stages, too, and is compared where all are rerun")
                del names[name]
            elif self.lost & stages:
                self.ledger.leave_out("gradient", [name], not_known(self.lost & stages))
                del names[name]
        names = {full: name for full, name in names.items() if full not in self.unsure}
        self._note_untrained(stage)
        allowed = StageFloors(stage, names, self.replicas, observed, expected)
        hooks, parameters = self.replicas.hooks, self.shards.parameters
        hooked = {name: Reason.HOOKS.doubt(_BY_HOOK.format(hooks[name])) for name in names if name in hooks}
        own = [name for name in names if _has_hooks(parameters[name], observed.get(name))]
        hooked |= dict.fromkeys(own, Reason.HOOKS.doubt(_HOOKED))
        hooked = {name: why for name, why in hooked.items() if not allowed.explains(name)}
        for why in dict.fromkeys(hooked.values()):
            self.ledger.leave_out("gradient", [name for name in hooked if hooked[name] == why], why)
        self.unsure |= hooked
        names = {full: name for full, name in names.items() if full not in self.unsure}
        before = len(self.ledger.mismatches)
        operation = ExpectedOperation("train", (), (), gradients={name: expected[name] for name in names})
        at = Comparison(operation, allowed, self.ledger)
        for name in [one for one in reversed(names) if one in observed]:
            at.gradient(name, observed[name], rank=self.agreed.peers.rank, stage=stage.stage)
        at.close()
        self.ledger.leave_out("gradient", [one for one in names if one not in observed], "not compared")
        wrong = {str(one.parameter) for one in self.ledger.mismatches[before:]}
        try:
            if wrong:
                self._explain(allowed, numbers, names, wrong)
        except Exception as error:  # all types: the mismatch stays, even if the search for a cause fails
            self.found.undecided.append(_UNSOUGHT.format(f"looking for it raised {describe_error(error)}"))

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

    def _explain(
        self, allowed: StageFloors, numbers: Sequence[int], names: Mapping[str, str], wrong: Collection[str]
    ) -> None:
        """Find causes of the ``wrong`` gradients, among all with ``names``."""
        stage = allowed.stage
        observed = self.division.divide(allowed.observed, undo=True)
        expected = self.division.divide(allowed.expected, undo=True)
        shared, found, rank = self.shares.stages_of(names), self.found, self.agreed.peers.rank
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
        if self.agreed.run.count > 1:
            found.wrong |= {(stage.stage, name): (sketch(one), sketch(right)) for name, (one, right) in pairs.items()}
        if self.agreed.replicas > 1:
            begun = self.division.divide({name: self.begun.get(name) for name in both}, undo=True)
            causes = causes_of_sums(pairs, begun, rank, stage.stage)
            found.causes += causes
            found.undecided += [] if causes else [_NO_CAUSE]
        elif stage.speaks:
            found.undecided.append(_UNSOUGHT.format(f"stage {stage.stage} communicates and can be rerun once only"))
        else:
            verdict = self._own_causes(stage, numbers, {name: full for full, name in names.items()}, observed)
            # A factor on all of it may be the division of losses, done later: the loss's own gradient should show it.
            unsure = self.division.unclear and not self.division.declared
            found.causes += [one for one in verdict.causes if not unsure or one.kind != "scale" or one.microbatches]
            unsought = [_UNSOUGHT.format(verdict.unsought)] if verdict.unsought else []
            found.undecided += [*verdict.undecided, *unsought]

    def _own_causes(
        self, own: StageRerun, numbers: Sequence[int], names: Mapping[str, str], observed: Mapping[str, Any]
    ) -> Verdict:
        """Return a verdict on the ``observed`` gradients of ``own``, with causes of mismatches.

        ``names``: the model's name of each of the stage's. Small differences are not split by microbatches: rounding of
        each is as large.
        """
        local = conclude(self.ledger, f"stage {own.stage}")
        wrong = [one for one in local.mismatches if one.stage == own.stage and one.parameter in names.values()]
        local = replace(local, mismatches=tuple(wrong))
        if local.outcome == "unknown":
            return local
        found = explain_safely(local, lambda: explain_verdict(self._evidence_of(own, local, names, observed)))
        batches = [numbers[k] for k in own.numbers]
        several = {m for m, number in enumerate(batches) if batches.count(number) > 1}  # ambiguous numbers
        if any(several & {*cause.microbatches} for cause in found.causes):
            return replace(found, causes=(), undecided=(*found.undecided, _SEVERAL))
        causes = [
            replace(
                cause,
                rank=self.agreed.placement[own.stage],
                stage=own.stage,
                microbatches=tuple(sorted(batches[m] for m in cause.microbatches)),
                parameter=None if cause.parameter is None else names.get(cause.parameter, cause.parameter),
            )
            for cause in found.causes
        ]
        return replace(found, causes=tuple(causes))

    def _evidence_of(
        self, own: StageRerun, local: Verdict, names: Mapping[str, str], observed: Mapping[str, Any]
    ) -> Evidence:
        """Return the evidence about a stage by itself, like a model on one rank; other ranks' elements are zero."""
        stage, whole, placement, shards = own.stage, own.expected, self.agreed.placement, self.shards

        def part(name: str, gradient: Gradient) -> Gradient:
            return shards.own_part(names[name], gradient) if name in names else gradient

        def parts(every: Mapping[Site, Gradient]) -> dict[Site, Gradient]:
            return {site: None if one is None else part(site[1], dense(one)) for site, one in every.items()}

        own_gradients = parts({(stage, name): observed[full] for name, full in names.items() if full in observed})
        given = tuple(replace(one, gradients=parts(one.gradients)) for one in whole.contributions)
        expected = parts({site: one for site, one in whole.gradients.items() if site in own_gradients})
        with drawing_apart():
            model, sites = deep_copy(own.model), [*expected]
            now = Traced(model, held=sites, batches=own.batches, loss=own.loss, losses=whole.losses, ends={})
        for name, leaf in now.parameters(stage).items():
            leaf.register_hook(partial(part, name))  # type: ignore[no-untyped-call]  # in torch
        begun = ((name, shards.in_place(full, self.begun.get(full))) for name, full in names.items())
        old = {(stage, name): one for name, one in begun if one is not None}
        alone, ranks, stages = (placement[stage],) * (stage + 1), len({*placement}), len(placement)
        update = Update(own_gradients, expected, now, old=old, placement=alone, ranks=ranks, stages=stages)
        known = RightStep(replace(whole, gradients=expected, contributions=given), whole.before, update)
        return Evidence(local, alone, len(own.batches), 1, gradients=own_gradients, norms=(), right=known)


def _has_hooks(parameter: Tensor, gradient: object) -> bool:
    """True if hooks may have changed ``gradient``; hooks registered now would change ``.grad``."""
    if not isinstance(gradient, Tensor):
        return False
    own = parameter.grad if parameter.is_leaf else None
    last = getattr(parameter, "_post_accumulate_grad_hooks", None) if own is not None else None
    changed = bool(last) and local_tensor(own).data_ptr() == gradient.data_ptr()  # type: ignore[arg-type]  # it is there
    return bool(parameter._backward_hooks) or changed


def causes_of_sums(
    wrong: Mapping[str, tuple[Tensor, Tensor]], begun: Mapping[str, Tensor | None], rank: int, stage: int
) -> list[Cause]:
    """Find the one cause that explains all ``wrong`` gradients of a stage, each observed and as summed over replicas.

    ``begun``: their values before the step.
    """
    pairs = {name: (one - expected, begun.get(name)) for name, (one, expected) in wrong.items()}
    times = _one_of(None if old is None else sketch(rest).factor(sketch(old)) for rest, old in pairs.values())
    if times is not None:
        at = rank if times >= 1 else None  # for a part, another replica may have kept it
        return [Cause("stale-gradient", at, stage, detail=f"{STALE}, {times:g} times")]
    factor = _one_of(sketch(one).factor(sketch(expected)) for one, expected in wrong.values())
    if factor is None or is_near(factor, 1.0):
        return []
    alone = next(iter(wrong)) if len(wrong) == 1 else None
    return [Cause("scale", rank, stage, factor=factor, detail=f"{factor:g} times", parameter=alone)]


def _one_of(factors: Iterable[float | None]) -> float | None:
    """Return the common factor, to four digits; None if they differ, or one is None."""
    found = {None if one is None else float(f"{one:.4g}") for one in factors}
    return found.pop() if len(found) == 1 else None

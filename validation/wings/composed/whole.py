"""What each rank saw of a step and made of it again, and what that shows together."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from torch import Tensor

from pipeproof.core.cause import Cause
from pipeproof.core.comparison import Comparison, Due
from pipeproof.core.execution import Execution
from pipeproof.core.ledger import Ledger
from pipeproof.core.limits import FP32, Precision, coarsest, precision_of
from pipeproof.core.measuring import ran_of
from pipeproof.core.reason import Reason
from pipeproof.core.requirements import Conditions
from pipeproof.core.verdict import Verdict
from pipeproof.diagnosis.atoms import Update
from pipeproof.diagnosis.diagnose import explained, sought
from pipeproof.diagnosis.evidence import Evidence
from pipeproof.diagnosis.loss_scale import LossScale
from pipeproof.diagnosis.tied import Shares, of_copies
from pipeproof.observers.observed import Observed, Passed, RankOperation
from pipeproof.observers.recording import FORWARD_POINTS, HANDED_ON, MADE
from pipeproof.pipeline.action import Action
from pipeproof.pipeline.schedule import Schedule
from pipeproof.reference.step import Expected, Site
from pipeproof.wings.composed.chain import Chain
from pipeproof.wings.composed.chain_causes import of_calls, on_the_wire, repeated, with_lost, with_own
from pipeproof.wings.composed.composed import AgainstItself
from pipeproof.wings.composed.link import Link, StageSeen
from pipeproof.wings.composed.loss_link import weightless_microbatches
from pipeproof.wings.composed.sources import Data
from pipeproof.wings.composed.sums import Wrong
from pipeproof.wings.composed.unmeasured import Unmeasured
from pipeproof.wings.composed.weights import Weights
from pipeproof.wings.composed.wiring import enter_unsure, enter_wiring

LAWS = (
    "parameters-once",  # every parameter of the model is in one stage, where the model is known
    "microbatches",  # every stage ran forward and backward once for each microbatch
    "boundaries",  # what stages received is what was sent, and what they gave is what they give again
    "loss",  # each microbatch's, and the whole step's, on every rank that reports it
    "presence",  # a gradient is None exactly where nothing is contributed
    "gradient",  # every parameter's is the sum of what microbatches contribute
    "grad-norm",  # of all gradients together, on every rank that reports it
    "updated-parameters",  # what the optimizer makes of the gradients
)

HOOKED = "hooks on its gradient may have made another of it, and are not run again: they may speak to other ranks"


def not_known(stages: Iterable[int]) -> str:
    """That nobody knows what ``stages`` give."""
    return Reason.LINK.doubt(" and ".join(f"what stage {stage} gives is not known" for stage in sorted(stages)))


_EQUAL = "some inputs may be any of several equal outputs, so that nobody knows to which of them what flowed is due"
_OF_PARTS = "put together on one rank it gives something else: is a reduction over its ranks missing?"
_OF_ALL_STAGES = ("loss", "grad-norm", "updated-parameters")


@dataclass(frozen=True)
class Told:
    """What a rank reported of a step: losses in the order of its microbatches, their sum, the norm."""

    losses: tuple[float, ...] | None = None
    loss: float | None = None
    norm: float | None = None


@dataclass(frozen=True)
class OwnPart:
    """What one rank has to say: its stages with their calls, what these give again, and what it compared itself.

    ``lengths``: the norms of what its gradients must be. ``copies``: what its gradients of shared parameters are made
    of. ``causes`` of what is wrong with others, and why none is known of some. ``foreseen``: it is known what its
    optimizer makes of them; ``forms`` have its parameters' types. ``moved``: the stages whose weights are not those
    that the step began with. ``precision``: that of its stages; ``summed``: that of sums over ranks. ``weights``: what
    it began with. ``wrong``: gradients that are not what they must be, where other ranks may tell why. ``in_parts``:
    stages are cut inside. ``unsure``: why gradients are not compared, by name. ``scale``: how its losses are scaled.
    """

    ledger: Ledger
    stages: Mapping[int, StageSeen] = field(default_factory=dict)
    links: Mapping[int, tuple[Link, ...]] = field(default_factory=dict)
    lengths: Mapping[Site, float] = field(default_factory=dict)
    told: tuple[Told, ...] = ()
    copies: tuple[Shares, ...] = ()
    causes: tuple[Cause, ...] = ()
    undecided: tuple[str, ...] = ()
    foreseen: bool = False
    forms: Mapping[str, Tensor] = field(default_factory=dict)
    moved: frozenset[int] = frozenset()
    precision: Precision = FP32
    summed: Precision = FP32
    weights: Weights = field(default_factory=dict)
    wrong: Wrong = field(default_factory=dict)
    in_parts: bool = False
    unsure: Mapping[str, str] = field(default_factory=dict)
    scale: LossScale | None = None


@dataclass(frozen=True)
class Whole:
    """The parts of all ranks, with what the step was of: ``data``, and what its losses are divided by.

    ``only``: the one stage that was run again, if not all were.
    Of replicas each is one of these; ``everybodys`` is what the loss over all of them may be: they may have an unequal
    number of microbatches, and then theirs or all microbatches' may count alike.
    ``held``: the ranks and stages of each parameter. ``first``: of each name in the model, the first that the parameter
    has; ``known``: whether those are all names in the model.
    """

    parts: Sequence[OwnPart]
    data: Data
    divisor: float
    held: Mapping[str, Sequence[tuple[int, int]]]
    first: Mapping[str, str]
    known: bool
    no_norm: str = ""
    everybodys: tuple[float, ...] = ()
    only: int | None = None
    by: AgainstItself = field(kw_only=True)

    @property
    def precision(self) -> Precision:
        """How its numbers are rounded."""
        return next((part.precision for part in self.parts if part.links), FP32)

    @property
    def _of_losses(self) -> Unmeasured:
        """What rounding may do to losses: as much as their own type, or else it is not known that it is rounding."""
        types = [link.loss_type for link in self._links.get(self.chain.last, ()) if link.loss_type is not None]
        own = coarsest([precision_of(one) for one in types] or [self.precision])
        apart = max((link.loss_apart for link in self._links.get(self.chain.last, ())), default=0.0)
        return Unmeasured(replace(own, most=max(own.most, self.precision.most)), apart=apart)

    @property
    def _of_norm(self) -> Unmeasured:
        return Unmeasured(coarsest([part.summed for part in self.parts if part.links]))

    @property
    def reported(self) -> list[Told]:
        """What its ranks reported."""
        return [one for part in self.parts for one in part.told]

    def explained(self, verdict: Verdict) -> Verdict:
        """``verdict`` with what was seen, and with its causes."""
        verdict = replace(verdict, measured=replace(verdict.measured, ran=ran_of(self._observed, 0)))
        return self._explained(verdict) if verdict.mismatches else verdict

    def is_wrong(self, verdict: Verdict) -> bool:
        """Whether the first of what ``verdict`` found wrong is on one of its ranks."""
        first = verdict.mismatches[0].rank if verdict.mismatches else None
        return first is not None and bool(self.parts[first].stages)

    @cached_property
    def first_wrong(self) -> tuple[bool, int, bool]:
        """Where the flow is first wrong, along it: what comes after may only follow from that."""
        every = [one for flow in self._passed.values() for one in flow.crossings if not one.same]
        points = [(one.where in FORWARD_POINTS, one.action.stage, one.where in (MADE, HANDED_ON)) for one in every]
        return min([(not f, stage if f else -stage, out) for f, stage, out in points], default=(True, 1, True))

    @cached_property
    def chain(self) -> Chain:
        """The calls of all stages."""
        seen = {stage: one.without_own(part.links[stage]) for part in self.parts for stage, one in part.stages.items()}
        return Chain(seen, self.data)

    @cached_property
    def _links(self) -> dict[int, tuple[Link, ...]]:
        return {stage: links for part in self.parts for stage, links in part.links.items()}

    @cached_property
    def _passed(self) -> dict[int, Passed]:
        return self.chain.passed(self._links)

    def enter(self, ledger: Ledger) -> None:
        """Enter what the chain shows, and what ranks reported."""
        at = Execution(self._conditions, self._observed, ledger)
        if not self.known:
            ledger.skip("parameters-once", "the model is not known: pass build= to have its parameters counted")
        else:
            self._enter_parameters(ledger, self.first)
        at.orders(0, frozenset(), backward=True)
        at.crossings(0, frozenset())
        at.left_out(0)
        enter_wiring(self.chain, ledger, loss_inside=self.by.loss_fn is None)
        enter_unsure(self.chain.stages, self._links, self._passed, ledger)
        doubt = partial(ledger.doubt, "boundaries")
        for stage, links in self._links.items():
            strange = any(link.strange for link in links)  # a call gives something else each time that it is run
            if strange:
                doubt(f"stage {stage} gives something else each time that it is run", Reason.RERUN)
            if any(link.endless for link in links):
                doubt(f"what stage {stage} gives is not finite", Reason.NOT_FINITE)
            elif any(one.limit == math.inf for one in self._passed[stage].crossings) and not strange:
                doubt(f"what came to stage {stage} is not finite in the type of what it gave", Reason.NOT_FINITE)
            for told in dict.fromkeys(link.obstacle for link in links if link.obstacle):
                doubt(told, Reason.RERUN)
        self._enter_told(ledger)
        if self.only is None and not any(part.foreseen for part in self.parts):
            ledger.skip("updated-parameters", "the optimizer is not known: pass optimizer= to have its step compared")
        wrong = any(m.law in ("gradient", "presence") for m in ledger.mismatches)
        at.uncompared(0, doubtful=wrong)

    def _enter_parameters(self, ledger: Ledger, due: Collection[str]) -> None:
        at = Comparison(Due("train", (), ()), Unmeasured(FP32), ledger)
        for name in dict.fromkeys([*due, *self.held]):
            places = self.held.get(name, ())
            rank, stage = next(iter(places), (None, None))
            count = len(places) if name not in due or not places else 1
            at.held(name, count, due=int(name in due), rank=rank, stage=stage)

    def _enter_told(self, ledger: Ledger) -> None:
        """Enter what ranks reported, held against what the last stage and all gradients give."""
        made, lost = self._expected, self._lost
        unsure = [why for part in self.parts for why in part.unsure.values()]
        if self.only is not None:
            for law in _OF_ALL_STAGES[self.only == self.chain.last :]:
                ledger.skip(law, f"stage {self.only} alone was run again in this step")
            if self.only != self.chain.last:
                return
        wrong = any(one.law in ("presence", "gradient") for one in ledger.mismatches)
        known = len(self._losses) == self.chain.microbatches and self.chain.last not in lost
        due = Due("train", ("",) * len(made.losses), made.losses, made.loss, made.norm)
        at, summed = (Comparison(due, one, ledger) for one in (self._of_losses, self._of_norm))
        for rank, part in enumerate(self.parts):
            for told in part.told:
                if told.losses is not None and known:
                    at.losses(told.losses, rank=rank)
                if told.loss is not None and known:
                    nearest = min((made.loss, *self.everybodys), key=partial(_apart, told.loss))
                    whole = Comparison(replace(due, loss=nearest), self._of_losses, ledger)
                    whole.loss(told.loss, rank=rank)
                if told.norm is not None and not (lost or unsure or wrong) and self.only is None:
                    summed.norm(told.norm, rank=rank)
        if any(one.losses is not None or one.loss is not None for one in self.reported):
            if self.chain.last in lost:
                ledger.doubt("loss", not_known([self.chain.last]))
            elif not known:
                ledger.doubt("loss", "the last stage was not called once for each microbatch", Reason.CALLS)
        if (lost or unsure) and any(one.norm is not None for one in self.reported):
            ledger.doubt("grad-norm", not_known(lost) if lost else unsure[0])
        elif wrong:
            ledger.miss("grad-norm", "gradients are wrong, and it follows from them")

    @property
    def _lost(self) -> list[int]:
        """The stages of which it is not known what they give."""
        return sorted(stage for stage, links in self._links.items() if not all(link.closed for link in links))

    @cached_property
    def _losses(self) -> dict[int, float]:
        """By microbatch, those that the last stage gives again."""
        last, numbers = self._links.get(self.chain.last, ()), self.chain.orders[self.chain.last].numbers
        return {m: link.loss for m, link in zip(numbers, last, strict=False) if link.loss is not None and link.closed}

    @cached_property
    def _expected(self) -> Expected:
        """What the links give together."""
        losses = tuple(self._losses.get(m, math.nan) for m in range(self.chain.microbatches))
        norm = norm_of(self._lengths, self.first)
        return Expected("train", losses, sum(losses) / self.divisor, norm=norm)

    @property
    def loss(self) -> float:
        """Its own loss."""
        return self._expected.loss

    @property
    def _lengths(self) -> dict[Site, float]:
        return {site: one for part in self.parts for site, one in part.lengths.items()}

    @cached_property
    def _observed(self) -> Observed:
        rows = [(self._operation(part),) for part in self.parts]
        placement = tuple(self.chain.stages[stage].rank for stage in sorted(self.chain.stages))
        schedule = Schedule("job", self.chain.microbatches, placement, tuple(() for _ in rows))
        return Observed(schedule, tuple(rows))

    def _operation(self, part: OwnPart) -> RankOperation:
        flows = [self._passed[stage] for stage in part.stages]
        return RankOperation(
            "train",
            next((told.losses for told in part.told if told.losses is not None), ()),
            tuple(_done(flows)),
            called=tuple(call for flow in flows for call in flow.called),
            crossings=tuple(crossing for flow in flows for crossing in flow.crossings),
            uncompared=sum(flow.uncompared for flow in flows),
            loss=next((told.loss for told in part.told if told.loss is not None), None),
            norm=next((told.norm for told in part.told if told.norm is not None), None),
        )

    @property
    def _conditions(self) -> Conditions:
        frozen = [s for s, seen in self.chain.stages.items() if not any(c.giving or c.unread for c in seen.calls)]
        matters = any(link.mode_matters for links in self._links.values() for link in links)
        idle = frozenset(frozen) - {self.chain.last}
        last = self.chain.last
        nothing = weightless_microbatches(self.chain.orders[last].numbers, self._links.get(last, ()))
        counts = (self.chain.microbatches,)
        return Conditions(counts=counts, frozen=idle, weightless=nothing, mode_matters=lambda: matters)

    def _explained(self, verdict: Verdict) -> Verdict:
        """``verdict`` with the causes of what the chain shows, then those that ranks found in their own gradients."""
        evidence = Evidence(
            verdict,
            self._observed.schedule.placement,
            self.chain.microbatches,
            len(self.parts),
            gradients={},
            norms=[row[0].norm for row in self._observed.ranks],
            seen=self._observed,
            passed=self._passed,
            due=_Due(self._expected, {name: one for part in self.parts for name, one in part.forms.items()}),
            clipped_to=self.by.max_norm,
            scale=self._scale,
            lengths=self._lengths,
        )
        others = {mismatch.law for mismatch in verdict.mismatches} - {"gradient", "presence"}
        found = sought(verdict, lambda: explained(evidence)) if others else verdict
        seen = [] if self.chain.sources.unsure else map(self._as_seen, found.cause)
        shown = with_lost([*of_calls(self.chain), *seen], self.chain)
        told = [cause for part in self.parts for cause in part.causes] + list(self._of_copies())
        causes = with_own(shown, told, evidence)
        undecided = dict.fromkeys((*found.undecided, *(one for part in self.parts for one in part.undecided)))
        if self.chain.sources.unsure:
            undecided[_EQUAL] = None
        unfit = {"dropped": "microbatches" in others, "wrong-message": verdict.law("boundaries").outcome == "unknown"}
        ruled_out = tuple(one for one in found.ruled_out if not any(unfit.get(kind) for kind in one.kinds))
        return replace(found, cause=tuple(causes), undecided=() if causes else tuple(undecided), ruled_out=ruled_out)

    @property
    def _scale(self) -> LossScale | None:
        """How losses are scaled, if at all, as the last stage's rank has it."""
        scale = self.parts[self.chain.stages[self.chain.last].rank].scale
        skips = self.by.factor(self._expected.norm or 0.0) is None
        return None if scale is None else replace(scale, skips=skips)

    def _as_seen(self, cause: Cause) -> Cause:
        """``cause``, with what was seen of its stage."""
        flow = None if cause.stage is None else self._passed.get(cause.stage)
        if flow is None:
            return cause
        moved = any(cause.stage in part.moved for part in self.parts)
        found = repeated(cause, flow, moved=moved)
        if found != cause and any(part.in_parts for part in self.parts):  # what is put together is other code
            return replace(cause, detail=f"{cause.detail}; {_OF_PARTS}")
        return on_the_wire(found, flow, last=self.chain.last)

    def _of_copies(self) -> Iterator[Cause]:
        """What is wrong with parameters that stages share."""
        groups: dict[str, dict[int, str]] = {}
        for name, places in self.held.items():
            for _, stage in places:
                groups.setdefault(self.first.get(name, name), {})[stage] = name
        shared = [copies for copies in groups.values() if len(copies) > 1]
        return of_copies(shared, [copy for part in self.parts for copy in part.copies])


@dataclass(frozen=True)
class _Due:
    """What a diagnosis of the chain knows of the right step: not what gradients are made of, which ranks find out."""

    expected: Expected
    weights: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def update(self) -> Update:
        raise AssertionError("no gradients are there to be explained")


def _apart(one: float, other: float) -> float:
    return abs(one - other)


def _done(flows: Sequence[Passed]) -> Iterator[Action]:
    """The actions of a rank's stages, in the order in which they were, as far as that is known."""
    every = [action for flow in flows for action in flow.actions]
    times = [time for flow in flows for time in flow.times]
    order = sorted(range(len(every)), key=times.__getitem__) if len(times) == len(every) else range(len(every))
    yield from (every[k] for k in order)


def norm_of(lengths: Mapping[Site, float], first: Mapping[str, str]) -> float:
    """The norm over logical parameters: of copies, which have one ``first`` name, one counts."""
    one_each = {first.get(name, name): length for (_, name), length in lengths.items()}
    finite = all(map(math.isfinite, one_each.values()))
    return math.sqrt(math.fsum(length**2 for length in one_each.values())) if finite else math.nan

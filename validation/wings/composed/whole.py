"""The verdict that combines all ranks' observations and reruns of a step."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from pipeproof.core.comparison import Allowed, Comparison, ExpectedOperation, expect_operation
from pipeproof.core.execution import Execution
from pipeproof.core.judge import conclude
from pipeproof.core.ledger import Ledger
from pipeproof.core.limits import FP32, Precision, coarsest, precision_of
from pipeproof.core.observe.observed import Crossing, Observed, Passed, RankOperation
from pipeproof.core.observe.recording import RECEIVED
from pipeproof.core.oracle import Conditions
from pipeproof.core.reason import Reason
from pipeproof.core.tolerance import default_floor
from pipeproof.core.verdict import Verdict
from pipeproof.pipeline.schedule import Schedule
from pipeproof.reference.step import Expected, Site
from pipeproof.wings.composed.chain import Chain, why_unsure
from pipeproof.wings.composed.composed import AgainstItself
from pipeproof.wings.composed.link import Data, Link, StageCalls
from pipeproof.wings.composed.start import Agreed
from pipeproof.wings.composed.weights import Weights, enter_weights
from pipeproof.wings.composed.wiring import enter_wiring

LAWS = (
    "parameters-once",  # every parameter of the model is in one stage, where the model is known
    "microbatches",  # every stage ran forward and backward once for each microbatch
    "boundaries",  # inputs equal the sent tensors, outputs equal those of reruns
    "loss",  # each microbatch's, and the whole step's, on every rank that reports it
    "presence",  # a gradient is None exactly without contributions
    "gradient",  # every parameter's is the sum of what microbatches contribute
    "grad-norm",  # of all gradients together, on every rank that reports it
    "updated-parameters",  # what the optimizer makes of the gradients
)
OF_REPLICAS = (LAWS[0], "initial-weights", *LAWS[1:])  # ranks that have the same begin with the same
_BETWEEN = "boundaries"
AS_IT_CAME = "by what stages received, right or wrong"
_ONE_STAGE = "stage {} alone was run again in this step"
_UNREPORTED = "the job reports none"


def not_known(stages: Iterable[int]) -> str:
    """Say that the results of ``stages`` are unknown."""
    return Reason.LINK.doubt(" and ".join(f"what stage {stage} gives is not known" for stage in sorted(stages)))


@dataclass
class Reported:
    """A rank's reports during a step: losses in microbatch order, their sum, the norm."""

    losses: list[tuple[float, ...]] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    norm: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class OwnPart:
    """One rank's part: its stages with their calls, their rerun results, and its own comparisons.

    ``lengths``: norms of expected gradients. ``unsure``: reasons for leaving some out, by name. ``foreseen``: the
    optimizer's update is known. ``precision``: of its stages. ``summed``: of sums over ranks. ``reported``: to the
    check. ``weights``: initial ones. ``problem``: why it cannot be judged. ``no_norm``: why no norm is reported.
    """

    ledger: Ledger
    stages: Mapping[int, StageCalls] = field(default_factory=dict)
    links: Mapping[int, tuple[Link, ...]] = field(default_factory=dict)
    lengths: Mapping[Site, float] = field(default_factory=dict)
    unsure: Mapping[str, str] = field(default_factory=dict)
    foreseen: bool = False
    precision: Precision = FP32
    summed: Precision = FP32
    reported: Reported = field(default_factory=Reported)
    weights: Weights = field(default_factory=dict)
    problem: str = ""
    no_norm: str = ""


@dataclass(frozen=True)
class Whole:
    """The step of one line: all ranks' ``parts`` and what they ``agreed`` upon, under the options ``by``.

    ``data``: its microbatches, whose losses are divided by ``divisor``.
    """

    parts: Sequence[OwnPart]
    data: Data
    divisor: float
    agreed: Agreed
    by: AgainstItself

    @classmethod
    def of(cls, parts: Sequence[OwnPart], agreed: Agreed, by: AgainstItself) -> "list[Whole]":
        """Build the step of each line from all ranks' parts; ranks outside a line have an empty part."""
        found = list[Whole]()
        for line in range(agreed.run.count):
            own = [
                one if of == line else OwnPart(Ledger(LAWS)) for one, of in zip(parts, agreed.run.replicas, strict=True)
            ]
            data = agreed.data_of(line)
            found.append(cls(own, data, agreed.own_divisor(by.contract.loss_divisor, len(data)), agreed, by))
        return found

    @cached_property
    def chain(self) -> Chain:
        """Calls of all stages."""
        calls = {stage: one for part in self.parts for stage, one in part.stages.items()}
        for stage, links in self._links.items():  # gradients of outputs come from later stages alone
            pairs = zip(calls[stage].calls, links, strict=True)
            own = tuple(call.without_own_gradients(link.received) for call, link in pairs)
            calls[stage] = replace(calls[stage], calls=own)
        return Chain(calls, self.data)

    @cached_property
    def passed(self) -> dict[int, Passed]:
        """Flow through every stage."""
        return self.chain.passages(self._links)

    @cached_property
    def lengths(self) -> dict[Site, float]:
        """Norms of expected gradients."""
        return {site: one for part in self.parts for site, one in part.lengths.items()}

    @cached_property
    def precision(self) -> Precision:
        """Rounding of its numbers."""
        return next((part.precision for part in self.parts if part.links), FP32)

    @cached_property
    def expected(self) -> Expected:
        """Combined results of the links; NaN for unknown losses."""
        losses = tuple(self._losses.get(m, math.nan) for m in range(self.chain.microbatches))
        return Expected("train", losses, sum(losses) / self.divisor, norm=norm_of(self.lengths, self.agreed.first))

    @cached_property
    def observed(self) -> Observed:
        """Actions and reports of its ranks."""
        rows = list[tuple[RankOperation]]()
        for part in self.parts:
            flows = [self.passed[stage] for stage in part.stages]
            actions = [action for flow in flows for action in flow.actions]
            times = [time for flow in flows for time in flow.times]
            if len(times) == len(actions):
                actions = [actions[k] for k in sorted(range(len(actions)), key=times.__getitem__)]
            row = RankOperation(
                "train",
                next(iter(part.reported.losses), ()),
                tuple(actions),
                called=tuple(call for flow in flows for call in flow.called),
                crossings=tuple(crossing for flow in flows for crossing in flow.crossings),
                uncompared=sum(flow.uncompared for flow in flows),
                loss=next(iter(part.reported.loss), None),
                norm=next(iter(part.reported.norm), None),
            )
            rows.append((row,))
        placement = tuple(self.chain.stages[stage].rank for stage in sorted(self.chain.stages))
        return Observed(Schedule("job", self.chain.microbatches, placement, ((),) * len(rows)), tuple(rows))

    @cached_property
    def _links(self) -> dict[int, tuple[Link, ...]]:
        return {stage: links for part in self.parts for stage, links in part.links.items()}

    @cached_property
    def _losses(self) -> dict[int, float]:
        """Losses from the rerun last stage, by microbatch."""
        last, numbers = self._links.get(self.chain.last, ()), self.chain.orders[self.chain.last].numbers
        return {m: link.loss for m, link in zip(numbers, last, strict=False) if link.loss is not None and link.closed}

    @property
    def conditions(self) -> Conditions:
        """Conditions on its calls."""
        last, stages = self.chain.last, self.chain.stages.items()
        idle = (k for k, here in stages if k != last and not any(call.giving or call.unread for call in here.calls))
        matters = any(link.mode_matters for links in self._links.values() for link in links)
        numbered = zip(self.chain.orders[last].numbers, self._links.get(last, ()), strict=False)
        owing = {m: link.owes for m, link in numbered if link.loss is not None}
        # A microbatch owes nothing if its known loss trains nothing; if this is true for all, it may be a mistake.
        nothing = frozenset(m for m, owes in owing.items() if not owes) if any(owing.values()) else ()
        counts = (self.chain.microbatches,)
        return Conditions(counts=counts, frozen=frozenset(idle), weightless=nothing, mode_matters=lambda: matters)

    def enter(self, ledger: Ledger) -> None:
        """Enter mismatches in the chain, except crossings, and parameters of the model without a stage."""
        at, only = Execution(self.conditions, self.observed, ledger), self.agreed.only
        names, places = self.agreed.first, self.agreed.places
        if not self.agreed.known:
            ledger.skip("parameters-once", "the model is not known: pass build= to have its parameters counted")
        else:
            counts = {name: 1 if name in names else len(those) for name, those in places.items()}
            Comparison(ExpectedOperation("train", (), ()), Allowed(), ledger).count_holders(names, counts, places)
        at.orders(0, backward=True)
        at.count_reshaped(0)
        enter_wiring(self.chain, ledger, loss_inside=self.by.loss_fn is None)
        for stage, flow in self.passed.items():  # arrivals whose expected values are unknown
            came = [one for one in flow.crossings if one.where == RECEIVED and not one.judged]
            left = [f"{one.what} of {one.at}" for one in came if one.really is not None]
            if left and (why := why_unsure(stage, self.chain.stages[stage], self._links[stage])):
                ledger.leave_out(_BETWEEN, left, why)
        for stage, links in self._links.items():
            strange = any(link.strange for link in links)  # a call's results change in each run
            if strange:
                ledger.doubt(_BETWEEN, f"stage {stage} gives something else each time that it is run", Reason.RERUN)
            if any(link.endless for link in links):
                ledger.doubt(_BETWEEN, f"what stage {stage} gives is not finite", Reason.NOT_FINITE)
            elif any(one.limit == math.inf for one in self.passed[stage].crossings) and not strange:
                why = f"what came to stage {stage} is not finite in the type of what it gave"
                ledger.doubt(_BETWEEN, why, Reason.NOT_FINITE)
            for why in dict.fromkeys(link.obstacle for link in links if link.obstacle):
                ledger.doubt(_BETWEEN, why, Reason.RERUN)
        if only is not None:
            ledger.skip("updated-parameters", _ONE_STAGE.format(only))
        elif not any(part.foreseen for part in self.parts):
            ledger.skip("updated-parameters", "the optimizer is not known: pass optimizer= to have its step compared")
        at.report_uncompared(0, doubtful=_are_gradients_wrong(ledger))

    def enter_reported(self, law: str, ledger: Ledger, totals: Sequence[float]) -> None:
        """Compare ranks' reports under ``law`` with the last stage and all gradients.

        ``totals``: further allowed values of the loss over all replicas. With unequal numbers of microbatches, either
        replicas or microbatches may count equally.
        """
        operation = expect_operation(self.expected)
        parts = [part for part in self.parts if part.links]
        last, usual = self._links.get(self.chain.last, ()), self.precision
        if law == "grad-norm":
            allowed = Allowed(floor=default_floor(coarsest([part.summed for part in parts])))
        else:  # losses round as their own type
            own_types = [precision_of(one.loss_type) for one in last if one.loss_type is not None]
            precision, apart = coarsest(own_types or [usual]), max((link.loss_apart for link in last), default=0.0)
            floor = default_floor(replace(precision, most=max(precision.most, usual.most)))
            allowed = Allowed(floor=replace(floor, rounding=apart))
        at = partial(Comparison, allowed=allowed, ledger=ledger)
        for rank, own in enumerate(part.reported for part in self.parts):
            if law == "grad-norm":
                for norm in own.norm:
                    at(operation).norm(norm, rank=rank)
                continue
            for losses in own.losses:
                at(operation).losses(losses, rank=rank)
            for loss in own.loss:
                _, nearest = min((abs(one - loss), one) for one in (self.expected.loss, *totals))
                at(replace(operation, loss=nearest)).loss(loss, rank=rank)

    def unknown(self, law: str) -> str:
        """Say why the expected value under ``law`` is unknown; empty if known."""
        needed = [self.chain.last] if law == "loss" else sorted(self._links)
        lost = [stage for stage in needed if not all(link.closed for link in self._links.get(stage, ()))]
        if lost:
            return not_known(lost)
        if law == "loss":
            seldom = len(self._losses) < self.chain.microbatches
            return Reason.CALLS.doubt("the last stage was not called once for each microbatch") if seldom else ""
        return next((why for part in self.parts for why in part.unsure.values()), "")


def judge(wholes: Sequence[Whole], weights: Sequence[Weights], *, title: str) -> Verdict:
    """Judge a step from ``wholes``, its lines of ranks; without causes.

    ``weights``: each rank's initial ones.
    """
    laws = LAWS if len(wholes) == 1 else OF_REPLICAS
    ledger = Ledger(laws)
    for whole in wholes:
        for part in reversed(whole.parts):
            ledger.join(part.ledger)
    if len(wholes) > 1:
        enter_weights(ledger, weights)
    for whole in wholes:
        whole.enter(ledger)
    # Crossings are entered along the flow, over stages in all lines: ranks that compute together go wrong together.
    rows: list[list[Crossing]] = [[] for _ in wholes[0].parts]
    for whole in wholes:
        for rank, (own,) in enumerate(whole.observed.ranks):
            rows[rank] += [replace(one, rank=rank) for one in own.crossings]
    ranks = tuple((RankOperation("train", (), (), crossings=tuple(row)),) for row in rows)
    observed = Observed(wholes[0].observed.schedule, ranks)
    Execution(wholes[0].conditions, observed, ledger).crossings(0)
    _enter_reported(wholes, ledger)
    if any(mismatch.law in ("microbatches", "boundaries") for mismatch in ledger.mismatches):
        for law in LAWS[3:]:
            ledger.remark(law, AS_IT_CAME)
    ledger.mismatches.sort(key=lambda one: laws.index(one.law))
    return conclude(ledger, title, otherwise=wholes[0].precision)


def _enter_reported(wholes: Sequence[Whole], ledger: Ledger) -> None:
    """Enter the ranks' reports of losses and norm."""
    own = [(whole.expected.loss, whole.divisor) for whole in wholes]
    whole_loss = sum(loss * divisor for loss, divisor in own) / sum(divisor for _, divisor in own)
    totals = whole_loss, sum(loss for loss, _ in own) / len(own)
    first, only, wrong = wholes[0], wholes[0].agreed.only, _are_gradients_wrong(ledger)
    no_norm = next((part.no_norm for whole in wholes for part in whole.parts if part.no_norm), "")
    for law, why, applies in (
        ("loss", _UNREPORTED, only in (None, first.chain.last)),
        ("grad-norm", no_norm or _UNREPORTED, only is None),
    ):
        names = ("norm",) if law == "grad-norm" else ("losses", "loss")
        reported = [
            whole for whole in wholes if any(getattr(part.reported, one) for part in whole.parts for one in names)
        ]
        if not applies:
            ledger.skip(law, _ONE_STAGE.format(only))
        elif not reported:
            ledger.miss(law, why)
        for whole in reported if applies else ():
            if unknown := whole.unknown(law):
                ledger.doubt(law, unknown)
            elif law == "grad-norm" and wrong:
                ledger.miss(law, "gradients are wrong, and it follows from them")
            else:
                whole.enter_reported(law, ledger, totals)


def _are_gradients_wrong(ledger: Ledger) -> bool:
    return any(one.law in ("presence", "gradient") for one in ledger.mismatches)


def norm_of(lengths: Mapping[Site, float], first: Mapping[str, str]) -> float:
    """Return the norm over logical parameters: copies, with one ``first`` name, count once."""
    one_each = {first.get(name, name): length for (_, name), length in lengths.items()}
    finite = all(map(math.isfinite, one_each.values()))
    return math.sqrt(math.fsum(length**2 for length in one_each.values())) if finite else math.nan

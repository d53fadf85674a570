"""Judge a step against its reference, law by law."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from pipeproof.core.comparison import Allowed, Comparison, expect_operation, hold_claim, leave_out, tell_of_unmoved
from pipeproof.core.execution import Execution, where_of
from pipeproof.core.floors import Floors
from pipeproof.core.ledger import NOWHERE, Ledger
from pipeproof.core.limits import FP32, Precision, precision_of
from pipeproof.core.measured import Measured
from pipeproof.core.measuring import MeasuredFloors, is_wider, trace_of
from pipeproof.core.mismatch import Mismatch
from pipeproof.core.nudged import doubt_rounding
from pipeproof.core.observe.elements import any_nonzero
from pipeproof.core.observe.observed import Observed
from pipeproof.core.oracle import Answer, Requirements
from pipeproof.core.reason import Reason
from pipeproof.core.routes import judge_routes
from pipeproof.core.tolerance import Floor, error, is_rounded_to, same_bits
from pipeproof.core.verdict import Crash, Tier, Verdict, overall
from pipeproof.reference.step import Expected, Site

LAWS = (
    "microbatches",  # every stage ran forward and backward once for each microbatch, in the right mode
    "parameters-once",  # each model parameter is in exactly one stage, a tied one once in each stage that shares it
    "loss",  # per microbatch, and the step's total on each rank
    "presence",  # a gradient is None exactly where the reference has None
    "gradient",  # per parameter
    "tied-copies",  # gradients and parameters agree between all copies
    "grad-norm",  # over logical parameters, on each rank
    "updated-parameters",  # after clip and optimizer step
    "buffers",  # state written by forwards, such as running statistics
    "second-step",  # all laws in a later step: no stale state
    "accumulation",  # all laws when gradients come from two calls
    "eval",  # evaluation between steps: its losses, and all laws in the next step
)

_LOCATE = ("microbatches", "boundaries", "initial-weights")  # laws that decide nothing beside compared results
Scenarios = frozenset[str]


def scenarios(plan: Sequence[str]) -> list[Scenarios]:
    """Return laws about each operation's place in the plan. A first plain step has none."""
    laws: list[Scenarios] = []
    trained, since = False, set[str]()
    for operation in plan:
        since |= {"accumulate": {"accumulation"}, "eval": {"eval"}}.get(operation, set())
        laws.append(frozenset(since or ({"second-step"} if trained else set())))
        if operation == "train":
            trained, since = True, set()
    return laws


class Judge:
    """Asks the oracle about each planned operation, then compares."""

    def __init__(self, required: Requirements, observed: Observed) -> None:
        self._required = required
        self._observed = observed
        self.ledger = Ledger(required.laws)
        self._scenarios = scenarios(required.plan)
        self._evidence = self.ledger.empty_copy()  # evidence since the last update: it locates a fault
        self._found = self.ledger.empty_copy()  # results for the current operation
        self.measured: Floors | None = None
        self._trained: dict[int, Collection[tuple[int | None, bool]]] = {}  # by operation: did they move?

    def judge_observed(self) -> Crash | None:
        """Run ``judge`` and return a raised error. Earlier ledger entries stay."""
        try:
            self.judge()
        except Exception as error:  # any type: the reference is user code, and ranks may return anything
            if self._required.foreign and not self._found.failed:
                self._set_aside("not every result was compared")
            self.ledger.join(self._evidence)
            self.ledger.join(self._found)
            return Crash.of(error)
        return None

    def judge(self) -> None:
        """Compare operations up to the first mismatch. Later mismatches follow from it."""
        required, planned = self._required, set[str]().union(*self._scenarios)
        unplanned = {"second-step", "accumulation", "eval"} & set(required.laws) - planned
        skipped = {} if required.tied else {"tied-copies": "no parameter has copies in several stages"}
        skipped |= dict.fromkeys(unplanned, "the plan does not have it")
        for law, why in {**skipped, **required.skipped}.items():
            self.ledger.skip(law, why)
        unseen = {law: why for law, why in self._observed.unseen.items() if law in required.laws}
        for law, why in {**required.missed, **unseen}.items():
            self.ledger.miss(law, why)
        for law, note in required.remarks.items():
            self.ledger.remark(law, note)
        Execution(self._required, self._observed, self.ledger).parameters_once()
        self.ledger.scenarios = self._scenarios  # from here on: who holds parameters belongs to no operation
        self._evidence = self.ledger.empty_copy()
        for number in range(len(self._scenarios)):
            if number and self.ledger.failed:
                how = "already disagrees" if self.ledger.mismatches else "is not known to be right"
                for law in set[str]().union(*self._scenarios[number:]).difference(*self._scenarios[:number]):
                    self.ledger.doubt(law, f"not judged: operation {number} {how}", Reason.EARLIER)
                break
            self.ledger.held = self.ledger.exact if number else frozenset()
            self._operation(number)
        self.ledger.join(self._evidence)
        if self._required.foreign and not self.ledger.failed:
            for one in self.ledger.laws():
                if one.name in _LOCATE and one.outcome == "unknown" and not one.checked:
                    self.ledger.miss(one.name, one.note)
        tell_of_unmoved(self.ledger, self._trained)

    def _operation(self, number: int) -> None:
        """Judge one operation: results decide; calls, boundaries and starting weights locate a fault."""
        evidence = self._evidence
        results = self._found = self.ledger.empty_copy()
        execution = Execution(self._required, self._observed, evidence)
        backward = self._required.plan[number] != "eval"
        answer = self._required.oracle.answer(number, execution.orders(number, backward=backward))
        expected, wide = answer.expected, self._wide(number, answer)
        allowed = Allowed(floor=Floor(0.0, 0.0, 0.0, self._required.oracle.precision))
        if answer.floors is not None:
            allowed = MeasuredFloors(answer.floors, {site[1]: site for site in expected.gradients}, wide)
        operation = expect_operation(expected)
        loss = expected.loss if self._required.foreign else operation.loss
        operation = replace(operation, gradients={**operation.gradients, **wide}, loss=loss)
        at = Comparison(operation, allowed, results, number=number)
        for claim in (claim for rank in self._observed.ranks for claim in rank[number].claims):
            hold_claim(evidence if claim.law == "initial-weights" else results, claim, number)
        same_start = self._same_start(replace(at, ledger=evidence), expected)
        self._results(at, answer)
        decisive = "gradient" if expected.gradients else "loss"
        compared = self._required.foreign and bool(results.compared_names(decisive, number))
        right = compared and not (results.failed or self.ledger.failed)
        routes = results.empty_copy()
        judge_routes(routes, number, answer, self._observed)
        if right:
            routes.set_aside(routes.mismatches, "every result is right: it was not computed with these")
        results.join(routes)
        if same_start or right:
            execution.crossings(number)
        self._conclude(number, execution, results, right=right)
        self._found = self.ledger.empty_copy()

    def _conclude(self, number: int, execution: Execution, results: Ledger, *, right: bool) -> None:
        """Enter all results into the ledger. ``right``: each result of a foreign step was compared, and is right."""
        evidence, decide = self._evidence, self._required.foreign
        if decide and self._required.plan[number] == "accumulate" and not results.failed:
            self.ledger.join(results)  # the update that uses its gradients shows whether they are right
            return
        wrong = any(law.outcome == "fail" for law in results.laws())
        if right or (decide and results.failed and not wrong):
            self._set_aside("every result is right" if right else "no result is wrong")
        elif decide and self._required.plan[number] == "train":
            mismatches = [*evidence.mismatches, *results.mismatches]
            wrong_stages = {m.stage for m in mismatches if m.law not in ("microbatches", "initial-weights")}
            gradients = self._observed.gradients(number)
            observed = {site[0] for site, one in gradients.items() if one is not None and any_nonzero(one)}
            self._set_aside("gradients of the stage are right", stages=observed - wrong_stages)
        if decide:
            doubtful = any(m.law in ("gradient", "presence") for m in results.mismatches)
            execution.report_uncompared(number, doubtful=doubtful)
        self.ledger.join(evidence)
        laws = {m.law for m in evidence.mismatches}
        first = min((m.operation for m in evidence.mismatches if m.operation <= number), default=0)
        why = "the weights differ before the step" if "initial-weights" in laws else ""
        why = why or f"operation {first} already disagrees" * bool(first)
        if why:
            for law in set(self._required.laws) - {"parameters-once"} - laws:
                self.ledger.doubt(law, f"not judged: {why}", Reason.EARLIER)
        else:
            self.ledger.join(results)
        self._evidence = self.ledger.empty_copy()

    def _set_aside(self, why: str, stages: Collection[int] | None = None) -> None:
        """Demote evidence to remarks, except a rank's own trace, which is a report. ``stages``: their calls alone."""
        every, traced = self._evidence.mismatches, self._required.traced
        found = [m for m in every if m.law != "microbatches" or m.stage not in traced]
        if stages is not None:
            found = [m for m in found if m.law == "microbatches" and m.stage in stages]
        self._evidence.set_aside(found, why)

    def _results(self, at: Comparison, answer: Answer) -> None:
        """Compare losses, outputs, buffers, gradients, norm and weights."""
        number, expected, results = at.number, answer.expected, at.ledger
        name = self._required.plan[number]
        self._losses(at, expected)
        self._outputs(at, answer)
        self._buffers(at, expected)
        if name == "train":
            self._gradients(at, expected)
            assert answer.follow is not None, "asked of a training step"
            at.follow(expected, self._observed.gradients(number), answer.follow)
            for rank, operations in enumerate(self._observed.ranks):
                norm = operations[number].norm
                if norm is not None or not self._required.foreign:
                    at.norm(math.nan if norm is None else norm, rank=rank)
            self._updates(at, expected, answer.max_norm)
            self.measured = self.measured or answer.floors
            if answer.floors is not None and answer.floors.obstacle:
                results.remark("gradient", answer.floors.obstacle)
        elif name == "eval" and self._required.foreign and not results.compared_names("loss", number):
            why = "reports no losses, so it is not known what it computed: hand them back"
            results.doubt("eval", f"operation {number + 1} {why}", Reason.UNREPORTED)
        at.tell()
        self._trained[number] = at.trained.values()
        leave_out(results, at.expected, number=number, names=())

    def _wide(self, number: int, answer: Answer) -> dict[str, Tensor]:
        """Return gradients that ranks summed in a wider type, by name.

        Beside such gradients, others with the narrow type's digits alone should have been wide as well.
        """
        found, narrow = dict[str, Tensor](), dict[str, Tensor]()
        for site, observed in self._observed.gradients(number).items():
            expected = answer.expected.gradients.get(site)
            if observed is None or expected is None or answer.floors is None or not is_wider(observed, expected):
                continue
            wide = answer.floors.sum_in(observed.dtype, site)
            if wide is not None and error(observed, wide) <= precision_of(observed.dtype).least:
                found[site[1]] = wide
            elif wide is not None and is_rounded_to(precision_of(expected.dtype), observed, wide):
                narrow[site[1]] = wide
        return found | narrow if found else {}

    def _same_start(self, at: Comparison, expected: Expected) -> bool:
        """Compare weights before the operation, on each rank. True if all agree."""
        before = self._observed.before(at.number)
        order = {name: place for place, name in enumerate(expected.before)}
        for site in sorted(before, key=lambda site: order[site[1]]):
            at.start(site[1], before[site], **where_of(self._observed, site[0]))
        if before:
            unseen = sorted(name for stage, name in self._required.expected - before.keys() if stage != NOWHERE)
            at.ledger.leave_out("initial-weights", unseen, "not observed before the step", hides=False)
        return not any(one.law == "initial-weights" for one in at.ledger.mismatches)

    def _losses(self, at: Comparison, expected: Expected) -> None:
        placement, n_ranks = self._observed.schedule.placement, self._observed.schedule.n_ranks
        first, adds = self._observed.first_nonfinite(at.number), expected.operation == "accumulate"
        broken = None if first is None else (first, placement[first.stage])
        every = [operations[at.number] for operations in self._observed.ranks]
        for rank, own in enumerate(every):
            # Our accumulate() reports losses where they are known, without a total.
            if own.losses if self._required.foreign else not adds or rank % n_ranks == placement[-1]:
                at.losses(own.losses, share=own.share, rank=rank, broken=broken)
        for rank, own in enumerate(every):
            if broken is not None and own.loss != own.loss and any(map(math.isnan, own.losses)):
                continue  # a NaN sum follows from a NaN loss, reported above
            if own.loss is not None or not (self._required.foreign or adds):
                at.loss(math.nan if own.loss is None else own.loss, rank=rank)

    def _outputs(self, at: Comparison, answer: Answer) -> None:
        made, floors = [one.outputs for one in answer.expected.contributions], answer.floors
        for rank, operations in enumerate(self._observed.ranks):
            own = operations[at.number]
            for name, observed in own.outputs.items():
                assert floors is not None, "who hands outputs back is judged by floors"
                floor = partial(floors.output, name=name)
                share = range(len(made)) if own.share is None else own.share
                at.outputs(name, observed, [one[name] for one in made], floor, share=share, rank=rank)
        reported = {name for rank in self._observed.ranks for name in rank[at.number].outputs}
        ever = {name for rank in self._observed.ranks for one in rank for name in one.outputs}
        why = f"not handed back in operation {at.number + 1}"
        missing = [name for name in (made[0] if made else ()) if name in ever - reported]
        at.ledger.leave_out("outputs", missing, why, hides=False)

    def _buffers(self, at: Comparison, expected: Expected) -> None:
        if "buffers" not in self._required.laws:
            return
        if not expected.buffers:
            at.ledger.skip("buffers", "the model has none")
        observed = self._observed.buffers(at.number)
        missing = sorted(expected.buffers.keys() - {name for _, name in observed})
        for name in () if self._required.foreign else missing:
            at.buffer(name, None)
        if self._required.foreign and observed:
            at.ledger.leave_out("buffers", missing, "not compared", hides=False)
        for site, buffer in sorted(observed.items(), key=lambda item: item[0]):
            at.buffer(site[1], buffer, **where_of(self._observed, site[0]))

    def _gradients(self, at: Comparison, expected: Expected) -> None:
        observed = self._observed.gradients(at.number)
        # From the last stage down, as gradients flow: the first mismatch lies nearest to the fault.
        for site in sorted(expected.gradients, key=lambda site: (-site[0], site[1])):
            # Others are reported already, or are another name for a judged parameter.
            if site[0] != NOWHERE and site in self._required.expected:
                at.gradient(site[1], observed.get(site), **where_of(self._observed, site[0]))
        self._copies(at, "gradient", observed)

    def _copies(self, at: Comparison, what: str, observed: Mapping[Site, Tensor | None]) -> None:
        for copies in self._required.tied:
            (first, *others) = sorted(copies.items())
            for other in others:
                one, two = observed.get(first), observed.get(other)
                same = one is two is None or (one is not None and two is not None and same_bits(one, two))
                where = where_of(self._observed, other[0])
                place = Mismatch("tied-copies", at.number + 1, parameter=other[1], **where)
                at.ledger.hold(place, same, f"another {what} than {first[1]} of stage {first[0]}", f"the same {what}")

    def _updates(self, at: Comparison, expected: Expected, max_norm: float) -> None:
        if "updated-parameters" not in self._required.laws:
            return
        observed = self._observed.parameters(at.number)
        held = {site for site in self._required.expected if site[0] != NOWHERE}
        updated = {site for site in expected.gradients if site[1] in at.expected.parameters}
        unseen = sorted(name for stage, name in (updated & held) - observed.keys())
        at.ledger.leave_out("updated-parameters", unseen, "not observed after the step")
        for site in sorted(updated & observed.keys()):
            at.parameter(site[1], observed[site], **where_of(self._observed, site[0]))
        self._copies(at, "parameter", observed)
        norm = expected.norm or 0.0
        if norm <= max_norm < math.inf and at.number == self._required.plan.index("train"):
            never = f"clipping to {max_norm} never acted on a norm of {norm:.3g}"
            at.ledger.doubt("updated-parameters", never, Reason.NOTHING)


def judge_observed(required: Requirements, observed: Observed, *, measure: bool = False) -> Verdict:
    """Judge ``observed``. ``measure``: measure floors for the report even where all bits agree."""
    began = perf_counter()
    with one_thread():
        at = Judge(required, observed)
        crash = at.judge_observed()
        floor = at.measured.worst() if measure and at.measured is not None else 0.0
        verdict = conclude(at.ledger, required.config, otherwise=required.oracle.precision)
        verdict = doubt_rounding(verdict.before_its_end(crash), required.oracle.nudged, required.oracle.products)
    plan = required.plan
    trained = [k for k, name in enumerate(plan) if name == "train"]
    if len(plan) > 1:
        named = tuple(replace(one, doing=plan[one.operation - 1]) for one in verdict.mismatches)
        verdict = replace(verdict, mismatches=named)
    number = min((one.operation - 1 for one in verdict.mismatches), default=max(trained, default=0))
    measured = replace(verdict.measured, ran=trace_of(observed, number))
    seconds = perf_counter() - began
    return replace(verdict, bindings=required.bindings, floor=floor, measured=measured, seconds=seconds)


def conclude(
    ledger: Ledger, config: str, *, otherwise: Precision = FP32, rerun: str = "", seconds: float = 0.0
) -> Verdict:
    """Build a verdict from all ledger entries. ``otherwise``: see ``Ledger.tier``."""
    outcome = overall(laws := ledger.laws())
    tier: Tier = ledger.tier(otherwise) if outcome == "pass" else "none"
    measured, found = Measured(tuple(ledger.compared.values())), tuple(ledger.mismatches)
    return Verdict(config, outcome, tier, laws, found, rerun=rerun, seconds=seconds, measured=measured)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one intra-op thread, as ranks do: two threads change some kernels' last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

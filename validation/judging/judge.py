"""Holding what a schedule produced against the reference, law by law."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TypedDict

import torch
from torch import Tensor

from pipeproof.judging.comparison import Comparison, Due, leave_out, tell_of_unmoved
from pipeproof.judging.execution import Execution
from pipeproof.judging.floors import Floors
from pipeproof.judging.ledger import NOWHERE, Headings, Ledger
from pipeproof.judging.measured import Measured
from pipeproof.judging.measuring import ran_of
from pipeproof.judging.oracle import Answer
from pipeproof.judging.requirements import Requirements
from pipeproof.judging.routes import RouteJudge
from pipeproof.judging.tolerance import FP32, Floor, Precision, error, precision_of, rounded_to, same_bits
from pipeproof.judging.verdict import Crash, Mismatch, Tier, Verdict, overall
from pipeproof.observers.elements import any_nonzero
from pipeproof.observers.observed import Observed
from pipeproof.reference.step import Expected, Site

LAWS = (
    "microbatches",  # every stage ran forward and backward once for each microbatch, in the right mode
    "parameters-once",  # every parameter of the model is in exactly one stage, a tied one once in each that shares it
    "loss",  # each microbatch's, and the whole step's, as every rank reports it
    "presence",  # a gradient is None exactly where the reference's is
    "gradient",  # every parameter's
    "tied-copies",  # gradients and parameters of all copies are equal
    "grad-norm",  # over logical parameters, as every rank reports it
    "updated-parameters",  # after clip and optimizer step
    "buffers",  # what forwards leave behind, such as running statistics
    "second-step",  # all of these in a later step: no stale state
    "accumulation",  # all of these when gradients come from two calls
    "eval",  # evaluation between steps: its losses, and all of these in the step after it
)

Scenarios = frozenset[str]


def scenarios(plan: Sequence[str]) -> list[Scenarios]:
    """For each operation, the laws about its place in the plan; none for a first, plain step."""
    laws: list[Scenarios] = []
    trained, since = False, set[str]()
    for operation in plan:
        since |= {"accumulate": {"accumulation"}, "eval": {"eval"}}.get(operation, set())
        laws.append(frozenset(since or ({"second-step"} if trained else set())))
        if operation == "train":
            trained, since = True, set()
    return laws


class Where(TypedDict, total=False):
    """Where a parameter lies, as far as that is known."""

    rank: int
    stage: int


def due_of(expected: Expected) -> Due:
    """What the reference expects of an operation, by the names of parameters: each name has one site."""
    return Due(
        expected.operation,
        (),
        expected.losses,
        None if expected.operation == "accumulate" else expected.loss,  # what accumulates reports no loss of its own
        expected.norm,
        before=expected.before,
        gradients={name: gradient for (_, name), gradient in expected.gradients.items()},
        parameters={name: parameter for (_, name), parameter in expected.parameters.items()},
        buffers=expected.buffers,
    )


def _wider(seen: Tensor, due: Tensor) -> bool:
    """Whether ``seen`` is of a type that has more digits than that of ``due``."""
    if not (seen.is_floating_point() and due.is_floating_point()) or seen.shape != due.shape:
        return False
    return torch.finfo(seen.dtype).eps < torch.finfo(due.dtype).eps


@dataclass(frozen=True)
class _Measured:
    """What rounding may do, as measured on this very run; ``floors`` are a training step's.

    ``wide`` are gradients that were added up in a wider type.
    """

    floors: Floors | None
    precision: Precision
    sites: Mapping[str, Site]
    wide: Mapping[str, Tensor]

    def loss(self, microbatch: int) -> Floor:
        return self._least if self.floors is None else self.floors.loss(microbatch)

    def total(self) -> Floor:
        return self._least if self.floors is None else self.floors.total()

    def norm(self) -> Floor:
        return self._least if self.floors is None else self.floors.norm()

    def gradient(self, name: str) -> Floor:
        if name in self.wide:
            return Floor(0.0, 0.0, 0.0, precision_of(self.wide[name].dtype))
        return self._least if self.floors is None else self.floors.gradient_by_microbatch(self.sites[name])

    @property
    def _least(self) -> Floor:
        return Floor(0.0, 0.0, 0.0, self.precision)

    def update(self, name: str) -> Floor:
        if name in self.wide or self.floors is None:
            return self.gradient(name)
        return self.floors.update(self.sites[name])

    def slope(self, name: str) -> Tensor | None:
        return None if name in self.wide or self.floors is None else self.floors.slope(self.sites[name])


class Judge:
    """Asks the oracle for each operation of the plan, and compares."""

    def __init__(self, required: Requirements, observed: Observed) -> None:
        self._required = required
        self._observed = observed
        self.ledger = Ledger(required.laws)
        self._place = Headings(observed.schedule.placement)
        self._execution = Execution(required, observed, self.ledger)
        self.measured: Floors | None = None
        self._trained: dict[int, Collection[tuple[int | None, bool]]] = {}  # by operation: did they move?

    def judged(self) -> Crash | None:
        """``judge``, and what it raised: what was entered in the ledger before stays."""
        try:
            self.judge()
        except Exception as error:  # no one type: what ranks gave may be anything, and a reference the user's own
            return Crash.of(error)
        return None

    def judge(self) -> None:
        """Compare everything up to the first operation that disagrees: what follows it is consequence."""
        self._skip_what_does_not_apply()
        self._execution.parameters_once()
        for number, laws in enumerate(scenarios(self._required.plan)):
            if number and self.ledger.failed:
                how = "already disagrees" if self.ledger.mismatches else "is not known to be right"
                for law in self._later_laws(number):
                    self.ledger.doubt(law, f"not judged: operation {number} {how}")
                break
            self.ledger.held = self.ledger.exact if number else frozenset()
            self._operation(number, laws)
        tell_of_unmoved(self.ledger, self._trained)

    def _later_laws(self, number: int) -> set[str]:
        plan = scenarios(self._required.plan)
        return set[str]().union(*plan[number:]) - set[str]().union(*plan[:number])

    def _skip_what_does_not_apply(self) -> None:
        if not self._required.tied:
            self.ledger.skip("tied-copies", "no parameter has copies in several stages")
        planned = set[str]().union(*scenarios(self._required.plan))
        for law in {"second-step", "accumulation", "eval"} & set(self._required.laws) - planned:
            self.ledger.skip(law, "the plan does not have it")
        for law, reason in self._required.skipped.items():
            self.ledger.skip(law, reason)
        for law, reason in self._required.missed.items():
            self.ledger.miss(law, reason)
        for law, note in self._required.remarks.items():
            self.ledger.remark(law, note)

    def _operation(self, number: int, laws: Scenarios) -> None:
        name = self._required.plan[number]
        answer = self._required.oracle.answer(number, self._execution.orders(number, laws, backward=name != "eval"))
        expected = answer.expected
        sites = {site[1]: site for site in expected.gradients}
        wide = self._wide(number, answer)
        allowed = _Measured(answer.floors, self._required.oracle.precision, sites, wide)
        due = due_of(expected)
        told = due.loss if self._required.every_rank else expected.loss
        due = replace(due, gradients={**due.gradients, **wide}, loss=told)
        at = Comparison(due, allowed, self.ledger, number=number, scenarios=laws)
        self._execution.claims(number, laws)
        if not self._same_start(at, number, expected):
            for law in set(self._required.laws) - {"initial-weights", "parameters-once"}:
                self.ledger.doubt(law, "not judged: the weights differ before the step")
            return
        self._execution.crossings(number, laws)
        self._losses(at, number, expected)
        self._outputs(at, number, answer)
        RouteJudge(self.ledger, number, laws, answer).judge(self._observed)
        self._buffers(at, number, expected)
        if name == "train":
            self._gradients(at, number, laws, expected)
            if self._required.by_numbers:
                self._execution.by_numbers(self._right(number, expected), laws)
                self._execution.uncompared(number)
            self._norms(at, number)
            self._updates(at, number, laws, expected, answer.max_norm)
            self.measured = self.measured or answer.floors
            if answer.floors is not None and answer.floors.obstacle:
                self.ledger.remark("gradient", answer.floors.obstacle)
        elif self._required.by_numbers:
            self._losses_tell(number, name, laws)
        at.tell()
        self._trained[number] = at.trained.values()
        leave_out(self.ledger, due, number=number, names=())

    def _losses_tell(self, number: int, name: str, laws: Scenarios) -> None:
        """Say what the losses tell of an operation that makes no update, and what is not known without them."""
        if self.ledger.entered("loss", number):
            if not self._others_wrong():
                self._execution.by_numbers(range(self._observed.schedule.n_stages), laws, what="the losses")
        elif name == "eval":
            why = "reports no losses, so it is not known what it computed: hand them back"
            self.ledger.doubt("eval", f"operation {number + 1} {why}")

    def _wide(self, number: int, answer: Answer) -> dict[str, Tensor]:
        """Gradients that were added up in a wider type than their own, where they are just that.

        Where some are, those beside them that have no more digits than the narrow type are to be so too.
        """
        found, narrow = dict[str, Tensor](), dict[str, Tensor]()
        for site, seen in self._observed.gradients(number).items():
            due = answer.expected.gradients.get(site)
            if seen is None or due is None or answer.floors is None or not _wider(seen, due):
                continue
            wide = answer.floors.added_in(seen.dtype, site)
            if wide is not None and error(seen, wide) <= precision_of(seen.dtype).least:
                found[site[1]] = wide
            elif wide is not None and rounded_to(precision_of(due.dtype), seen, wide):
                narrow[site[1]] = wide
        return found | narrow if found else {}

    def _same_start(self, at: Comparison, number: int, expected: Expected) -> bool:
        """Whether the weights that were seen before the operation are the reference's, on every rank."""
        before = self._observed.before(number)
        order = {name: place for place, name in enumerate(expected.before)}
        for site in sorted(before, key=lambda site: order[site[1]]):
            at.start(site[1], before[site], **self._where(site))
        if before:
            unseen = sorted(name for stage, name in self._required.due - before.keys() if stage != NOWHERE)
            self.ledger.leave_out("initial-weights", unseen, "not seen before the step", hides=False)
        return not any(one.law == "initial-weights" for one in self.ledger.mismatches)

    def _losses(self, at: Comparison, number: int, expected: Expected) -> None:
        placement, n_ranks = self._observed.schedule.placement, self._observed.schedule.n_ranks
        first, adds = self._observed.first_nonfinite(number), expected.operation == "accumulate"
        broken = None if first is None else (first, placement[first.stage])
        for rank, operations in enumerate(self._observed.ranks):
            own = operations[number]
            # accumulate() reports losses where they are known, and no whole one.
            knows = not adds or not self._required.every_rank or rank % n_ranks == placement[-1]
            if (own.losses or self._required.every_rank) and knows:
                at.losses(own.losses, share=own.share, rank=rank, broken=broken)
            if broken is not None and own.loss != own.loss and any(map(math.isnan, own.losses)):
                continue  # a sum of what is no number is none either: where that comes from is told
            if own.loss is not None or (self._required.every_rank and not adds):
                at.loss(math.nan if own.loss is None else own.loss, rank=rank)

    def _outputs(self, at: Comparison, number: int, answer: Answer) -> None:
        made, floors = [one.outputs for one in answer.expected.contributions], answer.floors
        for rank, operations in enumerate(self._observed.ranks):
            own = operations[number]
            for name, seen in own.outputs.items():
                assert floors is not None, "who hands outputs back is judged by floors"
                floor = partial(floors.output, name=name)
                share = range(len(made)) if own.share is None else own.share
                at.outputs(name, seen, [one[name] for one in made], floor, share=share, rank=rank)
        told = {name for rank in self._observed.ranks for name in rank[number].outputs}
        ever = {name for rank in self._observed.ranks for one in rank for name in one.outputs}
        why = f"not handed back in operation {number + 1}"
        self.ledger.leave_out(
            "outputs", [name for name in (made[0] if made else ()) if name in ever - told], why, hides=False
        )

    def _buffers(self, at: Comparison, number: int, expected: Expected) -> None:
        if "buffers" not in self._required.laws:
            return
        if not expected.buffers:
            self.ledger.skip("buffers", "the model has none")
        observed = self._observed.buffers(number)
        missing = expected.buffers.keys() - {name for _, name in observed}
        for name in missing if self._required.every_rank else ():
            at.buffer(name, None)
        if not self._required.every_rank and observed:
            self.ledger.leave_out("buffers", sorted(missing), "not compared", hides=False)
        for site, seen in sorted(observed.items(), key=lambda item: item[0]):
            at.buffer(site[1], seen, **self._where(site))

    def _gradients(self, at: Comparison, number: int, laws: Scenarios, expected: Expected) -> None:
        observed = self._observed.gradients(number)
        # From the last stage down, as gradients flow: the first to differ is the nearest to the fault.
        for site in sorted(expected.gradients, key=lambda site: (-site[0], site[1])):
            if site[0] != NOWHERE and site in self._required.due:  # else said already, or another name of one judged
                at.gradient(site[1], observed.get(site), **self._where(site))
        self._copies("gradient", number, laws, observed)

    def _right(self, number: int, expected: Expected) -> set[int]:
        """The stages of which something was computed and everything is right: frozen ones where everything else is."""
        observed = self._observed.gradients(number)
        laws = ("gradient", "presence", "boundaries", "shards", "replicas")
        wrong = {m.stage for m in self.ledger.mismatches if m.law in laws}
        due = {site for site, one in expected.gradients.items() if one is not None and any_nonzero(one)}
        seen = {stage for stage, name in due if (stage, name) in observed}
        return seen - wrong if wrong or self._others_wrong() else seen | {*self._required.frozen}

    def _others_wrong(self) -> bool:
        return any(m.law != "microbatches" for m in self.ledger.mismatches)

    def _copies(self, what: str, number: int, laws: Scenarios, observed: Mapping[Site, Tensor | None]) -> None:
        for copies in self._required.tied:
            (first, *others) = sorted(copies.items())
            for other in others:
                one, two = observed.get(first), observed.get(other)
                same = one is two is None or (one is not None and two is not None and same_bits(one, two))
                place = self._place.site("tied-copies", number, laws, other)
                self.ledger.hold(place, same, f"another {what} than {first[1]} of stage {first[0]}", f"the same {what}")

    def _norms(self, at: Comparison, number: int) -> None:
        for rank, operations in enumerate(self._observed.ranks):
            seen = operations[number].norm
            if seen is not None or self._required.every_rank:
                at.norm(math.nan if seen is None else seen, rank=rank)

    def _updates(self, at: Comparison, number: int, laws: Scenarios, expected: Expected, max_norm: float) -> None:
        if "updated-parameters" not in self._required.laws:
            return
        observed = self._observed.parameters(number)
        held = {site for site in self._required.due if site[0] != NOWHERE}
        unseen = sorted(name for stage, name in (expected.parameters.keys() & held) - observed.keys())
        self.ledger.leave_out("updated-parameters", unseen, "not seen after the step")
        for site in sorted(expected.parameters.keys() & observed.keys()):
            at.parameter(site[1], observed[site], **self._where(site))
        self._copies("parameter", number, laws, observed)
        norm = expected.norm or 0.0
        if norm <= max_norm < math.inf and number == self._required.plan.index("train"):
            never = f"clipping to {max_norm} never acted on a norm of {norm:.3g}"
            self.ledger.doubt("updated-parameters", never)

    def _where(self, site: Site) -> Where:
        """The rank and stage of a site, as far as they are known."""
        return {} if site[0] == NOWHERE else {"rank": self._observed.schedule.placement[site[0]], "stage": site[0]}


def judged(required: Requirements, observed: Observed, *, measure: bool = False) -> Verdict:
    """The verdict on ``observed``. ``measure``: measure floors even where every bit agrees, to report."""
    began = perf_counter()
    with one_thread():
        at = Judge(required, observed)
        crash = at.judged()
        floor = at.measured.worst() if measure and at.measured is not None else 0.0
    verdict = concluded(at.ledger, required.config, otherwise=required.oracle.precision, seconds=perf_counter() - began)
    trained = [k for k, name in enumerate(required.plan) if name == "train"]
    verdict = replace(verdict, mismatches=tuple(_named(one, required.plan) for one in verdict.mismatches))
    number = min((one.operation - 1 for one in verdict.mismatches), default=max(trained, default=0))
    measured = replace(verdict.measured, ran=ran_of(observed, number))
    return replace(verdict, bindings=required.bindings, floor=floor, measured=measured).before_its_end(crash)


def _named(one: Mismatch, plan: Sequence[str]) -> Mismatch:
    """``one``, with what its operation does, where there are several."""
    return replace(one, doing=plan[one.operation - 1]) if len(plan) > 1 else one


def concluded(
    ledger: Ledger, config: str, *, otherwise: Precision = FP32, rerun: str = "", seconds: float = 0.0
) -> Verdict:
    """The verdict that follows from all that was entered; ``otherwise`` as for the ledger's tier."""
    laws = ledger.laws()
    outcome = overall(laws)
    tier: Tier = ledger.tier(otherwise) if outcome == "pass" else "none"
    measured = Measured(tuple(ledger.compared.values()))
    found = tuple(ledger.mismatches)
    return Verdict(config, outcome, tier, laws, found, rerun=rerun, seconds=seconds, measured=measured)


@contextmanager
def one_thread() -> Iterator[None]:
    """One intra-op thread, as on the ranks: two threads change the last bits of some kernels."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

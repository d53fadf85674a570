"""Holding what a schedule produced against the reference, law by law."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from reference.step import Expected, Site
from validation.cases.case import Case
from validation.cases.observe import deterministic
from validation.judging.execution import Conduct
from validation.judging.floors import Floors
from validation.judging.headings import NOWHERE, Placing
from validation.judging.ledger import Ledger
from validation.judging.requirements import Subject, subject_of
from validation.judging.tolerance import Floor, may_be_rounded, same_bits, update_floor
from validation.judging.verdict import Tier, Verdict, overall
from validation.observers.observed import Observed

LAWS = (
    "microbatches",  # every stage ran forward and backward once for each microbatch, in the right mode
    "parameters-once",  # every parameter of the model is in exactly one stage, a tied one once in each that shares it
    "loss",  # each microbatch's, and the whole step's, as every rank reports it
    "none-ness",  # a gradient is None exactly where the reference's is
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


@dataclass(frozen=True)
class _Operation:
    """One operation of the plan under judgement."""

    number: int
    scenarios: Scenarios
    expected: Expected
    floors: Floors | None
    max_norm: float


class Judge:
    """Asks the subject's oracle for each operation of the plan, and compares."""

    def __init__(self, subject: Subject, observed: Observed) -> None:
        self._subject = subject
        self._observed = observed
        self._no_floor = Floor(0.0, 0.0, 0.0, subject.oracle.precision)
        self.ledger = Ledger(subject.laws)
        self._place = Placing(observed.schedule.placement)
        self._conduct = Conduct(subject, observed, self.ledger)
        self.measured: Floors | None = None

    def judge(self) -> None:
        """Compare everything up to the first operation that disagrees: what follows it is consequence."""
        self._skip_what_does_not_apply()
        self._conduct.parameters_once()
        for number, laws in enumerate(scenarios(self._subject.plan)):
            if number and self.ledger.failed:
                for law in self._later_laws(number):
                    self.ledger.doubt(law, f"not judged: operation {number} already disagrees")
                return
            self._operation(number, laws)

    def _later_laws(self, number: int) -> set[str]:
        plan = scenarios(self._subject.plan)
        return set[str]().union(*plan[number:]) - set[str]().union(*plan[:number])

    def _skip_what_does_not_apply(self) -> None:
        if not self._subject.tied:
            self.ledger.skip("tied-copies", "no parameter has copies in several stages")
        planned = set[str]().union(*scenarios(self._subject.plan))
        for law in {"second-step", "accumulation", "eval"} & set(self._subject.laws) - planned:
            self.ledger.skip(law, "the plan does not have it")
        for law, reason in self._subject.skipped.items():
            self.ledger.skip(law, reason)
        for law, note in self._subject.remarks.items():
            self.ledger.remark(law, note)

    def _operation(self, number: int, laws: Scenarios) -> None:
        name = self._subject.plan[number]
        answer = self._subject.oracle.answer(number, self._conduct.orders(number, laws, backward=name != "eval"))
        operation = _Operation(number, laws, answer.expected, answer.floors, answer.max_norm)
        self._conduct.claims(number, laws)
        if not self._same_start(operation):
            for law in set(self._subject.laws) - {"initial-weights", "parameters-once"}:
                self.ledger.doubt(law, "not judged: the weights differ before the step")
            return
        self._conduct.crossings(number, laws)
        self._losses(operation)
        self._buffers(operation)
        if name == "train":
            self._gradients(operation)
            self._norms(operation)
            self._updates(operation)
            self.measured = self.measured or answer.floors

    def _same_start(self, operation: _Operation) -> bool:
        """Whether the weights that were seen before the operation are the reference's, on every rank."""
        before = self._observed.before(operation.number)
        order = {name: number for number, name in enumerate(operation.expected.before)}
        for site in sorted(before, key=lambda site: order[site[1]]):
            place = self._place.site("initial-weights", operation.number, operation.scenarios, site)
            self.ledger.tensors(place, before[site], operation.expected.before[site[1]].cpu(), lambda: self._no_floor)
        return not any(one.law == "initial-weights" for one in self.ledger.mismatches)

    def _losses(self, operation: _Operation) -> None:
        expected, placement = operation.expected.losses, self._observed.schedule.placement
        if not all(loss == loss and abs(loss) != float("inf") for loss in expected):
            self.ledger.doubt("loss", f"the reference itself gives {_text(expected)}: there is nothing to compare with")
            return
        for rank, operations in enumerate(self._observed.ranks):
            own = operations[operation.number]
            loss, reported = own.loss, own.losses
            share = range(len(expected)) if own.share is None else own.share
            if loss is not None or self._subject.every_rank:
                self._whole_loss(operation, rank, loss)
            if operation.expected.operation == "accumulate" and rank % self._observed.schedule.n_ranks != placement[-1]:
                continue  # accumulate() reports losses where they are known
            if not reported and not self._subject.every_rank:
                continue
            place = self._place.at("loss", operation.number, operation.scenarios, rank=rank)
            if len(reported) != len(share):
                self.ledger.hold(place, False, f"{len(reported)} losses", f"{len(share)} losses")
                continue
            for microbatch, seen in zip(share, reported, strict=True):
                self._loss(operation, rank, microbatch, seen, expected[microbatch])

    def _whole_loss(self, operation: _Operation, rank: int, seen: float | None) -> None:
        if operation.expected.operation != "accumulate" and (seen is None or math.isfinite(seen)):
            place = self._place.at("loss", operation.number, operation.scenarios, rank=rank)
            reported = float("nan") if seen is None else seen
            self.ledger.numbers(place, reported, operation.expected.loss, lambda: self._no_floor)

    def _buffers(self, operation: _Operation) -> None:
        if "buffers" not in self._subject.laws:
            return
        if not operation.expected.buffers:
            self.ledger.skip("buffers", "the model has none")
        observed = self._observed.buffers(operation.number)
        names = {name for _, name in observed}
        for name in operation.expected.buffers.keys() - names:
            place = self._place.at("buffers", operation.number, operation.scenarios, parameter=name)
            self.ledger.hold(place, False, "held by no stage", "held by one stage")
        for site, seen in sorted(observed.items()):
            place = self._place.site("buffers", operation.number, operation.scenarios, site)
            wanted = operation.expected.buffers.get(site[1])
            if wanted is None:
                self.ledger.hold(place, False, "a buffer", "no such buffer")
            else:
                self.ledger.tensors(place, seen, wanted.cpu(), lambda: self._no_floor)

    def _loss(self, operation: _Operation, rank: int, microbatch: int, seen: float, wanted: float) -> None:
        laws = operation.scenarios
        place = self._place.at("loss", operation.number, laws, rank=rank, microbatch=microbatch)
        first = self._observed.first_nonfinite(operation.number)
        if first is not None and seen != seen:
            where = self._place.at(
                "loss",
                operation.number,
                laws,
                rank=self._observed.schedule.placement[first.stage],
                stage=first.stage,
                microbatch=first.microbatch,
                action=str(first),
            )
            note = f"nan in the loss of microbatch {microbatch}; the first output that is not finite is {first}'s"
            self.ledger.hold(where, False, note, f"loss {wanted:.9g}")
            return
        floors = operation.floors
        self.ledger.numbers(place, seen, wanted, lambda: floors.loss(microbatch) if floors else self._no_floor)

    def _gradients(self, operation: _Operation) -> None:
        observed = self._observed.gradients(operation.number)
        zero = []
        # From the last stage down, as gradients flow: the first to differ is the nearest to the fault.
        for site, wanted in sorted(operation.expected.gradients.items(), key=lambda item: (-item[0][0], item[0][1])):
            if site[0] == NOWHERE or site not in self._subject.due:
                continue  # said already, or another name of one that is judged
            seen = observed.get(site)
            same = (seen is None) == (wanted is None)
            place = self._place.site("none-ness", operation.number, operation.scenarios, site)
            self.ledger.hold(place, same, _presence(seen), _presence(wanted))
            if seen is None or wanted is None:
                continue
            if not wanted.any():
                zero.append(site[1])
            self._tensors("gradient", operation, site, seen, wanted.cpu())
        if zero:
            more = f" and of {len(zero) - 1} more" * (len(zero) > 1)
            self.ledger.doubt("gradient", f"the expected gradient of {zero[0]}{more} is zero, so nothing could be seen")
        self._copies("gradient", operation, observed)

    def _tensors(self, law: str, operation: _Operation, site: Site, seen: Tensor, wanted: Tensor) -> None:
        floors = operation.floors
        assert floors is not None, "a training step has floors"
        place = self._place.site(law, operation.number, operation.scenarios, site)
        if law == "gradient":
            self.ledger.tensors(place, seen, wanted, lambda: floors.gradient(site))
        else:
            before, gradient = operation.expected.before[site[1]].cpu(), operation.expected.gradients[site]
            rounded = may_be_rounded(gradient, before, wanted)
            self.ledger.tensors(
                place,
                seen,
                wanted,
                lambda: update_floor(floors.gradient(site), before, wanted),
                base=before,
                rounded=rounded,
            )

    def _copies(self, what: str, operation: _Operation, observed: dict[Site, Tensor | None]) -> None:
        for copies in self._subject.tied:
            (first, *others) = sorted(copies.items())
            for other in others:
                one, two = observed.get(first), observed.get(other)
                same = one is two is None or (one is not None and two is not None and same_bits(one, two))
                place = self._place.site("tied-copies", operation.number, operation.scenarios, other)
                self.ledger.hold(place, same, f"another {what} than {first[1]} of stage {first[0]}", f"the same {what}")

    def _norms(self, operation: _Operation) -> None:
        floors, norm = operation.floors, operation.expected.norm
        assert floors is not None, "a training step has floors"
        assert norm is not None, "a training step has a norm"
        for rank, operations in enumerate(self._observed.ranks):
            place = self._place.at("grad-norm", operation.number, operation.scenarios, rank=rank)
            seen = operations[operation.number].norm
            if seen is None and not self._subject.every_rank:
                continue
            self.ledger.numbers(place, float("nan") if seen is None else seen, norm, floors.norm)

    def _updates(self, operation: _Operation) -> None:
        if "updated-parameters" not in self._subject.laws:
            return
        observed = self._observed.parameters(operation.number)
        for site, wanted in sorted(operation.expected.parameters.items()):
            if site in observed:
                self._tensors("updated-parameters", operation, site, observed[site], wanted.cpu())
        self._copies("parameter", operation, dict(observed))
        self._moved(operation)
        norm = operation.expected.norm or 0.0
        if norm <= operation.max_norm and operation.number == self._subject.plan.index("train"):
            never = f"clipping to {operation.max_norm} never acted on a norm of {norm:.3g}"
            self.ledger.doubt("updated-parameters", never)

    def _moved(self, operation: _Operation) -> None:
        """A step too small for the dtype moves nothing; where a whole stage stands still, no optimizer was seen."""
        expected = operation.expected
        trained = [site for site, gradient in expected.gradients.items() if gradient is not None and gradient.any()]
        still = [site for site in trained if same_bits(expected.parameters[site], expected.before[site[1]])]
        for stage in sorted({stage for stage, _ in trained} - {stage for stage, _ in set(trained) - set(still)}):
            self.ledger.doubt("updated-parameters", f"no parameter of stage {stage} moves: steps vanish in rounding")
        if still:
            which = f"{len(still)} of {len(trained)} in operation {operation.number + 1}"
            self.ledger.remark("updated-parameters", f"steps of {which} vanish in rounding")


def judge(case: Case, observed: Observed, *, measure: bool = False) -> Verdict:
    """The verdict on what ``case`` produced. ``measure``: measure floors even where every bit agrees, to report."""
    deterministic(case.device)
    return judged(subject_of(case, LAWS), observed, measure=measure)


def judged(subject: Subject, observed: Observed, *, measure: bool = False) -> Verdict:
    """The verdict on what ``subject`` produced; ``measure`` as for ``judge``."""
    began = perf_counter()
    with one_thread():
        at = Judge(subject, observed)
        at.judge()
        laws = at.ledger.laws()
        floor = at.measured.worst() if measure and at.measured is not None else 0.0
    outcome = overall(laws)
    reached: Tier = "bitwise" if at.ledger.all_exact else subject.oracle.precision.name
    tier: Tier = reached if outcome == "pass" else "none"
    return Verdict(
        subject.config,
        outcome,
        tier,
        laws,
        tuple(at.ledger.mismatches),
        bindings=subject.bindings,
        floor=floor,
        seconds=perf_counter() - began,
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """One intra-op thread, as on the ranks: two threads change the last bits of some kernels."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _presence(tensor: Tensor | None) -> str:
    return "None" if tensor is None else "a gradient"


def _text(values: Sequence[float]) -> str:
    return "losses " + ", ".join(f"{value:.4g}" for value in values)

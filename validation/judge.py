"""Holding what a schedule produced against the reference, law by law."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from reference.step import Expected, Recipe, Reference, Site
from validation.case import Case
from validation.floors import Floors, Pending
from validation.ledger import Heading, Ledger
from validation.observe import data_for, deterministic, max_norm_of, model_for
from validation.observed import Observed
from validation.stages import owners, tied_across
from validation.tolerance import Floor, same_bits
from validation.verdict import Mismatch, Tier, Verdict, overall

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
_NO_FLOOR = Floor(0.0, 0.0, 0.0)


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


class Judge:
    """Runs the reference through a case's plan and compares operation by operation."""

    def __init__(self, case: Case, observed: Observed) -> None:
        self._case = case
        self._observed = observed
        self._device = "cpu" if case.device == "cpu" else "cuda:0"
        model = model_for(case).to(self._device)
        self._owner = owners(model, case.split)
        self._tied = tied_across(model, case.split)
        self._reference = Reference(model, owner=self._owner, recipe=Recipe(loss=case.loss))
        self.ledger = Ledger(LAWS)
        self.measured: Floors | None = None

    def judge(self) -> None:
        """Compare everything up to the first operation that disagrees: what follows it is consequence."""
        self._skip_what_does_not_apply()
        self._parameters_once()
        pending: list[Pending] = []
        for number, laws in enumerate(scenarios(self._case.plan)):
            if self.ledger.failed:
                for law in self._later_laws(number):
                    self.ledger.doubt(law, f"not judged: operation {number} already disagrees")
                return
            self._operation(number, laws, pending)

    def _later_laws(self, number: int) -> set[str]:
        plan = scenarios(self._case.plan)
        return set[str]().union(*plan[number:]) - set[str]().union(*plan[:number])

    def _skip_what_does_not_apply(self) -> None:
        if not self._tied:
            self.ledger.skip("tied-copies", "no parameter has copies in several stages")
        planned = set[str]().union(*scenarios(self._case.plan))
        for law in ("second-step", "accumulation", "eval"):
            if law not in planned:
                self.ledger.skip(law, "the plan does not have it")

    def _operation(self, number: int, laws: Scenarios, pending: list[Pending]) -> None:
        name = self._case.plan[number]
        batches = [batch.to(self._device) for batch in data_for(self._case, number)]
        orders = self._orders(number, laws, backward=name != "eval")
        max_norm = max_norm_of(self._case, number)
        expected = self._reference.perform(name, batches, orders=orders, max_norm=max_norm)
        if name != "eval":
            pending.append(Pending(expected, batches, orders))
        floors = Floors(self._reference, tuple(pending)) if name != "eval" else None
        operation = _Operation(number, laws, expected, floors)
        self._losses(operation)
        self._buffers(operation)
        if name == "train":
            self._gradients(operation)
            self._norms(operation)
            self._updates(operation, max_norm)
            pending.clear()
            self.measured = self.measured or floors

    def _place(self, law: str, operation: int, scenarios: Scenarios, **where: object) -> Heading:
        known = Mismatch(law, operation + 1, seen="", expected="", **where)  # type: ignore[arg-type]
        return Heading(law, scenarios, known)

    def _site_place(self, law: str, operation: _Operation, site: Site) -> Heading:
        stage, name = site
        rank = self._observed.schedule.placement[stage]
        return self._place(law, operation.number, operation.scenarios, rank=rank, stage=stage, parameter=name)

    def _orders(self, number: int, laws: Scenarios, *, backward: bool) -> dict[int, Sequence[int]]:
        """The order of each stage's backwards, as it really was; in index order where it was no order of all."""
        every = list(range(self._case.microbatches))
        ran = {"forward": self._observed.forwards(number)}
        if backward:
            ran["backward"] = self._observed.backwards(number)
        for what, orders in ran.items():
            for stage, order in orders.items():
                rank = self._observed.schedule.placement[stage]
                place = self._place("microbatches", number, laws, rank=rank, stage=stage)
                self.ledger.hold(place, sorted(order) == every, f"{what} of {order}", f"{what} of each of {every} once")
        self._calls(number, laws, training=backward)
        orders = self._observed.backwards(number)
        return {stage: order if sorted(order) == every else every for stage, order in orders.items()}

    def _calls(self, number: int, laws: Scenarios, *, training: bool) -> None:
        """Each stage's module itself ran once for each microbatch, in training mode or not as it must be."""
        calls = self._observed.called(number)
        for stage in range(self._observed.schedule.n_stages):
            rank = self._observed.schedule.placement[stage]
            place = self._place("microbatches", number, laws, rank=rank, stage=stage)
            seen = sorted(action.microbatch for action, _ in calls if action.stage == stage)
            every = list(range(self._case.microbatches))
            self.ledger.hold(place, seen == every, f"its module ran for {seen}", f"once for each of {every}")
            modes = {mode for action, mode in calls if action.stage == stage}
            named = {True: "training", False: "evaluation"}
            wrong = modes - {training}
            self.ledger.hold(place, not wrong, f"{named[not training]} mode", f"{named[training]} mode")

    def _parameters_once(self) -> None:
        due = {(stage, name) for name, stage in self._owner.items()}
        seen = [site for rank in self._observed.ranks for site in (rank[-1].parameters or {})]
        for site in sorted(due | set(seen)):
            stage, name = site
            place = self._place("parameters-once", len(self._case.plan) - 1, frozenset(), stage=stage, parameter=name)
            count = seen.count(site)
            self.ledger.hold(place, count == (site in due), f"held {count} times", f"held {int(site in due)} times")

    def _losses(self, operation: _Operation) -> None:
        last = self._observed.schedule.placement[-1]
        expected = operation.expected.losses
        if not all(loss == loss and abs(loss) != float("inf") for loss in expected):
            self.ledger.doubt("loss", f"the reference itself gives {_text(expected)}: there is nothing to compare with")
            return
        for rank, operations in enumerate(self._observed.ranks):
            self._whole_loss(operation, rank, operations[operation.number].loss)
            reported = operations[operation.number].losses
            if operation.expected.operation == "accumulate" and rank != last:
                continue  # accumulate() reports losses where they are known
            place = self._place("loss", operation.number, operation.scenarios, rank=rank)
            if len(reported) != len(expected):
                self.ledger.hold(place, False, f"{len(reported)} losses", f"{len(expected)} losses")
                continue
            for microbatch, (seen, wanted) in enumerate(zip(reported, expected, strict=True)):
                self._loss(operation, rank, microbatch, seen, wanted)

    def _whole_loss(self, operation: _Operation, rank: int, seen: float | None) -> None:
        if operation.expected.operation != "accumulate" and (seen is None or math.isfinite(seen)):
            place = self._place("loss", operation.number, operation.scenarios, rank=rank)
            reported = float("nan") if seen is None else seen
            self.ledger.numbers(place, reported, operation.expected.loss, lambda: _NO_FLOOR)

    def _buffers(self, operation: _Operation) -> None:
        if not operation.expected.buffers:
            self.ledger.skip("buffers", "the model has none")
        observed = self._observed.buffers(operation.number)
        names = {name for _, name in observed}
        for name in operation.expected.buffers.keys() - names:
            place = self._place("buffers", operation.number, operation.scenarios, parameter=name)
            self.ledger.hold(place, False, "held by no stage", "held by one stage")
        for site, seen in sorted(observed.items()):
            place = self._site_place("buffers", operation, site)
            wanted = operation.expected.buffers.get(site[1])
            if wanted is None:
                self.ledger.hold(place, False, "a buffer", "no such buffer")
            else:
                self.ledger.tensors(place, seen, wanted.cpu(), lambda: _NO_FLOOR)

    def _loss(self, operation: _Operation, rank: int, microbatch: int, seen: float, wanted: float) -> None:
        laws = operation.scenarios
        place = self._place("loss", operation.number, laws, rank=rank, microbatch=microbatch)
        first = self._observed.first_nonfinite(operation.number)
        if first is not None and seen != seen:
            where = self._place(
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
        self.ledger.numbers(place, seen, wanted, lambda: floors.loss(microbatch) if floors else _NO_FLOOR)

    def _gradients(self, operation: _Operation) -> None:
        observed = self._observed.gradients(operation.number)
        zero = []
        # From the last stage down, as gradients flow: the first to differ is the nearest to the fault.
        for site, wanted in sorted(operation.expected.gradients.items(), key=lambda item: (-item[0][0], item[0][1])):
            seen = observed.get(site)
            same = (seen is None) == (wanted is None)
            place = self._site_place("none-ness", operation, site)
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
        place = self._site_place(law, operation, site)
        if law == "gradient":
            self.ledger.tensors(place, seen, wanted, lambda: floors.gradient(site))
        else:
            before = operation.expected.before[site[1]].cpu()
            self.ledger.tensors(place, seen, wanted, lambda: floors.parameter(site), base=before)

    def _copies(self, what: str, operation: _Operation, observed: dict[Site, Tensor | None]) -> None:
        for copies in self._tied:
            (first, *others) = sorted(copies.items())
            for other in others:
                one, two = observed.get(first), observed.get(other)
                same = one is two is None or (one is not None and two is not None and same_bits(one, two))
                place = self._site_place("tied-copies", operation, other)
                self.ledger.hold(place, same, f"another {what} than {first[1]} of stage {first[0]}", f"the same {what}")

    def _norms(self, operation: _Operation) -> None:
        floors, norm = operation.floors, operation.expected.norm
        assert floors is not None, "a training step has floors"
        assert norm is not None, "a training step has a norm"
        for rank, operations in enumerate(self._observed.ranks):
            place = self._place("grad-norm", operation.number, operation.scenarios, rank=rank)
            seen = operations[operation.number].norm
            self.ledger.numbers(place, float("nan") if seen is None else seen, norm, floors.norm)

    def _updates(self, operation: _Operation, max_norm: float) -> None:
        observed = self._observed.parameters(operation.number)
        for site, wanted in sorted(operation.expected.parameters.items()):
            if site in observed:
                self._tensors("updated-parameters", operation, site, observed[site], wanted.cpu())
        self._copies("parameter", operation, dict(observed))
        norm = operation.expected.norm or 0.0
        if norm <= max_norm and operation.number == self._case.plan.index("train"):
            self.ledger.doubt("updated-parameters", f"clipping to {max_norm} never acted on a norm of {norm:.3g}")


def judge(case: Case, observed: Observed, *, measure: bool = False) -> Verdict:
    """The verdict on what ``case`` produced. ``measure``: measure floors even where every bit agrees, to report."""
    began = perf_counter()
    deterministic(case.device)
    with one_thread():
        at = Judge(case, observed)
        at.judge()
        laws = at.ledger.laws()
        floor = at.measured.worst() if measure and at.measured is not None else 0.0
    outcome = overall(laws)
    tier: Tier = "none" if outcome != "pass" else ("bitwise" if at.ledger.all_exact else "fp32")
    return Verdict(
        str(case), outcome, tier, laws, tuple(at.ledger.mismatches), floor=floor, seconds=perf_counter() - began
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

"""Two runs of many steps held against each other: the first step in which they part, and in it the law and parameter.

Digests are compared first. Where they differ, a third run tells what rounding alone does; without one nobody knows.
"""

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

from pipeproof.core.comparison import Comparison, Due
from pipeproof.core.judge import concluded
from pipeproof.core.ledger import ENDLESS, Heading, Ledger
from pipeproof.core.limits import Precision, coarsest, precision_of
from pipeproof.core.mismatch import Mismatch
from pipeproof.core.tolerance import Floor
from pipeproof.core.verdict import Verdict
from pipeproof.observers.sketch import Sketch
from pipeproof.records.kept_run import KeptRun, KeptStep
from pipeproof.records.options import other_options
from pipeproof.records.record import RecordError, numbers_in, other_microbatch, upstream
from pipeproof.records.run_growth import Growth, Quantity, differences, matched

LAWS = (
    "steps",  # those of the good run are in the other
    "initial-weights",  # those that a step begins with
    "microbatches",  # a step's, in any order
    "loss",
    "presence",
    "gradient",
    "replicas",  # ranks that hold the same of a parameter have the same
    "grad-norm",
    "updated-parameters",
)
_KEPT_AS = {"initial-weights": "before", "gradient": "gradients", "updated-parameters": "weights"}
_OVERFLOW = "not finite on one side, in a step in which both overflow: no fault shows there"
_NAMED = "if these are parts of it that are no DTensor, give each a name of its own by record_run(rename=)"
_REDUCED = "keep gradients once they are reduced"
_UNMEASURED = "nothing measured tells whether that is rounding"


def compare_runs(
    good: KeptRun,
    seen: KeptRun,
    *,
    third: KeptRun | None = None,
    until: int | None = None,
    tell: Callable[[str], None] = lambda step: None,
) -> Verdict:
    """The verdict on ``seen``, judged by ``good``, step by step, up to the first that does not agree.

    third: a run of the right code with another order of sums; how far it is from ``good`` says what is rounding. until:
    the last step to compare. tell: is told, in words, which step it is at. Raises ``RecordError`` for runs that cannot
    be compared.
    """
    began = perf_counter()
    for one in (seen, third):
        if one is not None:
            _check_parameters(good, one)
    found = _Runs(good, seen, None if third is None else Growth(good, third), until)
    found.compare(tell)
    title = f"{seen} against {good}" + ("" if third is None else f", rounding by {third}")
    words = [f"{good}", f"{seen}", *([] if third is None else ["--also", f"{third}"])]
    rerun = shlex.join(["pipeproof", "compare", *words, *([] if until is None else ["--until", f"{until}"])])
    verdict = concluded(found.ledger, title, otherwise=precision_in(good), rerun=rerun, seconds=perf_counter() - began)
    mismatches = tuple(replace(one, step=one.operation - 1) for one in found.proven_first(verdict))
    verdict = replace(verdict, mismatches=mismatches)
    return replace(verdict, headline=found.headline(verdict))


@dataclass
class _Runs:
    """``growth``: what rounding does; None where no third run tells. ``parted``: the first step whose bits differ."""

    good: KeptRun
    seen: KeptRun
    growth: Growth | None
    until: int | None
    ledger: Ledger = field(default_factory=lambda: Ledger(LAWS))
    parted: int | None = None

    def compare(self, tell: Callable[[str], None]) -> None:
        """Enter all steps up to the first that does not agree: what follows is consequence."""
        own, theirs = (self._due(run) for run in (self.good, self.seen))
        there = set(theirs)
        numbers = [number for number in own if number in there]
        if not numbers:
            spans = [f"{run} has {_span(there)}" for run, there in ((self.good, own), (self.seen, theirs))]
            raise RecordError(f"the runs have no step in common: {', '.join(spans)}; give two runs of the same steps")
        last: tuple[KeptStep, KeptStep] | None = None
        for number in numbers:
            tell(f"step {number} of {numbers[-1]}")
            steps = self.good.step(number), self.seen.step(number)
            _check_kept(self.good, *steps)
            if self.parted is None and differences(*steps):
                self.parted = number
            self.ledger.hold(Heading.at("steps", number), True, "", "")
            self._enter(*steps, last)
            if self.ledger.failed:
                break
            last = steps
        else:
            self._tell_rest(own, theirs)
        if self.parted is not None and (told := _other_versions(self.good, self.seen)):
            self.ledger.remark("steps", told)
        for law in ("microbatches", "loss", "grad-norm"):
            if not any(self.ledger.entered(law, number) for number in numbers):
                said = [step.mixed[law] for step in steps if law in step.mixed]
                both = all(_tells_of(law, step) for step in steps)
                why = "the runs part before it" if both else "not both runs tell it"
                self.ledger.miss(law, said[0] if said else why)
        self.ledger.forget(["replicas"])

    def _due(self, run: KeptRun) -> list[int]:
        return [number for number in run.numbers if self.until is None or number <= self.until]

    def _enter(self, due: KeptStep, seen: KeptStep, last: tuple[KeptStep, KeptStep] | None) -> None:
        """Everything of one step, in the order in which it comes to be; of other weights or data all else follows."""
        self._replicas(seen, begun=True)
        self._weights(due, seen, last)
        if not self.ledger.failed:
            self._microbatches(due, seen)
        if self.ledger.failed:
            return
        self._losses_and_norm(due, seen)
        self._gradients(due, seen)
        self._replicas(seen, begun=False)
        if not self.ledger.undecided("gradient"):  # what an optimizer makes of such a gradient decides nothing either
            self._updates(due, seen)
        order = {law: place for place, law in enumerate(LAWS)}
        self.ledger.mismatches.sort(key=lambda one: order[one.law])

    def _weights(self, due: KeptStep, seen: KeptStep, last: tuple[KeptStep, KeptStep] | None) -> None:
        """What the step begins with, where the last that was compared does not tell it: how far it moved since then."""
        for name in upstream(due.before, self._stages):
            one, other = due.before[name], seen.before[name]
            left = None if last is None else (last[1].weights[name], last[0].weights[name])
            if left is None or [left[1].digest, left[0].digest] != [one.digest, other.digest]:
                self._sketches("initial-weights", due.number, name, other, one, base=left)

    def _microbatches(self, due: KeptStep, seen: KeptStep) -> None:
        if due.microbatches is not None and seen.microbatches is not None:
            same = numbers_in(due.microbatches, seen.microbatches) is not None
            found = "" if same else other_microbatch(due.microbatches, seen.microbatches)
            self.ledger.hold(
                Heading.at("microbatches", due.number), same, f"other data: {found}", f"that of {self.good}"
            )

    def _losses_and_norm(self, due: KeptStep, seen: KeptStep) -> None:
        theirs = matched(due, seen)
        share = [
            k for k in sorted(due.losses.keys() & theirs.keys()) if self._tells("loss", due, due.losses[k], theirs[k])
        ]
        losses = tuple(due.losses[k] if k in share else 0.0 for k in range(max(due.losses, default=-1) + 1))
        loss, norm = (
            own if self._tells(law, due, own, its) else None
            for law, own, its in (("loss", due.loss, seen.loss), ("grad-norm", due.norm, seen.norm))
        )
        wanted = Due("train", due.microbatches or (), losses, loss, norm)
        numbers = Comparison(wanted, _Allowed(self, due.number), self.ledger, number=due.number)
        if share:
            numbers.losses([theirs[k] for k in share], share=share)
        if seen.loss is not None:
            numbers.loss(seen.loss)
        if seen.norm is not None:
            numbers.norm(seen.norm)
        for one in (due, seen):
            for law, said in one.mixed.items():
                self.ledger.remark(law, said)

    def _tells(self, law: str, step: KeptStep, due: float | None, seen: float | None) -> bool:
        """Whether two numbers tell anything: not where neither is finite, as where a scale overflows."""
        if due is None or seen is None:
            return False
        if math.isfinite(due) or math.isfinite(seen):
            return True
        self.ledger.hold(Heading.at(law, step.number), True, "", "", exact=False)
        self.ledger.empty(law, ENDLESS)
        return False

    def _gradients(self, due: KeptStep, seen: KeptStep) -> None:
        """From the last stage down, as gradients flow: the first to differ is the nearest to the fault."""
        for name in upstream((name for name in due.gradients if name in seen.gradients), self._stages):
            wanted, one = due.gradients[name], seen.gradients[name]
            nothing = all(found is None or not found.norm for found in (wanted, one))
            same = nothing or (wanted is None) == (one is None)
            place = self._at("presence", due.number, name, "gradients")
            self.ledger.hold(place, same, one is not None, wanted is not None, what="gradient")
            if wanted is None or one is None:
                continue
            one_side = math.isfinite(wanted.norm) != math.isfinite(one.norm)
            if one_side and due.overflows and seen.overflows:  # which of them do may be a matter of rounding
                self.ledger.hold(self._at("gradient", due.number, name, "gradients"), True, "", "", exact=False)
                self.ledger.empty("gradient", _OVERFLOW)
            else:
                self._sketches("gradient", due.number, name, one, wanted)
        odd = sorted(due.gradients.keys() ^ seen.gradients.keys())
        self.ledger.leave_out("gradient", odd, f"only one of the runs kept them in step {due.number}")

    def _replicas(self, seen: KeptStep, *, begun: bool) -> None:
        """What ranks have otherwise; ``begun``: of the weights that the step begins with, else of what it makes."""
        apart = ((name, *one) for name, one in seen.apart.items() if (one[0] == "weight") == begun)
        for name, what, rank, first in apart:
            place = Heading.at("replicas", seen.number, parameter=name, rank=rank, beside=first)
            self.ledger.hold(place, False, f"another {what} than rank {first}", "the same")

    def _updates(self, due: KeptStep, seen: KeptStep) -> None:
        for name in upstream(due.weights, self._stages):
            base = seen.before[name], due.before[name]
            self._sketches("updated-parameters", due.number, name, seen.weights[name], due.weights[name], base=base)
        if told := other_options(due.options, seen.options):
            self.ledger.remark("updated-parameters", f"in step {due.number} the optimizer was told {told}")
        if self.ledger.failed and seen.told and not due.told:
            self.ledger.remark("updated-parameters", f"in step {due.number} {seen.told}")

    def _tell_rest(self, own: list[int], theirs: list[int]) -> None:
        """Say what was not compared, and how fine a comparison it was."""
        for run, its, other in ((self.seen, theirs, own), (self.good, own, theirs)):
            if rest := [number for number in other if number > its[-1]]:
                cure = f"say --until {its[-1]} if no more is due"
                self.ledger.doubt("steps", f"{_span(rest)} not compared, as {run} ends with {its[-1]}: {cure}")
        if self.parted is not None and self.growth is not None:
            made = self.growth.told(min(own[-1], theirs[-1], self.growth.last))
            said = f"bits differ from step {self.parted} on; {made}: smaller faults do not show"
            self.ledger.remark("gradient", said)

    def proven_first(self, verdict: Verdict) -> Sequence[Mismatch]:
        """What is wrong, first what is so by more than rounding may do: of the others nobody knows."""
        failed = {law.name for law in verdict.laws if law.outcome == "fail"}
        unknown = {at for at, one in self.ledger.compared.items() if one.outcome == "unknown"}

        def undecided(one: Mismatch) -> bool:
            at = one.law, one.rank, one.stage, one.microbatch, one.parameter
            return one.law not in failed or at in unknown

        return sorted(verdict.mismatches, key=undecided)

    def headline(self, verdict: Verdict) -> str:
        """Where the runs part, for a verdict that says they do."""
        if not verdict.mismatches:
            return ""
        first = verdict.mismatches[0]
        what = first.law + ("" if first.parameter is None else f" of {first.parameter}")
        number = first.operation - 1
        before = self.ledger.mismatches[0]
        blurred = (first.law, first.parameter) != (before.law, before.parameter)
        part = f"the runs part in step {number}, {what} first{' of what is no rounding' * blurred}"
        if verdict.verdict != "unknown" or self._measured(number) is not None:
            return part
        ends = "" if self.growth is None else f", as the third run ends with step {self.growth.last}"
        return f"{part}; {_UNMEASURED}{ends}" if ends else f"{part}; {_UNMEASURED}: give a third run with --also"

    @property
    def _stages(self) -> dict[str, int]:
        return {name: stage for name, (_, stage) in self.good.places.items()}

    def _at(self, law: str, number: int, name: str, what: str) -> Heading:
        """At a parameter: on the first rank that has it, or whose part is farthest off; None where no part tells."""
        rank, stage = self.seen.places[name]
        due, seen = (run.step(number).parts[what][name] for run in (self.good, self.seen))
        one = rank if len(seen.parts) == 1 else seen.farthest(due)
        return Heading.at(law, number, parameter=name, rank=one, stage=stage)

    def _sketches(
        self, law: str, number: int, name: str, seen: Sketch, due: Sketch, base: tuple[Sketch, Sketch] | None = None
    ) -> None:
        """Enter a tensor; ``base``: what the two moved from, where it is a weight."""
        what = Quantity(law if base is None else "updated-parameters", name)
        floor = partial(self.allowed, what, number, precision_of(due.dtype))
        # Each element of a weight may be stored one place up or down.
        stored = 2 * precision_of(due.dtype).unit * due.norm if self._measured(number) else 0.0
        self.ledger.sketches(self._at(law, number, name, _KEPT_AS[law]), seen, due, floor, base=base, stored=stored)

    def _measured(self, number: int) -> Growth | None:
        """What tells how far rounding goes in a step; None where nothing does."""
        return None if self.growth is None or number > self.growth.last else self.growth

    def allowed(self, what: Quantity, number: int, precision: Precision) -> Floor:
        """What rounding may do; where nobody measured it, nothing is right that differs, and what is wrong is rare."""
        growth = self._measured(number)
        if growth is None:
            begun = what.law == "initial-weights" and not number  # nothing was computed yet
            nudged = precision.most / precision.factor if begun else math.inf
            return Floor(0.0, 0.0, 0.0, replace(precision, least=0.0), nudged=nudged)
        return growth.floor(what, number, precision, parted=number if self.parted is None else self.parted)


@dataclass(frozen=True)
class _Allowed:
    """What rounding may do to the single numbers of a step."""

    runs: _Runs
    number: int

    def loss(self, microbatch: int) -> Floor:
        """Of a microbatch's loss."""
        return self._floor(Quantity("loss", microbatch))

    def total(self) -> Floor:
        """Of the whole step's loss."""
        return self._floor(Quantity("loss"))

    def norm(self) -> Floor:
        """Of the gradient norm."""
        return self._floor(Quantity("grad-norm"))

    def gradient(self, name: str) -> Floor:
        """Of a gradient."""
        return self._floor(Quantity("gradient", name))

    def update(self, name: str) -> Floor:
        """Of a parameter's movement."""
        return self._floor(Quantity("updated-parameters", name))

    def _floor(self, what: Quantity) -> Floor:
        return self.runs.allowed(what, self.number, precision_in(self.runs.good))


def precision_in(run: KeptRun) -> Precision:
    """The coarsest that its numbers may be rounded to."""
    return coarsest([precision_of(held.torch_dtype) for held in run.parameters.values()])


def _check_parameters(good: KeptRun, other: KeptRun) -> None:
    """Raise ``RecordError`` where two runs do not have the same parameters, of the same shapes."""
    for one, its in ((good, other), (other, good)):
        lost = [name for name in one.parameters if name not in its.parameters]
        if lost:
            more = f" and {len(lost) - 1} more" * (len(lost) > 1)
            odd = next((f", but {name}" for name in its.parameters if name not in one.parameters), "")
            cure = "give record_run(rename=), which names them as in the whole model"
            raise RecordError(f"{its} has no parameter {lost[0]}{more}, which {one} has{odd}: {cure}")
    for name, held in good.parameters.items():
        if held.form != other.parameters[name].form:
            raise RecordError(f"{name} is {held} in {good} and {other.parameters[name]} in {other}: expected one form")


def _other_versions(good: KeptRun, seen: KeptRun) -> str:
    """What computed the two runs, where that is not the same."""
    both = good.files[0].header.config, seen.files[0].header.config
    odd = [f"{name} {both[1].get(name)}, not {there}" for name, there in both[0].items() if both[1].get(name) != there]
    return f"computed by {', '.join(odd)}" if odd else ""


def _tells_of(law: str, step: KeptStep) -> bool:
    """Whether anything of this law was told in a step."""
    if law == "microbatches":
        return step.microbatches is not None
    return bool(step.losses) or step.loss is not None if law == "loss" else step.norm is not None


def _check_kept(good: KeptRun, due: KeptStep, seen: KeptStep) -> None:
    """Raise ``RecordError`` for steps that were not kept alike."""
    for name, (what, rank, first) in due.apart.items():
        told = f"rank {rank} of {good} has another {what} of {name} than rank {first}, which has the same part"
        cure = _NAMED if what == "weight" else _REDUCED
        raise RecordError(f"{told} in step {due.number}: {cure}, or give a run that is right")
    if due.gradients and seen.gradients and due.clipped != seen.clipped:
        raise RecordError(
            f"in step {due.number} one run kept gradients before clipping and the other after it: call "
            "step.gradients() in both, once gradients are complete"
        )


def _span(numbers: Sequence[int]) -> str:
    if not numbers:
        return "none"
    return f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"

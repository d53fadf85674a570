"""Comparison of two long runs: the first step that differs, its law and its parameter.

Digests are compared first. For differing ones, a third run shows the effect of rounding alone, otherwise unknown.
"""

import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from pipeproof.core.judge import conclude
from pipeproof.core.ledger import ENDLESS, Ledger
from pipeproof.core.limits import Precision, precision_of
from pipeproof.core.mismatch import Mismatch
from pipeproof.core.observe.sketch import Sketch
from pipeproof.core.reason import Reason
from pipeproof.core.tolerance import Floor
from pipeproof.core.verdict import Verdict
from pipeproof.records.record import RecordError, numbers_in, other_microbatch, upstream
from pipeproof.wings.runs.file import other_options
from pipeproof.wings.runs.growth import Growth, Quantity, differences, number_pairs
from pipeproof.wings.runs.run import WholeRun, WholeStep

LAWS = (
    "steps",  # the other run has the good run's steps
    "initial-weights",  # those that a step begins with
    "microbatches",  # a step's, in any order
    "loss",
    "presence",
    "gradient",
    "replicas",  # ranks that hold the same of a parameter have the same
    "grad-norm",
    "updated-parameters",
)
# Laws on optional reports, and a step's values for them.
_REPORTED: Mapping[str, Callable[[WholeStep], object]] = {
    "microbatches": lambda step: step.microbatches,
    "loss": lambda step: step.losses or step.loss,
    "grad-norm": lambda step: step.norm,
}
_OVERFLOW = "not finite on one side, in a step in which both overflow: no fault shows there"
_NAMED = "if these are parts of it that are no DTensor, give each a name of its own by record_run(rename=)"
_REDUCED = "keep gradients once they are reduced"
_UNMEASURED = "nothing measured tells whether that is rounding"


def compare_runs(
    good: str | Path,
    other: str | Path,
    *,
    third: str | Path | None = None,
    until: int | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> Verdict:
    """Compare the run in folder ``other`` with that in ``good``, up to the first mismatch.

    third: the folder of a correct run with another order of sums; its distance from the good run measures rounding.
    until: the last step to compare. progress: gets the current step, in words. Raises ``RecordError`` for runs that
    cannot be compared.
    """
    began, right, observed = perf_counter(), WholeRun(good), WholeRun(other)
    rounded = None if third is None else WholeRun(third)
    for run in filter(None, (observed, rounded)):
        for one, its in ((right, run), (run, right)):
            if lost := [name for name in one.parameters if name not in its.parameters]:
                more = f" and {len(lost) - 1} more" * (len(lost) > 1)
                odd = next((f", but {name}" for name in its.parameters if name not in one.parameters), "")
                cure = "give record_run(rename=), which names them as in the whole model"
                raise RecordError(f"{its} has no parameter {lost[0]}{more}, which {one} has{odd}: {cure}")
        for name, (_, own) in right.parameters.items():
            if str(own) != str(theirs := run.parameters[name][1]):
                raise RecordError(f"{name} is {own} in {right} and {theirs} in {run}: expected one form")
    found = _Comparison(right, observed, None if rounded is None else Growth(right, rounded))
    found.compare(until, progress)
    title = f"{observed} against {right}" + ("" if rounded is None else f", rounding by {rounded}")
    words = [f"{right}", f"{observed}", *([] if rounded is None else ["--also", f"{rounded}"])]
    rerun = shlex.join(["pipeproof", "compare", *words, *([] if until is None else ["--until", f"{until}"])])
    verdict = conclude(found.ledger, title, otherwise=right.precision, rerun=rerun, seconds=perf_counter() - began)
    mismatches = tuple(replace(one, step=one.operation - 1) for one in found.proven_first(verdict))
    verdict = replace(verdict, mismatches=mismatches)
    return replace(verdict, headline=found.headline(verdict))


class _Comparison:
    """``growth``: allowed rounding; None without a third run. ``number``: the step under comparison.

    ``expected``, ``observed``: the current step of the good run, and of the other. ``parted``: the first step with
    different bits.
    """

    def __init__(self, good: WholeRun, other: WholeRun, growth: Growth | None) -> None:
        self.good, self.other, self.growth = good, other, growth
        self.ledger = Ledger(LAWS)
        self.parted: int | None = None
        self.number: int
        self.expected: WholeStep
        self.observed: WholeStep

    def compare(self, until: int | None, progress: Callable[[str], None]) -> None:
        """Enter all steps up to the first mismatch; later ones are consequences."""
        own, theirs = (
            [number for number in run.numbers if until is None or number <= until] for run in (self.good, self.other)
        )
        numbers = sorted(set(own) & set(theirs))
        if not numbers:
            spans = f"{self.good} has {_span(own)}, {self.other} has {_span(theirs)}"
            raise RecordError(f"the runs have no step in common: {spans}; give two runs of the same steps")
        last: tuple[WholeStep, WholeStep] | None = None
        for self.number in numbers:
            progress(f"step {self.number} of {numbers[-1]}")
            self.expected, self.observed = self.good.step(self.number), self.other.step(self.number)
            self._check_alike()
            if self.parted is None and differences(self.expected, self.observed):
                self.parted = self.number
            self.ledger.hold(self._at("steps"), True, "", "")
            self._enter(last)
            if self.ledger.failed:
                break
            last = self.expected, self.observed
        else:
            self._remark_on_the_rest(own, theirs)
        versions, its = (run.files[0].header.config for run in (self.good, self.other))
        odd = [f"{name} {its.get(name)}, not {there}" for name, there in versions.items() if its.get(name) != there]
        if self.parted is not None and odd:
            self.ledger.remark("steps", f"computed by {', '.join(odd)}")
        steps = self.expected, self.observed
        for law in [one for one in _REPORTED if not any(self.ledger.compared_names(one, number) for number in numbers)]:
            conflict = next((step.conflicts[law] for step in steps if law in step.conflicts), "")
            both = all(_REPORTED[law](step) is not None for step in steps)
            self.ledger.miss(law, conflict or ("the runs part before it" if both else "not both runs report it"))
        self.ledger.forget(["replicas"])

    def _enter(self, last: tuple[WholeStep, WholeStep] | None) -> None:
        """Enter one step in causal order; all else follows from different weights or data."""
        self._replicas(before=True)
        for name in self._upstream(self.expected.before):
            pair = self.observed.before[name], self.expected.before[name]
            left = None if last is None else (last[1].weights[name], last[0].weights[name])
            # The previous compared step covers weights that it left, and others by their movement since.
            if left is None or [one.digest for one in left] != [one.digest for one in pair]:
                self._sketches("initial-weights", name, pair, base=left)
        expected, observed = self.expected.microbatches, self.observed.microbatches
        if not self.ledger.failed and expected is not None and observed is not None:
            same = numbers_in(expected, observed) is not None
            found = "" if same else f"other data: {other_microbatch(expected, observed)}"
            self.ledger.hold(self._at("microbatches"), same, found, f"that of {self.good}")
        if self.ledger.failed:
            return
        self._numbers()
        self._gradients()
        self._replicas(before=False)
        if not self.ledger.is_undecided(
            "gradient"
        ):  # what an optimizer makes of such a gradient decides nothing either
            self._updates()
        self.ledger.mismatches.sort(key=lambda one: LAWS.index(one.law))

    def _replicas(self, *, before: bool) -> None:
        """Enter differences between replicas in weights ``before`` the step, or in its results."""
        for name, (what, rank, first) in self.observed.apart.items():
            if (what == "weight") == before:
                place = self._at("replicas", parameter=name, rank=rank, beside=first)
                self.ledger.hold(place, False, f"another {what} than rank {first}", "the same")

    def _numbers(self) -> None:
        """Compare losses and the norm. Infinite or NaN on both sides shows nothing, as after an overflow."""
        for what, expected, observed in number_pairs(self.expected, self.observed):
            place = self._at(what.law, microbatch=what.name if isinstance(what.name, int) else None)
            if math.isfinite(expected):
                self.ledger.numbers(place, observed, expected, partial(self._floor, what, self.good.precision))
            elif math.isfinite(observed):
                why = f"it is {expected} in step {self.number} of {self.good}: there is nothing to compare with"
                self.ledger.doubt(what.law, why, Reason.NOT_FINITE)
            else:
                self.ledger.hold(place, True, "", "", exact=False)
                self.ledger.empty(what.law, ENDLESS)
        for conflicts in (self.expected.conflicts, self.observed.conflicts):
            for law in conflicts.keys() & {"loss", "grad-norm"}:
                self.ledger.remark(law, conflicts[law])

    def _gradients(self) -> None:
        """Compare gradients from the last stage down, along their flow: the first mismatch is nearest to the fault."""
        own, theirs = (step.tensors["gradients"] for step in (self.expected, self.observed))
        overflow = all(
            any(not math.isfinite(one.norm) for one in step.gradients.values())
            for step in (self.expected, self.observed)
        )
        for name in self._upstream(name for name in own if name in theirs):
            expected, observed = own[name].sketch, theirs[name].sketch
            nothing = all(one is None or not one.norm for one in (expected, observed))
            same = nothing or (expected is None) == (observed is None)
            place = self._at_parameter("presence", name)
            self.ledger.hold(place, same, observed is not None, expected is not None, what="gradient")
            if expected is None or observed is None:
                continue
            if overflow and math.isfinite(expected.norm) != math.isfinite(observed.norm):  # perhaps rounding
                self.ledger.hold(self._at_parameter("gradient", name), True, "", "", exact=False)
                self.ledger.empty("gradient", _OVERFLOW)
            else:
                self._sketches("gradient", name, (observed, expected))
        odd = sorted(own.keys() ^ theirs.keys())
        self.ledger.leave_out("gradient", odd, f"only one of the runs kept them in step {self.number}")

    def _updates(self) -> None:
        law, steps = "updated-parameters", (self.observed, self.expected)
        for name in self._upstream(self.expected.weights):
            (observed, before), (expected, base) = ((step.weights[name], step.before[name]) for step in steps)
            self._sketches(law, name, (observed, expected), base=(before, base))
        if options := other_options(self.expected.options, self.observed.options):
            self.ledger.remark(law, f"in step {self.number} the optimizer had {options}")
        if self.ledger.failed and law in self.observed.conflicts and law not in self.expected.conflicts:
            self.ledger.remark(law, f"in step {self.number} {self.observed.conflicts[law]}")

    def _sketches(
        self, law: str, name: str, pair: tuple[Sketch, Sketch], base: tuple[Sketch, Sketch] | None = None
    ) -> None:
        """Enter a tensor, observed and expected; ``base``: what the two moved from, where it is a weight."""
        precision = precision_of(pair[1].dtype)
        what = Quantity(law if base is None else "updated-parameters", name)
        # Each element of a weight may be stored one place up or down.
        stored = 2 * precision.unit * pair[1].norm if self._measured else 0.0
        floor = partial(self._floor, what, precision)
        self.ledger.sketches(self._at_parameter(law, name), *pair, floor, base=base, stored=stored)

    def _at(self, law: str, **where: Any) -> Mismatch:
        return Mismatch(law, self.number + 1, **where)

    def _at_parameter(self, law: str, name: str) -> Mismatch:
        """Point to the first rank with the parameter, or with the farthest part; to none if unclear."""
        rank, parameter = self.other.parameters[name]
        which = {"initial-weights": "before", "updated-parameters": "weights"}.get(law, "gradients")
        expected, observed = (step.tensors[which][name] for step in (self.expected, self.observed))
        one = rank if len(observed.parts) == 1 else observed.farthest(expected)
        return self._at(law, parameter=name, rank=one, stage=parameter.stage)

    def _upstream(self, names: Iterable[str]) -> list[str]:
        return upstream(names, {name: one.stage for name, (_, one) in self.good.parameters.items()})

    @property
    def _measured(self) -> bool:
        """Whether the third run says how far rounding goes in this step."""
        return self.growth is not None and self.number <= self.growth.last

    def _floor(self, what: Quantity, precision: Precision) -> Floor:
        """Return the rounding; if unmeasured, no difference counts as right, and few as wrong."""
        if self.growth is not None and self._measured:
            parted = self.number if self.parted is None else self.parted
            return self.growth.floor(what, self.number, precision, parted=parted)
        start = what.law == "initial-weights" and not self.number  # nothing was computed yet
        nudged = precision.most / precision.factor if start else math.inf
        return Floor(0.0, 0.0, 0.0, replace(precision, least=0.0), nudged=nudged)

    def _check_alike(self) -> None:
        """Raise ``RecordError`` for steps recorded differently, or wrong in the good run."""
        for name, (what, rank, first) in self.expected.apart.items():
            apart = (
                f"rank {rank} of {self.good} has another {what} of {name} than rank {first}, which has the same part"
            )
            cure = _NAMED if what == "weight" else _REDUCED
            raise RecordError(f"{apart} in step {self.number}: {cure}, or give a run that is right")
        if self.expected.gradients and self.observed.gradients and self.expected.clipped != self.observed.clipped:
            cure = "call step.gradients() in both, once gradients are complete"
            raise RecordError(
                f"in step {self.number} one run kept gradients before clipping and the other after it: {cure}"
            )

    def _remark_on_the_rest(self, own: list[int], theirs: list[int]) -> None:
        """Report the uncompared steps, and the comparison's resolution."""
        for run, its, numbers in ((self.other, theirs, own), (self.good, own, theirs)):
            if rest := [number for number in numbers if number > its[-1]]:
                cure = f"say --until {its[-1]} if no more is expected"
                self.ledger.doubt("steps", f"{_span(rest)} not compared, as {run} ends with {its[-1]}: {cure}")
        if self.parted is not None and self.growth is not None:
            made = self.growth.summary(min(own[-1], theirs[-1], self.growth.last))
            self.ledger.remark(
                "gradient", f"bits differ from step {self.parted} on; {made}: smaller faults do not show"
            )

    def proven_first(self, verdict: Verdict) -> Sequence[Mismatch]:
        """Return mismatches, those beyond rounding first."""
        failed = {law.name for law in verdict.laws if law.outcome == "fail"}
        unknown = {at for at, one in self.ledger.compared.items() if one.outcome == "unknown"}

        def is_undecided(one: Mismatch) -> bool:
            at = one.law, one.rank, one.stage, one.microbatch, one.parameter
            return one.law not in failed or at in unknown

        return sorted(verdict.mismatches, key=is_undecided)

    def headline(self, verdict: Verdict) -> str:
        """Say where the runs part, for a failing verdict."""
        if not verdict.mismatches:
            return ""
        first, before = verdict.mismatches[0], self.ledger.mismatches[0]
        what = first.law + ("" if first.parameter is None else f" of {first.parameter}")
        blurred = (first.law, first.parameter) != (before.law, before.parameter)
        part = f"the runs part in step {first.step}, {what} first{' of what is no rounding' * blurred}"
        if verdict.outcome != "unknown" or self._measured:
            return part
        if self.growth is None:
            return f"{part}; {_UNMEASURED}: give a third run with --also"
        return f"{part}; {_UNMEASURED}, as the third run ends with step {self.growth.last}"


def _span(numbers: Sequence[int]) -> str:
    if not numbers:
        return "none"
    return f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"

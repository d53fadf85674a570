"""Fuzzing a step of one's own: a campaign runs drawn cases, shrinks the first that fails, and can be seen to fail."""

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.extensions import extensions
from pipeproof.pipeline.sizes import some
from pipeproof.whitebox.expectation import Expectation
from pipeproof.whitebox.handed_back import FlatShard, StepResult, understood
from pipeproof.whitebox.rank import Step
from pipeproof.whitebox.space import Campaign, Space, StepCase, seeded, step_cases
from pipeproof.whitebox.task import WhiteBoxError, name_of, show
from pipeproof.worlds.draws import SHRINK_S, draw
from pipeproof.worlds.world import Decision, World

Data = Callable[[int, int, torch.Generator], Any]


@dataclass(frozen=True)
class FuzzResult:
    """What a campaign found. It is true if every case that ran is a pass, and a planted fault was caught.

    name: the step's. outcomes: how many of the drawn cases had each. verdict: on ``smallest``, which is the smallest
    case that fails, or on the first that is unknown; else on a case that passed. drawn: how often each value was.
    smaller: how many smaller cases were tried after the first that failed. repeats: whether the smallest failed again.
    planted: the fault that was caught, if any. ended: why not all cases ran; empty if they did.
    """

    name: str
    outcomes: Mapping[str, int]
    verdict: Verdict
    smallest: StepCase | None = None
    drawn: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    smaller: int = 0
    repeats: bool = True
    planted: str = ""
    ended: str = ""

    @property
    def cases(self) -> int:
        """How many were drawn and ran."""
        return sum(self.outcomes.values())

    @property
    def replay(self) -> str:
        """What to type to run the case alone that ``verdict`` is on."""
        return self.verdict.replay

    def __bool__(self) -> bool:
        return bool(self.verdict)

    def raise_if_failed(self) -> None:
        """Raise ``PipelineMismatch`` or ``NoVerdict``, with what the campaign was as a note, unless this is true."""
        __tracebackhide__ = True  # in a test's traceback the test's own line is what matters
        try:
            self.verdict.raise_if_failed()
        except AssertionError as error:
            error.add_note(self.summary)
            raise

    @property
    def summary(self) -> str:
        """What ran, in one line, what was drawn, in another, and why not all ran, if they did not."""
        counts = f"{some(self.cases, 'case')}, {self.outcomes.get('fail', 0)} failed"
        counts += f", {self.outcomes['unknown']} unknown" if "unknown" in self.outcomes else ""
        proof = f"a planted fault was caught: {self.planted}" if self.planted else "no planted fault was caught"
        drawn = "; ".join(f"{name} {', '.join(values)}" for name, values in self.drawn.items())
        lines = [f"campaign of {self.name}: {counts}; {proof}", f"drawn: {drawn}"]
        if self.smallest is not None:
            lines = [f"campaign of {self.name}: {counts}; {some(self.smaller, 'smaller case')} tried", lines[1]]
            lines += [f"smallest: {self.smallest}{'' if self.repeats else ', which passed when it ran again'}"]
        return "\n".join([*lines, self.ended] if self.ended else lines)

    def __str__(self) -> str:
        return self.summary if self else f"{self.summary}\n{self.verdict}"

    def __repr__(self) -> str:
        return f"<FuzzResult {self.summary.partition(chr(10))[0]}>"


@dataclass(frozen=True)
class Subject:
    """What is fuzzed: a step, its reference and its data, and ``validate``, which judges one run of it.

    contract: what it claims, or a function of the microbatches that says so. rerun: of a case, the line that runs it.
    """

    step: Step
    reference: Any
    data: Data
    contract: Any
    validate: Callable[..., Verdict]
    rerun: Callable[[StepCase], str]

    def check(self) -> None:
        """Raise ``WhiteBoxError`` for data that cannot be drawn."""
        wanted = "expected a function data(m, rows, generator), which makes microbatch m"
        if not callable(self.data) or isinstance(self.data, nn.Module):
            raise WhiteBoxError(f"data is {show(self.data)}: {wanted}")
        try:
            inspect.signature(self.data).bind(0, 1, None)
        except TypeError as error:
            raise WhiteBoxError(
                f"data is {name_of(self.data)}, which cannot be called so ({error}): {wanted}"
            ) from None
        except ValueError:  # it is not written in Python
            return

    def judge(self, case: StepCase, space: Space, *, plant: Callable[[Any], Any] | None = None) -> Verdict:
        """The verdict on ``case``; ``plant`` makes a faulty step of the step."""
        step, reference = partial(self.step, **case.given(space.takes)), self.reference
        if not isinstance(reference, Expectation):
            reference = Build(reference, case.dtype, case.seed)
        drawing = [torch.Generator().manual_seed((case.seed << 16) + m) for m in range(len(case.rows))]
        microbatches = [self.data(m, rows, drawing[m]) for m, rows in enumerate(case.rows)]
        if case.dtype is not None:
            microbatches = tree_map_only(
                Tensor, lambda one: one.to(case.dtype) if one.is_floating_point() else one, microbatches
            )
        contract = self.contract(microbatches) if callable(self.contract) else self.contract
        if not isinstance(contract, Contract):
            wanted = "expected a pipeproof.Contract, or a function of the microbatches that makes one"
            raise WhiteBoxError(f"contract is {show(contract)}: {wanted}")
        verdict = self.validate(
            step if plant is None else plant(step),
            reference=reference,
            microbatches=microbatches,
            ranks=case.ranks,
            contract=contract,
            timeout_s=space.campaign.timeout_s,
        )
        return replace(verdict, config=f"{verdict.config}: {case}", rerun=self.rerun(case))


@dataclass(frozen=True)
class Build:
    """Builds the reference of a case: from its seed, where ``func`` takes one, and in its dtype."""

    func: Any
    dtype: torch.dtype | None
    seed: int

    def __call__(self) -> Any:
        model = self.func(**seeded(self.func, self.seed))
        return model if self.dtype is None or not isinstance(model, nn.Module) else model.to(self.dtype)


class ScaledGradients:
    """A step whose gradients are doubled once it has handed them back: the fault that any campaign has to find."""

    summary = "gradients that the step hands back are doubled"

    def __init__(self, func: Step) -> None:
        self.func = func

    def __call__(self, *given: Any, **named: Any) -> Any:
        made = self.func(*given, **named)
        return map(self._double, made) if isinstance(made, Iterator) else self._double(made)

    def _double(self, result: Any) -> StepResult:
        handed = understood(result, name_of(self.func))
        if handed.gradients is not None:
            return replace(handed, gradients={key: _twice(one) for key, one in handed.gradients.items()})
        for one in (one for module in handed.modules for one in module.parameters() if one.grad is not None):
            one.grad.mul_(2)
        return handed


def _twice(gradient: Any) -> Any:
    if isinstance(gradient, FlatShard):
        return replace(gradient, part=_twice(gradient.part))
    if isinstance(gradient, tuple):
        return (_twice(gradient[0]), *gradient[1:])
    return None if gradient is None else 2 * gradient


Drawn = tuple[StepCase, Decision | None]  # a case, and what decides its run


@dataclass
class _CampaignRun:
    """A campaign under way: what became of the cases so far.

    ``began``: by the world's clock, it or its shrinking. ``passed``: the largest. ``unknown``: the first. ``found``:
    the smallest that failed again.
    """

    subject: Subject
    space: Space
    world: World
    began: float
    outcomes: Counter[str] = field(default_factory=Counter)
    drawn: dict[str, Counter[str]] = field(default_factory=dict)
    passed: tuple[Drawn, Verdict] | None = None
    unknown: Verdict | None = None
    failures: list[tuple[Drawn, Verdict]] = field(default_factory=list)
    found: tuple[Drawn, Verdict] | None = None
    smaller: int = 0
    ended: str = ""

    def attempt(self, drawn: Drawn) -> bool | None:
        """Whether a case does not fail; None where the time is up."""
        bound, now = self.space.campaign.seconds, self.world.clock()
        if now - self.began > (min(bound, SHRINK_S) if self.failures else bound):
            ran = f"{self.outcomes.total()} of {some(self.space.campaign.cases, 'case')} ran"
            ran = f"{some(self.smaller, 'smaller case')} ran, and a smaller one may fail" if self.failures else ran
            self.ended = f"ended after {now - self.began:.0f} s, as seconds={bound:g} says: {ran}"
            return None
        verdict = self.judge(drawn)
        outcome = "fail" if verdict.ended else verdict.outcome
        if self.failures:
            self.smaller += 1
        else:
            self.outcomes[outcome] += 1
            for name, value in drawn[0].kinds.items():
                self.drawn.setdefault(name, Counter())[value] += 1
            self.began = now if outcome == "fail" else self.began
        if outcome == "fail":
            self.failures.append((drawn, verdict))
        elif outcome == "unknown":
            self.unknown = verdict if self.unknown is None else self.unknown
        elif self.passed is None or drawn[0].size > self.passed[0][0].size:
            self.passed = drawn, verdict
        return outcome != "fail"

    def judge(self, drawn: Drawn, *, plant: Callable[[Any], Any] | None = None) -> Verdict:
        """The verdict on a case; ``plant`` makes a faulty step of the step."""
        case, decision = drawn
        if decision is not None:
            self.world.decide(decision)
        return self.subject.judge(case, self.space, plant=plant)

    def result(self, verdict: Verdict, **more: Any) -> FuzzResult:
        """What is known now."""
        counts = {
            name: {one: of[one] for one in sorted(of, key=lambda one: (len(one), one))}
            for name, of in self.drawn.items()
        }
        return FuzzResult(
            name_of(self.subject.step), dict(self.outcomes), verdict, drawn=counts, ended=self.ended, **more
        )

    def search(self, decisions: st.SearchStrategy[Any]) -> None:
        """Draw cases, and where one failed half as many on fewer ranks, which may fail at other splits alone.

        The smallest that failed is found if it fails again when it runs once more at the end.
        """
        campaign, space = self.space.campaign, self.space
        fewer: Space | None = space
        budget = 1 if campaign.case else campaign.cases
        while fewer is not None:
            cases: Any = st.just(space.parse(campaign.case)) if campaign.case else step_cases(fewer)
            try:
                if not draw(st.tuples(cases, decisions), self.attempt, budget=budget, seed_=campaign.seed):
                    return
            except Unsatisfiable:  # where= allows none of them
                return
            self.found = self.failures[-1]
            below = None if campaign.case else space.below(self.found[0][0])
            fewer, budget = below, (campaign.cases + 1) // 2

    def reduce(self) -> FuzzResult:
        """The result where a case failed."""
        (drawn, verdict), repeats = self.found or min(self.failures, key=lambda one: one[0][0].size), True
        if self.found is None:
            again = self.judge(drawn)
            repeats = again.outcome == "fail" or bool(again.ended)
            verdict = again if repeats else verdict
        return self.result(verdict, smallest=drawn[0], repeats=repeats, smaller=self.smaller)

    def conclude(self) -> FuzzResult:
        """The result where no case failed: a fault is planted in the largest that passed."""
        if self.passed is None:
            head = self.ended or "no case that was drawn can be: see where="
            blank = Verdict(name_of(self.subject.step), "unknown", "none", (), headline=head)
            return self.result(blank if self.unknown is None else self.unknown)
        drawn, verdict = self.passed
        for plant in (*extensions("faulty_steps").values(), ScaledGradients):
            if self.judge(drawn, plant=plant).outcome == "fail":
                return self.result(verdict if self.unknown is None else self.unknown, planted=plant.summary)
        head = f"this campaign cannot fail: {ScaledGradients.summary}, and still nothing does"
        return self.result(replace(verdict, outcome="unknown", tier="none", laws=(), headline=head))


def run_campaign(subject: Subject, campaign: Campaign, world: World) -> FuzzResult:
    """Draw cases of ``campaign`` and judge each, on ``world``. Raises ``WhiteBoxError`` for what cannot be."""
    subject.check()
    space = Space.of(campaign, subject.step, subject.reference)
    run, before = _CampaignRun(subject, space, world, world.clock()), world.decision
    deciding = None if campaign.case else world.decisions()
    try:
        run.search(st.none() if deciding is None else deciding)
        result = run.reduce() if run.failures else run.conclude()
    finally:
        if deciding is not None:
            world.decide(before)
    if result.ended:
        warnings.warn(f"campaign of {result.name} {result.ended}", stacklevel=3)
    return result

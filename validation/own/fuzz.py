"""Fuzzing our own runtime: what a case may be, and how a campaign of cases stands."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import attrgetter
from time import perf_counter
from typing import Any, TypeAlias

from hypothesis import reject
from hypothesis import strategies as st

from pipeproof.core.measured import Measured
from pipeproof.core.verdict import Verdict
from pipeproof.own.case import FUZZED_DTYPES, LOSSES, MODELS, SCHEDULES, Case, plainest_first
from pipeproof.own.runtimes import OPTIONS, OWN, TORCH, TORCH_CLASSES, TORCH_CSV, why_not
from pipeproof.own.validator import crash_verdict, decided_by, validate
from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.pipeline.schedules import LOOPED, build, virtuals
from pipeproof.pipeline.sizes import some
from pipeproof.worlds.accelerator import CPU
from pipeproof.worlds.draws import draw
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.world import Decision, World

Deciding: TypeAlias = Callable[[Case], st.SearchStrategy[Decision]]

# From the plainest to the fullest, so that shrinking moves to the plainest that still fails.
PLANS = (("train",), ("train", "train"), ("accumulate", "train"), ("eval", "train"), ("train", "eval", "train"))
MAX_RANKS, MAX_VIRTUAL, MAX_MICROBATCHES, MAX_LAYERS_A_STAGE, MAX_REPLICAS = 4, 3, 9, 3, 2


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    schedules: Sequence[str] = SCHEDULES,
    models: Sequence[str] = tuple(plainest_first(MODELS)),
    dtypes: Sequence[str] = FUZZED_DTYPES,
    max_ranks: int = MAX_RANKS,
    device: str = CPU,
    runtime: str = OWN,
) -> Case:
    """Any case: schedule, P 1..4, V 1..3, M 1..9, uneven splits down to a layer a stage, model, dtype, loss, plan.

    ``runtime`` torch stands for both of torch's: a class where it has one, and its runtime for schedules of one's own.
    There are 1 or 2 replicas on torch's, as far as there are ranks for them.
    """
    schedule = draw(st.sampled_from(list(schedules)))
    if runtime == TORCH:
        runtime = draw(st.sampled_from([TORCH, TORCH_CSV] if schedule in TORCH_CLASSES else [TORCH_CSV]))
    ranks = draw(st.integers(1, max_ranks))
    virtual = draw(st.integers(1, MAX_VIRTUAL)) if schedule in LOOPED else virtuals(schedule)
    stages = ranks * virtual
    microbatches = draw(st.integers(_fewest(schedule, ranks, virtual), MAX_MICROBATCHES))
    split = tuple(draw(st.lists(st.integers(1, MAX_LAYERS_A_STAGE), min_size=stages, max_size=stages)))
    model = draw(st.sampled_from(list(models)))
    replicas = draw(st.integers(1, max(1, min(MAX_REPLICAS, max_ranks // ranks)))) if runtime != OWN else 1
    shape = (ranks, stages, microbatches, replicas)

    def can(sizes_differ: bool = False, *options: str) -> bool:
        return not why_not(
            runtime, options, schedule=schedule, model=model, shape=shape, sizes_differ=sizes_differ, specimen=""
        )

    if not can():
        reject()
    return Case(
        schedule,
        ranks,
        virtual,
        microbatches,
        split,
        model=model,
        dtype=draw(st.sampled_from(list(dtypes))) if runtime == OWN else "fp32",
        loss=draw(st.sampled_from(LOSSES)),
        ragged=draw(st.booleans()) if can(True) else False,
        unequal=draw(st.booleans()) if can(not model.startswith("gpt")) else False,
        plan=draw(st.sampled_from(PLANS)),
        seed=draw(st.integers(0, 2**16)),
        device=device,
        runtime=runtime,
        replicas=replicas,
        options=tuple(option for option in OPTIONS if can(False, option) and draw(st.booleans())),
    )


@cache
def _fewest(schedule: str, ranks: int, virtual: int) -> int:
    """The smallest number of microbatches that ``schedule`` can have here."""
    for microbatches in range(1, MAX_MICROBATCHES):
        try:
            build(schedule, ranks=ranks, virtual=virtual, microbatches=microbatches)
        except ScheduleError:
            continue
        return microbatches
    return MAX_MICROBATCHES


COUNTED = ("verdicts", "tiers", "schedules", "replicas", "dtypes", "transports", "deciders")
_TIERS = {"bitwise": "bit for bit"}


@dataclass(frozen=True)
class SmallestFailure:
    """The smallest failing case that shrinking reached, with its verdict, which is a crash's where the ranks failed.

    ``repeated``: whether it failed again when it ran again. A fault that comes and goes is a finding all the same.
    ``decision``: what decided the run; None on real ranks. ``run`` lets the verdict's replay line name it.
    """

    case: Case
    verdict: Verdict
    repeated: bool = True
    decision: Decision | None = None


@dataclass
class Tally:
    """How a campaign stands. ``counts``: cases by each of ``COUNTED``; transports and deciders are of simulated ranks.

    ``part``: how many of the budget are drawn next; 0: all. ``undecided``: cases in which rounding is too coarse.
    ``each``: all verdicts, without the numbers that only a page of its own shows.
    """

    budget: int
    began: float = field(default_factory=perf_counter)
    counts: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter[str]() for name in COUNTED})
    failures: list[SmallestFailure] = field(default_factory=list)
    undecided: list[SmallestFailure] = field(default_factory=list)
    each: list[Verdict] = field(default_factory=list)
    part: int = 0

    @property
    def smallest(self) -> SmallestFailure | None:
        """Of failures so far: the smallest that did repeat, or else the smallest; None where nothing failed."""
        times = Counter(found.case for found in self.failures)
        again = [found for found in self.failures if times[found.case] > 1]
        sizes = attrgetter("case.stages", "case.microbatches", "case.layers")
        return min(again or self.failures, key=sizes, default=None)

    @property
    def cases(self) -> int:
        """Cases run so far, those of shrinking included."""
        return self.counts["verdicts"].total()

    @property
    def details(self) -> str:
        """How many cases each schedule had, replicas had, and each that decides simulated ranks, in a line or two."""

        def listed(what: str) -> str:
            return ", ".join(f"{name} {count}" for name, count in sorted(self.counts[what].items()))

        several = sum(count for replicas, count in self.counts["replicas"].items() if replicas != "1")
        first = listed("schedules") + (f"; {some(several, 'case')} with replicas" if several else "")
        names = {"transports": "transports", "deciders": "interleavings"}
        drawn = [f"{name}: {listed(what)}" for what, name in names.items() if self.counts[what]]
        return f"{first}\n{'; '.join(drawn)}".rstrip("\n")

    def __str__(self) -> str:
        verdicts, tiers = self.counts["verdicts"], self.counts["tiers"].most_common()
        exact = ", ".join(f"{count} {_TIERS.get(tier, tier)}" for tier, count in tiers if tier != "none")
        others = "".join(
            f", {count} {word}" for word, count in sorted(verdicts.items()) if word not in ("pass", "fail")
        )
        rate = f"{self.cases / max(perf_counter() - self.began, 1e-9):.1f} cases/s"
        passed = f"{verdicts['pass']} passed{f' ({exact})' if exact else ''}"
        return f"{some(self.cases, 'case')}: {passed}, {verdicts['fail']} failed{others}; {rate}"


_unexplained = partial(validate, explain=False)


def judge_case(case: Case, world: World, *, validated: Callable[[Case, World], Verdict] = _unexplained) -> Verdict:
    """The verdict on ``case``, without its cause where that would take a second run; ``validated`` gives it.

    Its replay line names what decided the run.
    """
    for _ in world.interleavings():
        verdict = validated(case, world)
        if verdict.outcome != "pass":
            break  # with its seed left in the world, so that who explains it has the same
    return decided_by(verdict, world.decision)


def fuzz(
    world: World,
    tally: Tally,
    *,
    seed_: int = 0,
    strategy: st.SearchStrategy[Case] | None = None,
    progress: Callable[[], None] = lambda: None,
    run: Callable[[Case, World], Verdict] = judge_case,
    deciding: Deciding | None = None,
) -> SmallestFailure | None:
    """Run as many cases as ``tally`` has a budget for, drawn from ``seed_``, and count them there.

    The same seed and budget give the same cases. Stops at the first that is not a pass and shrinks it; not at one that
    rounding leaves undecided, which the tally keeps. ``progress`` is called after every case. ``deciding`` draws what
    decides each case's run on simulated ranks, and is shrunk with the case; None: the world is as it is.
    """

    def attempt(drawn: tuple[Case, Decision | None]) -> bool:
        case, decision = drawn
        if decision is not None:
            world.decide(decision)
        try:
            verdict = run(case, world)
            outcome: str = verdict.outcome
        except RankFailed as error:
            verdict, outcome = decided_by(crash_verdict(case, error), world.decision), "hang or crash"
        by = world.decision
        counted = {"verdicts": outcome, "tiers": verdict.tier, "schedules": case.schedule, "dtypes": case.dtype}
        counted |= {"replicas": str(case.replicas)}
        counted |= {} if by is None else {"transports": by.transport.value, "deciders": by.decider}
        for name, value in counted.items():
            tally.counts[name][value] += 1
        tally.each.append(replace(verdict, measured=Measured()))
        progress()
        # Undecided: all was compared, and what differs is neither rounding for certain nor a fault for certain.
        undecided = outcome == "unknown" and bool(verdict.mismatches) and not (verdict.ended or verdict.stopped)
        if outcome != "pass":
            kept = tally.undecided if undecided else tally.failures
            kept.append(SmallestFailure(case, verdict, decision=by))
        return undecided or outcome == "pass"

    every: st.SearchStrategy[Any] = cases() if strategy is None else strategy
    drawn: st.SearchStrategy[Any] = st.tuples(every, st.none())
    # With the case, not before it: what can decide a case depends on its runtime and ranks, and shrinks after it.
    if deciding is not None:
        drawn = every.flatmap(lambda case: deciding(case).map(lambda decision: (case, decision)))
    if draw(drawn, attempt, budget=tally.part or tally.budget, seed_=seed_):
        return tally.failures[-1]  # Hypothesis runs the smallest once more at the end
    again = len({found.case for found in tally.failures}) < len(tally.failures)
    return tally.smallest and replace(tally.smallest, repeated=again)

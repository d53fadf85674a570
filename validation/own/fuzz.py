"""Fuzzing our own runtime: what a case may be, and how a campaign of cases stands."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from time import perf_counter
from typing import Any, TypeAlias

from hypothesis import reject
from hypothesis import strategies as st

from pipeproof.core.measured import Measured
from pipeproof.core.verdict import Verdict
from pipeproof.own.case import FUZZED_DTYPES, LOSSES, MODELS, SCHEDULES, Case, plainest_first
from pipeproof.own.runtimes import OPTIONS, OWN, TORCH, TORCH_CLASSES, TORCH_CSV, why_not
from pipeproof.own.validator import crash_verdict, validate
from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.pipeline.schedules import LOOPED, build, virtuals
from pipeproof.pipeline.sizes import some
from pipeproof.worlds.accelerator import CPU
from pipeproof.worlds.draws import CampaignEnd, draw
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


@dataclass
class Tally:
    """How a campaign stands."""

    budget: int
    began: float = field(default_factory=perf_counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    tiers: Counter[str] = field(default_factory=Counter)
    schedules: Counter[str] = field(default_factory=Counter)
    replicas: Counter[str] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    transports: Counter[str] = field(default_factory=Counter)  # of simulated ranks
    deciders: Counter[str] = field(default_factory=Counter)  # who decides what happens next among these
    failures: list["SmallestFailure"] = field(default_factory=list)
    undecided: list["SmallestFailure"] = field(default_factory=list)  # rounding is too coarse in them

    @property
    def smallest(self) -> "SmallestFailure | None":
        """Of failures so far: the smallest that did repeat, or else the smallest; None where nothing failed."""
        if not self.failures:
            return None
        times = Counter(found.case for found in self.failures)
        again = [found for found in self.failures if times[found.case] > 1]
        return min(again or self.failures, key=lambda one: (one.case.stages, one.case.microbatches, one.case.layers))

    each: list[Verdict] = field(default_factory=list)  # without the numbers that only a page of its own shows

    @property
    def cases(self) -> int:
        """Cases run so far, those of shrinking included."""
        return self.verdicts.total()

    @property
    def cases_per_second(self) -> float:
        """Over the whole campaign so far."""
        return self.cases / max(perf_counter() - self.began, 1e-9)

    @property
    def by_schedule(self) -> str:
        """How many cases each schedule had."""
        return ", ".join(f"{name} {count}" for name, count in sorted(self.schedules.items()))

    @property
    def by_replicas(self) -> str:
        """How many cases had replicas; empty if none had."""
        several = sum(count for replicas, count in self.replicas.items() if replicas != "1")
        return f"; {some(several, 'case')} with replicas" if several else ""

    @property
    def by_decision(self) -> str:
        """How many cases of simulated ranks each transport had, and each that decides; empty on real ones."""
        kinds = ("transports", self.transports), ("interleavings", self.deciders)
        drawn = [(what, ", ".join(f"{name} {count}" for name, count in sorted(by.items()))) for what, by in kinds if by]
        return "; ".join(f"{what}: {counts}" for what, counts in drawn)

    def add(self, part: "Tally") -> None:
        """Count what a part of the campaign counted."""
        for name, counter in self.counts.items():
            counter.update(part.counts[name])
        self.failures += part.failures
        self.undecided += part.undecided
        self.each += part.each

    @property
    def counts(self) -> "Mapping[str, Counter[str]]":
        """All that is counted, by what it is counted by."""
        names = ("verdicts", "tiers", "schedules", "replicas", "dtypes", "transports", "deciders")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        tiers = ", ".join(f"{count} {_TIERS.get(one, one)}" for one, count in self.tiers.most_common() if one != "none")
        passed = f"{self.verdicts['pass']} passed" + (f" ({tiers})" if tiers else "")
        others = {word: count for word, count in self.verdicts.items() if word not in ("pass", "fail")}
        rest = "".join(f", {count} {word}" for word, count in sorted(others.items()))
        rate = f"{self.cases_per_second:.1f} cases/s"
        return f"{some(self.cases, 'case')}: {passed}, {self.verdicts['fail']} failed{rest}; {rate}"


@dataclass(frozen=True)
class SmallestFailure:
    """The smallest failing case that shrinking reached, with its verdict, or the ranks' failure.

    ``repeated``: whether it failed again when it ran again. A fault that comes and goes is a finding all the same.
    ``decision``: what decided the run; None on real ranks.
    """

    case: Case
    verdict: Verdict | None
    failure: RankFailed | None
    repeated: bool = True
    decision: Decision | None = None

    @property
    def ending(self) -> Verdict:
        """The verdict, or what it is where the ranks failed."""
        return crash_verdict(self.case, self.failure) if self.verdict is None else self.verdict


_unexplained = partial(validate, explain=False)


def judge_case(case: Case, world: World, *, validated: Callable[[Case, World], Verdict] = _unexplained) -> Verdict:
    """The verdict on ``case``, without its cause where that would take a second run; ``validated`` gives it."""
    for _ in world.interleavings():
        verdict = validated(case, world)
        if verdict.outcome != "pass":
            break  # with its seed left in the world, so that who explains it has the same
    return verdict


def _is_undecided(verdict: Verdict) -> bool:
    """Whether all was compared, and what differs is neither rounding for certain nor a fault for certain."""
    return verdict.outcome == "unknown" and bool(verdict.mismatches) and not verdict.ended and not verdict.stopped


def _draw_decision(deciding: Deciding, case: Case) -> st.SearchStrategy[tuple[Case, Decision]]:
    return deciding(case).map(lambda decision: (case, decision))


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
    every: st.SearchStrategy[Any] = cases() if strategy is None else strategy

    def attempt(drawn: tuple[Case, Decision | None]) -> bool:
        case, decision = drawn
        if decision is not None:
            world.decide(decision)
        try:
            verdict, failure = run(case, world), None
        except RankFailed as error:
            verdict, failure = None, error
        outcome = "hang or crash" if verdict is None else verdict.outcome
        tally.verdicts[outcome] += 1
        tally.tiers[verdict.tier if verdict is not None else "none"] += 1
        tally.schedules[case.schedule] += 1
        tally.replicas[str(case.replicas)] += 1
        tally.dtypes[case.dtype] += 1
        if (by := world.decision) is not None:
            tally.transports[by.transport.value] += 1
            tally.deciders[by.decider] += 1
        tally.each.append(replace(SmallestFailure(case, verdict, failure).ending, measured=Measured()))
        progress()
        if verdict is not None and _is_undecided(verdict):
            tally.undecided.append(SmallestFailure(case, verdict, None, decision=by))
        elif outcome != "pass":
            tally.failures.append(SmallestFailure(case, verdict, failure, decision=by))
            return False
        return True

    drawn = st.tuples(every, st.none()) if deciding is None else every.flatmap(partial(_draw_decision, deciding))
    ending = draw(drawn, attempt, budget=tally.budget, seed_=seed_)
    if ending is CampaignEnd.FAILED:
        return tally.failures[-1]  # Hypothesis runs the smallest once more at the end
    if (smallest := tally.smallest) is None:
        return None
    cases_ = [found.case for found in tally.failures]
    return replace(smallest, repeated=len(set(cases_)) < len(cases_))


_TIERS = {"bitwise": "bit for bit"}

"""Part h: how long it takes to find the cause of one failure, once the run is there."""

from collections.abc import Iterator
from itertools import groupby
from statistics import median
from time import perf_counter

from bench_table import Row, Target

from pipeproof.core.observe.observed import Observed
from pipeproof.core.verdict import Verdict
from pipeproof.own.case import Case
from pipeproof.own.faults import pass_on
from pipeproof.own.judgement import diagnose, judge
from pipeproof.own.observe import observe
from pipeproof.wings.specimens import SPECIMENS
from pipeproof.wings.specimens.trial import case_for
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.world import World

SCHEDULES = ("1f1b", "zb-h1")
_MOST_S = 1.0


def measure(*, ranks: int, rounds: int) -> list[Row]:
    """A row per schedule and kind of evidence: seconds, over the first two planted faults of each family."""
    rows = []
    with World() as world:
        for schedule in SCHEDULES:
            failures = list(_failures(world, schedule, ranks))
            for name, runs in (
                ("recorded", failures),
                ("final gradients", [(c, observed.final(), v) for c, observed, v in failures]),
            ):
                seconds = [median(_seconds(*run) for _ in range(rounds)) for run in runs]
                rows.append(_row(f"{schedule} {name}", seconds))
    return rows


def _failures(world: World, schedule: str, ranks: int) -> Iterator[tuple[Case, Observed, Verdict]]:
    for _, family in groupby(SPECIMENS.values(), key=lambda one: one.family):
        ordered = [one for one in family if one.reorder is pass_on]
        cases = [case_for(one, schedule, ranks=ranks) for one in ordered]
        for case in [case for one, case in zip(ordered, cases, strict=True) if not one.missing(case)][:2]:
            try:
                observed = observe(case, world, record=True)
            except RankFailed:
                continue  # nothing but what the ranks say of themselves is left to diagnose
            verdict = judge(case, observed)
            if verdict.outcome == "fail":
                yield case, observed, verdict


def _seconds(case: Case, observed: Observed, verdict: Verdict) -> float:
    began = perf_counter()
    diagnose(case, observed, verdict)
    return perf_counter() - began


def _row(name: str, seconds: list[float]) -> Row:
    worst = max(seconds)
    note = f"{len(seconds)} failures"
    return Row(name, {"median": median(seconds), "worst": worst}, [Target("worst", worst, _MOST_S)], note)

"""The parts of `ci/accelerator`: each tries one thing after the other with what pipeproof has, and tells of each.

What only some parts use is imported there: a machine may lack it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from accelerator_result import Row

from pipeproof.core.mismatch import small
from pipeproof.core.verdict import Verdict
from pipeproof.own.case import SCHEDULES, Case
from pipeproof.own.validator import crash_verdict, validate
from pipeproof.pipeline.schedules import virtuals
from pipeproof.wings.specimens import SPECIMENS
from pipeproof.wings.specimens.trial import Trial, case_for, try_out
from pipeproof.worlds import accelerator
from pipeproof.worlds.accelerator import Arithmetic, computing
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World

RANKS, MICROBATCHES = 4, 8
FAULTY = ("1f1b", "zb-h1")  # the schedules that faults are planted in
_CASE_S = 60.0  # a case that takes longer is a hang
_MOST_GROUPS = 100

Tell = Callable[[Row], None]


@dataclass(frozen=True)
class Wanted:
    """Where parts run, how many cases are drawn, how often variants take turns, and which schedules there are."""

    device: str
    cases: int = 100
    rounds: int = 10
    schedules: Sequence[str] = SCHEDULES


class NotRun(Exception):
    """Why a part cannot run here."""


@dataclass(frozen=True)
class Part:
    """A part: what it shows, its share of the time, what it does, which packages it needs beside torch and numpy."""

    title: str
    bound_s: float
    run: Callable[[Wanted, Tell], None]
    needs: Sequence[str] = ()


def on_one_device(wanted: Wanted, tell: Tell) -> None:
    """Every schedule, its ranks on one device."""
    with _world(accelerator.first_of(wanted.device)) as world:
        for case in [right(wanted, name, model=model) for model in ("gpt", "gpt-tied") for name in wanted.schedules]:
            tell(judged(case, world))


def a_device_each(wanted: Wanted, tell: Tell) -> None:
    """Every schedule, each rank on a device of its own."""
    devices = accelerator.count(wanted.device)
    if devices < 2:
        raise NotRun("one device")
    ranks = max(count for count in (2, RANKS) if count <= devices)
    with _world(wanted.device) as world:
        for name in wanted.schedules:
            tell(judged(right(wanted, name, ranks=ranks), world))


def floors(wanted: Wanted, tell: Tell) -> None:
    """How far every schedule is from the reference, and what rounding does, in fp32 and in bf16."""
    with _world(wanted.device) as world:
        for dtype in ("fp32", "bf16"):
            for name in wanted.schedules:
                case = replace(right(wanted, name), dtype=dtype, plan=("train",))
                tell(judged(case, world, measure=True))


def fuzzing(wanted: Wanted, tell: Tell) -> None:
    """Random cases, up to the first that is no pass; the same ones on every machine."""
    from pipeproof.own.fuzz import Tally, cases, fuzz

    tally, strategy = Tally(wanted.cases), cases(schedules=wanted.schedules, device=wanted.device)

    def run(case: Case, world: World) -> Verdict:
        verdict = _verdict(case, world)
        if verdict.outcome != "pass":
            tell(row_of(case, verdict))
        return verdict

    def progress() -> None:
        tell(Row(f"{wanted.cases} cases from seed 0", "measured", {"so far": str(tally)}))

    with _world(wanted.device) as world:
        fuzz(world, tally, strategy=strategy, progress=progress, run=run)


def catalogue(wanted: Wanted, tell: Tell) -> None:
    """Every planted fault on two schedules: is it caught?"""
    cases = [case for schedule in FAULTY for name in SPECIMENS if (case := _planted(schedule, name)) is not None]
    with _world(wanted.device) as world:
        for case in sorted(cases, key=lambda case: SPECIMENS[case.specimen].law == "deadlock"):  # these cost the ranks
            tell(_tried(try_out(replace(case, device=wanted.device), world, record=False)))


def overhead(wanted: Wanted, tell: Tell) -> None:
    """What it costs a step to be recorded, and to be checked."""
    import bench_check
    import bench_recorder

    for what, measure in (("check_step", bench_check.measure), ("recorder", bench_recorder.measure)):
        for row in measure(ranks=2, rounds=wanted.rounds, device=wanted.device, limit_s=2.0):
            tell(_measured(f"{what}: {row.name}", row))


def speed(wanted: Wanted, tell: Tell) -> None:
    """Steps that compute almost nothing: ours beside torch's and a bare loop, on one rank and on two."""
    import bench_overhead

    carried = "through the host" if accelerator.backend_of(wanted.device, 2) == accelerator.HOST else "directly"
    for ranks, how in ((1, "1 rank"), (2, f"2 ranks, {carried}")):
        for row in bench_overhead.measure(ranks=ranks, rounds=wanted.rounds, device=wanted.device, limit_s=4.0):
            tell(_measured(f"{row.name}, {how}", row))


def jobs(wanted: Wanted, tell: Tell) -> None:
    """Running jobs that are held against themselves, right ones and faulty ones."""
    import accelerator_jobs

    with _world(accelerator.first_of(wanted.device)) as world:
        for faulty, each in enumerate((accelerator_jobs.RIGHT, accelerator_jobs.FAULTY)):
            for what, job in each.items():
                (word, told, goes_on, steady), *_ = world.run(accelerator_jobs.judged, job, ranks=2)
                bits = "none twice" if not steady else "as without" if goes_on else "OTHERS"
                wrong = bits == "OTHERS" or word == ("fail", "pass")[faulty]
                tell(
                    Row(
                        what,
                        ("caught" if word == "fail" else word) if faulty else word,
                        {"job's bits": bits, "said": told},
                        wrong,
                    )
                )


def large(wanted: Wanted, tell: Tell) -> None:
    """What it costs jobs, small and large, to be held against themselves."""
    import accelerator_jobs

    with _world(accelerator.first_of(wanted.device)) as world:
        for what, job in accelerator_jobs.large(wanted.device):
            each = world.run(accelerator_jobs.costs, job, min(3, wanted.rounds), ranks=2)
            for rank, found in enumerate(each):
                plain = found["plain"][0]
                cells = {name: f"{time:.0f} ms, {memory:.0f} MB" for name, (time, memory) in found.items()}
                adds = {
                    f"{name} adds": f"{time / plain - 1:.2f} steps"
                    for name, (time, _) in found.items()
                    if name != "plain"
                }
                tell(Row(f"{what}, rank {rank}", "measured", cells | adds))


SETTINGS: Mapping[str, tuple[str, Arithmetic]] = {
    "fp32": ("fp32", Arithmetic()),
    "fp32, TF32 products": ("fp32", Arithmetic(tf32=True)),
    "fp32, not deterministic": ("fp32", Arithmetic(deterministic=False)),
    "bf16": ("bf16", Arithmetic()),
    "bf16, short sums": ("bf16", Arithmetic(short_sums=True)),
    "bf16, not deterministic": ("bf16", Arithmetic(deterministic=False)),
}


def settings(wanted: Wanted, tell: Tell) -> None:
    """Two schedules under each way in which the device may compute; reference and ranks compute alike."""
    with _world(wanted.device) as world:
        for what, (dtype, arithmetic) in SETTINGS.items():
            for name in FAULTY:
                case = replace(right(wanted, name), dtype=dtype, plan=("train",))
                with _set(world, arithmetic):
                    row = judged(case, world, measure=True)
                tell(replace(row, what=f"{what}: {name}"))


PARTS: Mapping[str, Part] = {
    "host": Part("every schedule on one device, through the host", 65, on_one_device),
    "each": Part("one rank per device, by the device's own backend", 40, a_device_each),
    "jobs": Part("running jobs held against themselves, right ones and faulty ones", 40, jobs),
    "large": Part("what that costs, in time and in memory", 50, large),
    "floors": Part("bitwise, or how far off, beside what rounding does", 45, floors),
    "fuzz": Part("random cases", 60, fuzzing, needs=("hypothesis",)),
    "catalogue": Part("planted faults on 1f1b and zb-h1", 75, catalogue),
    "overhead": Part("what recording and checking a step costs", 30, overhead),
    "speed": Part("steps beside torch's pipelining and a bare loop", 35, speed),
    "settings": Part("TF32, bf16 and deterministic settings", 30, settings),
}


def right(wanted: Wanted, name: str, *, ranks: int = RANKS, model: str = "gpt") -> Case:
    """A case of the schedule without any fault, its microbatches unlike each other."""
    virtual = virtuals(name, looped=2)
    split = (1,) * (ranks * virtual)
    return Case(name, ranks, virtual, MICROBATCHES, split, model=model, ragged=True, unequal=True, device=wanted.device)


def judged(case: Case, world: World, *, measure: bool = False) -> Row:
    """The row of a case that is right."""
    return row_of(case, _verdict(case, world, measure=measure))


def _verdict(case: Case, world: World, *, measure: bool = False) -> Verdict:
    try:
        return validate(case, world, measure=measure, explain=False)
    except RankFailed as failure:
        return crash_verdict(case, failure)


def row_of(case: Case, verdict: Verdict) -> Row:
    """How a right case was judged: it may not fail, nor may its ranks; an "unknown" accuses nobody."""
    cells = {"tier": verdict.tier, "time": f"{verdict.seconds:.1f} s"}
    if verdict.laws:
        gradients = verdict.law("gradient")
        cells |= {"worst": small(gradients.worst), "floor": small(gradients.floor or verdict.floor)}
    if verdict.outcome != "pass":
        cells["why"] = verdict.reason
    return Row(_short(case), verdict.word, cells, wrong=verdict.word in ("fail", "error", "hang"))


def _short(case: Case) -> str:
    return f"{case.schedule} {case.model} {case.dtype} P {case.ranks} V {case.virtual} M {case.microbatches}"


def _planted(schedule: str, name: str) -> Case | None:
    """The smaller of two cases that show the fault on this schedule; None where none can."""
    specimen = SPECIMENS[name]
    sizes = ({"ranks": 2, "microbatches": 4}, {"ranks": RANKS, "microbatches": MICROBATCHES})
    cases = (case_for(specimen, schedule, **size) for size in sizes)
    return next((case for case in cases if not specimen.missing(case)), None)


def _tried(trial: Trial) -> Row:
    said = {"by": trial.law if trial.caught else ", ".join(trial.laws) or "nothing"}
    named = {} if trial.final is None else {"named": trial.final.kind or "unknown"}
    what = f"{trial.specimen} on {trial.case.partition(' ')[0]}"
    outcome = "caught" if trial.caught else "NOT caught"
    return Row(what, outcome, {**said, **named, "time": f"{trial.seconds:.1f} s"}, wrong=not trial.caught)


def _measured(what: str, row: Any) -> Row:
    """A bench's row: medians in milliseconds, and its ratios."""
    medians = {name: f"{value:.2f} ms" for name, value in row.medians.items()}
    ratios = {target.name: f"{target.value:.2f}" for target in row.targets}
    return Row(what, "measured", {**medians, **ratios, "how": row.note})


class _Tuned(World):
    """A world whose ranks compute as is said for the time being; None: as they do by themselves."""

    arithmetic: Arithmetic | None = None

    def run(self, job: Callable[..., Any], *args: object, **options: Any) -> list[Any]:
        if self.arithmetic is None:
            return super().run(job, *args, **options)
        return super().run(_computing, self.arithmetic, job, *args, **options)


def _computing(context: RankContext, arithmetic: Arithmetic, job: Callable[..., Any], *args: object) -> Any:
    with computing(arithmetic):
        return job(context, *args)


def _world(device: str) -> _Tuned:
    return _Tuned(device=device, timeout_s=_CASE_S, silent=True, most_groups=_MOST_GROUPS)


@contextmanager
def _set(world: _Tuned, arithmetic: Arithmetic) -> Iterator[None]:
    """Reference and ranks compute so."""
    before, world.arithmetic = world.arithmetic, arithmetic
    try:
        with computing(arithmetic):
            yield
    finally:
        world.arithmetic = before

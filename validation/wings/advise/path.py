"""The path to a layout: one kind of parallelism at a time, with the reason for each taken or rejected.

The order is customary: cheapest first. Recompute on one device; replicas; ZeRO, stage by stage; recompute again; tensor
parallelism inside a node; a pipeline; experts over ranks; long sequences over ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from pipeproof.pipeline.sizes import three_digits
from pipeproof.wings.advise.cluster import GIB, Cluster
from pipeproof.wings.advise.layout import Job, Recompute
from pipeproof.wings.advise.search import LONG, Allowed, Choice, Found, Kind, find_layouts

_WORTH = 0.05  # of a step's time: less is no reason to add a kind of parallelism where all fits without it


class Outcome(StrEnum):
    """Outcomes of a step: an insufficient one stays, because the next build on it."""

    TAKEN = "taken"
    NOT_ENOUGH = "not enough"
    NOT_NEEDED = "not needed"


_AXES = {Kind.TENSOR: "tp", Kind.PIPELINE: "pp", Kind.EXPERT: "ep", Kind.CONTEXT: "cp"}
# What else ranks share, beside a batch.
_SHARED = {
    Kind.TENSOR: "the heads evenly",
    Kind.PIPELINE: "the layers evenly",
    Kind.EXPERT: "the experts evenly",
    Kind.CONTEXT: "the tokens of a sequence evenly",
}


@dataclass(frozen=True)
class Step:
    """One kind of parallelism, added to earlier ones. ``choice``: the best layout with it, if different."""

    name: str
    outcome: Outcome
    reason: str
    choice: Choice | None


@dataclass(frozen=True)
class _Trial:
    """What a step allows, and on how many devices."""

    name: str
    allowed: Allowed
    devices: int
    kind: Kind | None = None


def find_path(job: Job, cluster: Cluster, allowed: Allowed) -> tuple[Step, ...]:
    """Return every step of the guide, in order."""
    steps: list[Step] = []
    used = replace(allowed, kinds=frozenset(), zero=(0,), recompute=(Recompute.NONE,))
    before = Found(())
    for trial in _trials(allowed, cluster):
        if why := _pointless(trial, job, used, cluster):
            steps.append(Step(trial.name, Outcome.NOT_NEEDED, why, None))
            continue
        tried = _with(trial.allowed, used)
        after = find_layouts(job, replace(cluster, devices=trial.devices), tried, most=1)
        outcome, reason = _judge(before, after, job, trial, cluster)
        steps.append(Step(trial.name, outcome, reason, _choose(before, after, trial)))
        if outcome is not Outcome.NOT_NEEDED:
            used, before = tried, after
    return tuple(steps)


def _trials(allowed: Allowed, cluster: Cluster) -> Iterator[_Trial]:
    def only(**more: object) -> Allowed:
        return replace(allowed, **{"kinds": frozenset(), "zero": (), "recompute": (), **more})  # type: ignore[arg-type]

    again = tuple(kind for kind in allowed.recompute if kind is not Recompute.NONE)
    yield _Trial("one device", only(), 1)
    if again:
        yield _Trial("recompute on one device", only(recompute=again), 1)
    yield _Trial("data parallel", only(), cluster.devices)
    for stage in (1, 2, 3):
        if stage in allowed.zero:
            yield _Trial(f"ZeRO-{stage}", only(zero=(stage,)), cluster.devices)
    if again:
        yield _Trial("recompute", only(recompute=again), cluster.devices)
    for kind in (Kind.TENSOR, Kind.PIPELINE, Kind.EXPERT, Kind.CONTEXT):
        if kind in allowed.kinds:
            # A pipeline often pays only where tensor parallelism makes its stages short: both are tried together.
            both = {kind, Kind.TENSOR} & allowed.kinds if kind is Kind.PIPELINE else {kind}
            yield _Trial(f"{kind} parallel", only(kinds=frozenset(both)), cluster.devices, kind)


def _with(more: Allowed, used: Allowed) -> Allowed:
    return replace(
        used,
        kinds=used.kinds | more.kinds,
        zero=tuple(sorted({*used.zero, *more.zero})),
        recompute=tuple(kind for kind in Recompute if kind in (*used.recompute, *more.recompute)),
    )


def _pointless(trial: _Trial, job: Job, used: Allowed, cluster: Cluster) -> str:
    """Say why a step is pointless; empty if worth trying."""
    if cluster.devices == 1 and not trial.name.endswith("one device"):
        return "there is only one device"
    if trial.kind is Kind.EXPERT and job.model.experts is None:
        return "the model has no experts"
    if trial.kind is Kind.CONTEXT and job.sequence < LONG:
        return f"tried for sequences from {LONG:,} tokens on"
    if trial.name == "recompute" and used.recompute != (Recompute.NONE,):
        return "every step since one device may use it"
    return ""


def _choose(before: Found, after: Found, trial: _Trial) -> Choice | None:
    """Return a step's layout: the best, or the smallest, if it uses this kind of parallelism."""
    choice = after.best[0] if after.best else after.least
    if choice is None or choice in (*before.best, before.least):
        return None
    return choice if trial.kind is None or getattr(choice.layout, _AXES[trial.kind]) > 1 else None


def _judge(before: Found, after: Found, job: Job, trial: _Trial, cluster: Cluster) -> tuple[Outcome, str]:
    """Decide on a step, with the reason."""
    if not after.best:
        if after.least is not None and _choose(before, after, trial) is None:
            return Outcome.NOT_ENOUGH, f"no layout with it needs less than {_gib(after.least)} GiB"
        return Outcome.NOT_ENOUGH, _why_nothing_fits(after.least, job, trial, cluster)
    now = after.best[0]
    if not before.best:
        return Outcome.TAKEN, f"fits: {_gib(now)} of {_memory(cluster)} GiB; a step takes {_seconds(now)}"
    was = before.best[0]
    faster = was.time.total / now.time.total
    if trial.devices > was.layout.ranks and faster > 1:
        return (
            Outcome.TAKEN,
            f"{trial.devices:,} devices are {three_digits(faster)} times as fast as {was.layout.ranks:,}",
        )
    gain = 1 - now.time.total / was.time.total
    if gain >= _WORTH:
        return Outcome.TAKEN, f"a step takes {gain:.0%} less: {_seconds(now)} for {_seconds(was)}"
    why = f"saves only {gain:.1%} of a step" if gain > 0 else "saves no time"
    return Outcome.NOT_NEEDED, f"fits without it; {why}"


def _why_nothing_fits(least: Choice | None, job: Job, trial: _Trial, cluster: Cluster) -> str:
    if least is None:
        others = f" and {_SHARED[trial.kind]}" if trial.kind else ""
        return f"{trial.devices:,} devices cannot share a batch of {job.batch:,}{others}"
    room = trial.allowed.room * cluster.device.memory / GIB
    return f"needs {_gib(least)} GiB; {three_digits(room)} of {_memory(cluster)} may be filled"


def _seconds(choice: Choice) -> str:
    return f"{three_digits(choice.time.total)} s"


def _gib(choice: Choice) -> str:
    return f"{choice.footprint.total / GIB:,.{0 if choice.footprint.total > 100 * GIB else 1}f}"


def _memory(cluster: Cluster) -> str:
    return three_digits(cluster.device.memory / GIB)

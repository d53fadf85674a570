"""Advice as a page: where to begin, memory before and after each step of the way, and the fastest layouts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeproof.pipeline.layouts.cluster import GIB, Cluster
from pipeproof.pipeline.layouts.layout import Job
from pipeproof.pipeline.layouts.path import Outcome, Step
from pipeproof.pipeline.layouts.search import Choice
from pipeproof.pipeline.sizes import three_digits
from pipeproof.reports.template import Marked, rendered

_PARTS = ("weights", "gradients", "optimizer", "activations")
_BADGES = {Outcome.TAKEN: "pass", Outcome.NOT_ENOUGH: "unknown", Outcome.NOT_NEEDED: "not-applicable"}
_WAITS = ("tp", "cp", "ep", "dp", "pp")


@dataclass(frozen=True)
class Advice:
    """What was found for ``job`` on ``cluster``: the way, the fastest layouts, and how it ends.

    ``asked`` is the question in lines. ``said``: where to begin. ``do`` and ``line``: what to do next, and what to type
    for that; both may be empty.
    ``room``: the share of memory that may be filled.
    """

    job: Job
    cluster: Cluster
    steps: tuple[Step, ...]
    best: tuple[Choice, ...]
    asked: Sequence[str]
    said: str
    do: str
    line: str
    room: float


def advice_page(advice: Advice) -> str:
    """The page."""
    return rendered(
        "advice.html",
        title=f"{advice.job.model.name}: {advice.said.rstrip('.')}",
        told={},
        advice=advice,
        parts=_PARTS,
        steps=[(step, before) for step, before in _before(advice.steps) if step.choice is not None],
        way=[_row(step, before) for step, before in _before(advice.steps)],
        layouts=[(choice, _held(choice), _waits(choice)) for choice in advice.best],
    )


def _before(steps: Sequence[Step]) -> Iterator[tuple[Step, Choice | None]]:
    """Every step, with the layout that it builds on."""
    last: Choice | None = None
    for step in steps:
        yield step, last
        if step.choice is not None and step.outcome is not Outcome.NOT_NEEDED:
            last = step.choice


def _row(step: Step, before: Choice | None) -> list[str | Marked]:
    after = step.choice
    held = ("-" if one is None else three_digits(one.footprint.total / GIB) for one in (before, after))
    rest = ("-", "-") if after is None else (three_digits(after.time.total), after.layout.words)
    return [step.name, Marked(step.outcome, f"outcome {_BADGES[step.outcome]}"), *held, *rest, step.reason]


def _held(choice: Choice) -> list[tuple[float, str]]:
    """The parts of its memory, the largest first."""
    return sorted(((getattr(choice.footprint, part), part) for part in _PARTS), reverse=True)


def _waits(choice: Choice) -> list[tuple[float, str]]:
    """What is waited for, by its share of a step: a thousandth at least, the largest first."""
    shares = ((getattr(choice.time, what) / choice.time.total, what) for what in _WAITS)
    return sorted(((share, what) for share, what in shares if share >= 1 / 1000), reverse=True)

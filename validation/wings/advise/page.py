"""Advice as a page: where to begin, memory before and after each step of the way, and the fastest layouts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeproof.reports.template import rendered
from pipeproof.wings.advise.cluster import Cluster
from pipeproof.wings.advise.layout import Job
from pipeproof.wings.advise.path import Outcome, Step
from pipeproof.wings.advise.search import Choice


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
    title = f"{advice.job.model.name}: {advice.said.rstrip('.')}"
    return rendered("advice.html", title=title, told={}, advice=advice, way=[*_way(advice.steps)])


def _way(steps: Sequence[Step]) -> Iterator[tuple[Step, Choice | None]]:
    """Every step, with the layout that it builds on."""
    last: Choice | None = None
    for step in steps:
        yield step, last
        if step.choice is not None and step.outcome is not Outcome.NOT_NEEDED:
            last = step.choice

"""Advice on a page: the starting point, memory before and after each step, and the fastest layouts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeproof.reports.template import render
from pipeproof.wings.advise.cluster import Cluster
from pipeproof.wings.advise.layout import Job
from pipeproof.wings.advise.path import Outcome, Step
from pipeproof.wings.advise.search import Choice


@dataclass(frozen=True)
class Advice:
    """Advice for ``job`` on ``cluster``: steps, fastest layouts, and conclusion.

    ``asked``: the question in lines. ``said``: the starting point. ``do`` and ``line``: the next action and its
    command; both may be empty. ``room``: usable share of memory.
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
    return render("advice.html", title=title, data={}, advice=advice, way=[*_way(advice.steps)])


def _way(steps: Sequence[Step]) -> Iterator[tuple[Step, Choice | None]]:
    """Yield every step, with the layout under it."""
    last: Choice | None = None
    for step in steps:
        yield step, last
        if step.choice is not None and step.outcome is not Outcome.NOT_NEEDED:
            last = step.choice

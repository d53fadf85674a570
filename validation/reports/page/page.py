"""Verdicts as an HTML file: the fault, its place, the next step, and the numbers behind it."""

from collections import Counter
from collections.abc import Mapping, Sequence

from pipeproof.core.cause import KINDS
from pipeproof.core.measured import versions
from pipeproof.core.verdict import SCHEMA, Verdict
from pipeproof.pipeline.sizes import SHOWN, some
from pipeproof.reports.gate_reports import CaseResult
from pipeproof.reports.page import sections
from pipeproof.reports.page.grid import SAID, Grid
from pipeproof.reports.template import render

Configs = Sequence[tuple[str, object, object]]
Rows = Sequence[tuple[str, str]]


def page(verdict: Verdict, *, configs: Configs = (), why: Rows = ()) -> str:
    """Render a verdict's page.

    configs: differing fields in two runs' configs, by name. why: the reason for the difference, each part with its
    name.
    """
    rows = [[str(part) or "-" for part in row] for row in configs]
    title = f"{verdict.word.title()}: {verdict.config}"
    return _whole("single.html", title, {0: verdict}, configs=rows, why=why)


def _whole(template: str, title: str, verdicts: Mapping[int, Verdict], **more: object) -> str:
    """Render ``template`` with whole ``verdicts``; its script gets the texts of their cells."""
    cells: list[object] = []
    shown: dict[int, tuple[Verdict, Grid | None]] = {}
    for k, verdict in verdicts.items():
        ran = verdict.measured.ran
        grid = None if ran is None else Grid(verdict, ran, len(cells))
        cells += [] if grid is None else [cell.details for cell in grid.cells]
        shown[k] = (verdict, grid)
    known = {"sections": sections, "versions": versions(), "schema": SCHEMA, "kinds": KINDS}
    return render(template, title=title, data={"cells": cells, "said": SAID}, whole=shown, **known, **more)


def campaign(entries: Sequence[CaseResult], *, said: str, left_out: Mapping[str, str]) -> str:
    """Render the page for ``entries``; a single entry gets a page alone. ``said``: a summary; ``left_out``: reasons."""
    if len(entries) == 1 and not left_out and entries[0].outcome == entries[0].verdict.outcome:
        return page(entries[0].verdict)
    counts = Counter[str](entry.outcome for entry in entries)
    outcome = next((one for one in ("fail", "unknown") if counts[one]), "pass" if entries else "unknown")
    wrong = [(k, entry.verdict) for k, entry in enumerate(entries) if entry.outcome != "pass"]
    near = [one for one in entries if one.closeness and one.verdict.outcome == "pass"]
    return _whole(
        "campaign.html",
        f"{outcome.title()}: {said}",
        dict(wrong[:SHOWN]),
        said=said,
        outcome=outcome,
        sentence=_sentence(entries, counts, len(left_out)),
        entries=sorted(enumerate(entries), key=lambda pair: pair[1].outcome == "pass"),
        slowest=sorted(entries, key=lambda one: -one.verdict.seconds)[:SHOWN],
        closest=sorted(near, key=lambda one: -(one.closeness or 0))[:SHOWN],
        left_out=left_out,
    )


def _sentence(entries: Sequence[CaseResult], counts: Counter[str], missing: int) -> str:
    total = counts.total()
    if counts["pass"] == total and total and not missing:
        agree = sum(entry.verdict.outcome == "pass" for entry in entries)
        caught = ", and the planted fault is caught" if agree < total else ""
        many = "The case agrees" if agree == 1 else f"All {agree} cases agree"
        return f"{many} with the reference{caught}."
    parts = [f"{counts['fail']} wrong", f"{counts['unknown']} without a verdict", f"{counts['pass']} right"]
    text = ", ".join(part for part in parts if part[0] != "0") or "nothing"
    return f"Of {some(total, 'case')}: {text}." + (f" {missing} did not run." if missing else "")

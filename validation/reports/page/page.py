"""A verdict, or many, as one file of HTML: what is wrong, where, what to do next, and the numbers behind that."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeproof.core.cause import KINDS
from pipeproof.core.measured import versions
from pipeproof.core.verdict import SCHEMA, Verdict
from pipeproof.pipeline.sizes import SHOWN, some
from pipeproof.reports.page import sections
from pipeproof.reports.page.grid import SAID, Grid
from pipeproof.reports.template import rendered

Configs = Sequence[tuple[str, object, object]]
Rows = Sequence[tuple[str, str]]


def page(verdict: Verdict, *, configs: Configs = (), why: Rows = ()) -> str:
    """The page of one verdict.

    configs: what is different in the configs of two runs, by name. why: the reason of what differs, each part with its
    name.
    """
    rows = [[str(part) or "-" for part in row] for row in configs]
    title = f"{verdict.word.title()}: {verdict.config}"
    return _whole("single.html", title, {0: verdict}, configs=rows, why=why)


def _whole(template: str, title: str, verdicts: Mapping[int, Verdict], **more: object) -> str:
    """A page of ``template`` in which ``verdicts`` are shown whole; its script is told what their cells say."""
    cells: list[object] = []
    shown: dict[int, tuple[Verdict, Grid | None]] = {}
    for k, verdict in verdicts.items():
        ran = verdict.measured.ran
        grid = None if ran is None else Grid(verdict, ran, len(cells))
        cells += [] if grid is None else [cell.told for cell in grid.cells]
        shown[k] = (verdict, grid)
    known = {"sections": sections, "versions": versions(), "schema": SCHEMA, "kinds": KINDS}
    return rendered(template, title=title, told={"cells": cells, "said": SAID}, whole=shown, **known, **more)


@dataclass(frozen=True)
class CampaignRow:
    """One case of a campaign; ``outcome`` is what it says of that, and ``note`` which kind of case it is."""

    verdict: Verdict
    outcome: str
    note: str = ""

    @property
    def word(self) -> str:
        """The outcome as a reader meets it."""
        return self.verdict.word if self.outcome == self.verdict.verdict else self.outcome

    @property
    def closeness(self) -> float | None:
        """The largest error in floors of its law; None where all agree bit for bit."""
        found = [law.worst / law.floor for law in self.verdict.laws if law.worst and law.floor]
        return max(found, default=None)


def campaign(entries: Sequence[CampaignRow], *, said: str, left_out: Mapping[str, str]) -> str:
    """The page of ``entries``; of one, its own. ``said`` sums them up, ``left_out`` says what did not run, and why."""
    if len(entries) == 1 and not left_out and entries[0].outcome == entries[0].verdict.verdict:
        return page(entries[0].verdict)
    counts = Counter(entry.outcome for entry in entries)
    outcome = next((one for one in ("fail", "unknown") if counts[one]), "pass" if entries else "unknown")
    wrong = [(k, entry.verdict) for k, entry in enumerate(entries) if entry.outcome != "pass"]
    near = [one for one in entries if one.closeness and one.verdict.verdict == "pass"]
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


def _sentence(entries: Sequence[CampaignRow], counts: Counter[str], missing: int) -> str:
    total = counts.total()
    if counts["pass"] == total and total and not missing:
        agree = sum(entry.verdict.verdict == "pass" for entry in entries)
        caught = ", and the planted fault is caught" if agree < total else ""
        many = "The case agrees" if agree == 1 else f"All {agree} cases agree"
        return f"{many} with the reference{caught}."
    parts = [f"{counts['fail']} wrong", f"{counts['unknown']} without a verdict", f"{counts['pass']} right"]
    told = ", ".join(part for part in parts if part[0] != "0") or "nothing"
    return f"Of {some(total, 'case')}: {told}." + (f" {missing} did not run." if missing else "")

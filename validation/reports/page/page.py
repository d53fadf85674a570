"""A verdict as one file of HTML: what is wrong, where, what to do next, and all the numbers that this rests on."""

from collections.abc import Mapping, Sequence

from pipeproof.core.cause import KINDS
from pipeproof.core.measured import versions
from pipeproof.core.text import sentence
from pipeproof.core.verdict import SCHEMA, Verdict, small
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
    return whole("single.html", title, {0: verdict}, configs=rows, why=why)


def whole(template: str, title: str, verdicts: Mapping[int, Verdict], **more: object) -> str:
    """A page of ``template`` in which ``verdicts`` are shown whole; its script is told what their cells say."""
    cells: list[object] = []
    shown: dict[int, object] = {}
    for k, verdict in verdicts.items():
        ran = verdict.measured.ran
        grid = None if ran is None else Grid(verdict, ran, len(cells))
        cells += [] if grid is None else [cell.told for cell in grid.cells]
        shown[k] = _values(verdict, grid)
    return rendered(template, title=title, told={"cells": cells, "said": SAID}, whole=shown, **more)


def _values(verdict: Verdict, grid: Grid | None) -> dict[str, object]:
    """What the template of a verdict shows."""
    return {
        "verdict": verdict,
        "sentence": _sentence(verdict),
        "closest": _closest(verdict),
        "compared": any(law.checked for law in verdict.laws),
        "grid": grid,
        "said": SAID,
        "cells": sections.coefficients(verdict),
        "losses": sections.losses(verdict),
        "gradients": sections.gradients(verdict),
        "strip": sections.strip(verdict),
        "norms": sections.norms(verdict),
        "laws": sections.laws(verdict),
        "missed": sections.missed(verdict),
        "notes": sections.notes(verdict),
        "versions": versions(),
        "schema": SCHEMA,
        "kinds": KINDS,
    }


def _sentence(verdict: Verdict) -> str:
    told = sentence(verdict)
    if verdict.verdict == "pass":
        count, exact = sum(law.checked for law in verdict.laws), sum(law.exact for law in verdict.laws)
        rest = f"{exact} of them bit for bit, the others to the rounding of {verdict.tier}"
        told = f"all {count} comparisons agree, {'bit for bit' if count == exact else rest}"
    elif verdict.word == "different":
        told = f"the two runs differ: {told}"
    return f"{told[:1].upper()}{told[1:]}."


def _closest(verdict: Verdict) -> str:
    """Which comparison came nearest to what rounding allows; empty where all agree bit for bit, or nothing was."""
    near = [(one.error / one.limit, one) for one in verdict.measured.compared if one.limit and one.error]
    if not near:
        return ""
    share, one = max(near, key=lambda pair: pair[0])
    what = one.parameter or ("" if one.microbatch is None else f"microbatch {one.microbatch}")
    return f"closest: {f'{one.law} {what}'.rstrip()}, error {small(one.error)}, {share:.2g} of what rounding allows"

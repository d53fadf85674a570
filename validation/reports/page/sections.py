"""Parts of a verdict's page, from the verdict's own values; ``templates/verdict.html`` lays them out."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from pipeproof.core.cause import Cell
from pipeproof.core.measured import Compared
from pipeproof.core.text import sentence
from pipeproof.core.verdict import LawResult, Verdict, small
from pipeproof.reports.colours import decades, step_of
from pipeproof.reports.columns import ROWS


def opening(verdict: Verdict) -> str:
    """The opening sentence of a page."""
    text = sentence(verdict)
    if verdict.outcome == "pass":
        count, exact = sum(law.checked for law in verdict.laws), sum(law.exact for law in verdict.laws)
        rest = f"{exact} of them bit for bit, the others to the rounding of {verdict.tier}"
        text = f"all {count} comparisons agree, {'bit for bit' if count == exact else rest}"
    elif verdict.word == "different":
        text = f"the two runs differ: {text}"
    return f"{text[:1].upper()}{text[1:]}."


def closest(verdict: Verdict) -> str:
    """The comparison closest to its rounding limit; empty if all agree bit for bit, or without any."""
    near = [(one.error / one.limit, one) for one in verdict.measured.compared if one.limit and one.error]
    if not near:
        return ""
    share, one = max(near, key=lambda pair: pair[0])
    what = one.parameter or ("" if one.microbatch is None else f"microbatch {one.microbatch}")
    return f"closest: {f'{one.law} {what}'.rstrip()}, error {small(one.error)}, {share:.2g} of what rounding allows"


def losses(verdict: Verdict) -> Iterator[tuple[str, Compared, str]]:
    """Losses by microbatch, equal ones once, with their ranks; the total comes last."""
    alike: dict[tuple[float, float | None], list[Compared]] = defaultdict(list)
    for one in verdict.measured.of("loss"):
        alike[math.inf if one.microbatch is None else one.microbatch, one.observed].append(one)
    for (microbatch, _), found in sorted(alike.items(), key=lambda item: item[0][0]):
        ranks = sorted({each.rank for each in found if each.rank is not None})
        run = len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1
        text = f"{ranks[0]} to {ranks[-1]}" if run else ", ".join(map(str, ranks)) or "-"
        yield "all" if microbatch == math.inf else str(microbatch), found[0], text


def gradients(verdict: Verdict) -> Sequence[Compared]:
    """Every compared gradient, worst first, in units of rounding."""
    every = verdict.measured.of("gradient")
    return sorted(every, key=lambda one: one.error / one.limit if one.limit else one.error, reverse=True)


def strip(verdict: Verdict) -> dict[str, list[tuple[str, str]]] | None:
    """Powers of ten on a line, as texts and places, and inexact gradients, as looks and places."""
    far = [(one, decades(one.error, one.limit)) for one in gradients(verdict) if one.error and one.limit]
    if not far:
        return None
    low, high = min(-2.0, *(math.floor(at) for _, at in far)), max(2.0, *(math.ceil(at) for _, at in far))

    def x(at: float) -> str:
        return f"{20 + 660 * (at - low) / (high - low):.1f}"

    raised = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    powers = [power for power in range(int(low), int(high) + 1) if high - low <= 12 or power % 2 == 0]
    ticks = [(f"10{str(power).translate(raised)}" if power else "1", x(power)) for power in powers]
    return {"ticks": ticks, "marks": [(step_of(one.error, one.limit), x(at)) for one, at in far]}


def coefficients(verdict: Verdict) -> dict[str, object] | None:
    """Counts of each microbatch in each stage's gradients, and in parameters, grouped by equal counts.

    None if the cause does not involve counts.
    """
    if verdict.cells is None:
        return None
    rows = verdict.cells.rows
    columns = list(range(len(rows[0])))
    if len(columns) > ROWS:
        columns = [m for m in columns if not all(row[m].right for row in rows)][:ROWS]
    alike: dict[tuple[tuple[Cell, ...], str], list[str]] = defaultdict(list)
    for one in verdict.measured.weights:
        alike[one.cells, one.observed].append(one.parameter)
    return {"columns": columns, "alike": alike, "left": len(rows[0]) - len(columns)}


def laws_missed(verdict: Verdict) -> list[list[LawResult]]:
    """Laws with omitted comparisons, grouped by note."""
    found: dict[str, list[LawResult]] = defaultdict(list)
    for law in verdict.laws:
        if law.left_out or not law.checked:
            found[law.name if law.left_out else law.note or law.outcome].append(law)
    return [*found.values()]


def notes(verdict: Verdict) -> Mapping[str, str]:
    """Reasons for laws without results."""
    noted = {law.name: law.note for law in reversed(verdict.laws) if law.note}
    return defaultdict(lambda: "nothing of it was compared", noted)

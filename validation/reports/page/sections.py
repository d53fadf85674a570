"""What the parts of a verdict's page show: rows of tables, made of the verdict's own values."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from pipeproof.core.cause import Cell
from pipeproof.core.measured import Compared
from pipeproof.core.verdict import LawResult, Verdict, small
from pipeproof.reports.columns import ROWS
from pipeproof.reports.page.grid import decades, step_of
from pipeproof.reports.template import Marked

Rows = list[list[str | Marked]]


def losses(verdict: Verdict) -> Rows:
    """Those that ranks reported beside those expected, by microbatch; the one of all comes last."""
    alike: dict[tuple[float, float | None], list[Compared]] = defaultdict(list)
    for one in verdict.measured.of("loss"):
        alike[math.inf if one.microbatch is None else one.microbatch, one.found].append(one)
    rows: Rows = []
    for (microbatch, _), (one, *others) in sorted(alike.items(), key=lambda item: item[0][0]):
        name = "all" if microbatch == math.inf else str(microbatch)
        ranks = sorted({each.rank for each in (one, *others) if each.rank is not None})
        run = len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1
        told = f"{ranks[0]} to {ranks[-1]}" if run else ", ".join(map(str, ranks)) or "-"
        rows.append([name, _number(one.found), _number(one.due), _error(one), told])
    return rows


def norms(verdict: Verdict) -> Rows:
    """The gradient norm on every rank that reports it."""
    return [
        ["every rank" if one.rank is None else f"rank {one.rank}", _number(one.found), _number(one.due), _error(one)]
        for one in verdict.measured.of("grad-norm")
    ]


def gradients(verdict: Verdict) -> dict[str, object]:
    """Every gradient that was compared, the farthest off first, in what rounding allows; and how many are how far."""
    rows: Rows = []
    every = _by_distance(verdict)
    for one in every:
        stage, rank = ("-" if number is None else str(number) for number in (one.stage, one.rank))
        numbers = ("-" if number is None else small(number) for number in (one.floor, one.limit))
        rows.append([one.parameter or "", stage, rank, _error(one), *numbers])
    exact, wrong = sum(one.error == 0 for one in every), sum(one.outcome != "pass" for one in every)
    return {"rows": rows, "exact": exact, "rounded": len(rows) - exact - wrong, "wrong": wrong}


def strip(verdict: Verdict) -> dict[str, list[tuple[str, str]]] | None:
    """Powers of ten on a line, as texts and places, and gradients that are not exact, as looks and places."""
    far = [(one, decades(one.error, one.limit)) for one in _by_distance(verdict) if one.error and one.limit]
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
    """How often each microbatch is in the gradients of each stage, and of parameters, the same ones together.

    None where the cause is no matter of that.
    """
    if verdict.cells is None:
        return None
    rows, measured = verdict.cells.rows, verdict.measured
    columns = list(range(len(rows[0])))
    if len(columns) > ROWS:
        columns = [m for m in columns if not all(row[m].right for row in rows)][:ROWS]
    alike: dict[tuple[tuple[Cell, ...], str], list[str]] = defaultdict(list)
    for one in measured.weights:
        alike[one.cells, one.seen].append(one.parameter)

    def row(cells: Sequence[Cell]) -> list[Marked]:
        return [_coefficient(cells[m]) for m in columns]

    return {
        "columns": columns,
        "stages": [[f"stage {stage}", *row(cells)] for stage, cells in enumerate(rows)],
        "stage": measured.stage,
        "parameters": [[{"all": all, "observed": seen}, *row(cells)] for (cells, seen), all in alike.items()],
        "but_for": verdict.cells.but_for,
        "left": len(rows[0]) - len(columns),
    }


def laws(verdict: Verdict) -> Rows:
    """Every law: how it fared, and how much of it was compared."""
    return [
        [
            law.name,
            Marked(verdict.outcome(law.outcome), f"outcome {law.outcome.replace(' ', '-')}"),
            *(str(count) if law.checked else "-" for count in (law.checked, law.exact, law.wrong)),
            small(law.worst) if law.worst or law.exact == law.checked > 0 else "-",
            small(law.floor) if law.worst else "-",
            "" if _missed(law) else law.note,
        ]
        for law in verdict.laws
    ]


def missed(verdict: Verdict) -> list[list[LawResult]]:
    """The laws of which something was not compared, those with the same note together."""
    found: dict[str, list[LawResult]] = defaultdict(list)
    for law in filter(_missed, verdict.laws):
        found[law.name if law.left_out else law.note or law.outcome].append(law)
    return [*found.values()]


def notes(verdict: Verdict) -> Mapping[str, str]:
    """Why nothing of a law is shown."""
    noted = {law.name: law.note for law in reversed(verdict.laws) if law.note}
    return defaultdict(lambda: "nothing of it was compared", noted)


def _missed(law: LawResult) -> bool:
    """Whether something that it names was not compared."""
    return bool(law.left_out) or not law.checked


def _by_distance(verdict: Verdict) -> Sequence[Compared]:
    """The gradients that were compared, the farthest off first."""
    every = verdict.measured.of("gradient")
    return sorted(every, key=lambda one: one.error / one.limit if one.limit else one.error, reverse=True)


def _coefficient(cell: Cell) -> Marked:
    return Marked(str(cell), f"k {'unknown' if cell.own is None else 'x' if cell.right else 'w3'}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.9g}"


def _error(one: Compared) -> Marked:
    text = "bit for bit" if one.error == 0 else small(one.error)
    return Marked(text, f"k {step_of(one.error, one.limit)}")

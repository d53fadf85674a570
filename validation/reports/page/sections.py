"""The parts of a verdict's page below the grid: each is made of the verdict's own values, or says what is missing."""

import math
from collections.abc import Iterable, Sequence

from pipeproof.core.cause import Cell
from pipeproof.core.measured import Compared, Weights
from pipeproof.core.verdict import LawResult, Verdict, small
from pipeproof.reports.columns import ROWS
from pipeproof.reports.page.grid import decades, step_of
from pipeproof.reports.page.markup import Html, Part, joined, more, section, table, tag


def losses(verdict: Verdict) -> Html:
    """Those that ranks reported beside those expected, by microbatch."""
    seen: dict[tuple[int, float | None], list[Compared]] = {}
    for one in verdict.measured.of("loss"):
        seen.setdefault((-1 if one.microbatch is None else one.microbatch, one.found), []).append(one)
    rows = []
    for (microbatch, _), same in sorted(seen.items(), key=lambda item: (item[0][0] < 0, item[0][0])):
        one = same[0]
        name = "all" if microbatch < 0 else str(microbatch)
        ranks = sorted({other.rank for other in same if other.rank is not None})
        rows.append([name, _number(one.found), _number(one.due), _error(one), _ranks(ranks)])
    head = ["", *verdict.sides, "error", "ranks"]
    shown = table(head, rows, caption="Losses by microbatch", numbers=(0, 1, 2, 3)) if rows else None
    return section("Losses", shown, missing=f"Not recorded: {_why(verdict, 'loss')}")


def _ranks(ranks: Sequence[int]) -> str:
    run = len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1
    return f"{ranks[0]} to {ranks[-1]}" if run else ", ".join(map(str, ranks)) or "-"


def norms(verdict: Verdict) -> Html:
    """The gradient norm on every rank that reports it."""
    rows = [
        ["every rank" if one.rank is None else f"rank {one.rank}", _number(one.found), _number(one.due), _error(one)]
        for one in verdict.measured.of("grad-norm")
    ]
    shown = table(["", *verdict.sides, "error"], rows, caption="Gradient norms by rank", numbers=(1, 2, 3))
    return section("Gradient norm", shown if rows else None, missing=f"Not recorded: {_why(verdict, 'grad-norm')}")


def gradients(verdict: Verdict) -> Html:
    """Every gradient that was compared: how far off, in what rounding allows."""
    every = sorted(verdict.measured.of("gradient"), key=_away, reverse=True)
    if not every:
        return section("Gradients", missing=f"Not recorded: {_why(verdict, 'gradient')}")
    exact = sum(one.error == 0 for one in every)
    wrong = sum(one.outcome != "pass" for one in every)
    told = f"{len(every)} compared: {exact} bit for bit, {len(every) - exact - wrong} up to rounding, {wrong} not."
    rows = [_gradient(one) for one in every]
    head = ["parameter", "stage", "rank", "error", "floor", "rounding allows"]
    shown = table(head, rows, caption="Gradients, the farthest off first", numbers=(1, 2, 3, 4, 5))
    return section("Gradients", tag("p", told), _strip(every), more(f"All {len(every)}, the farthest off first", shown))


def _gradient(one: Compared) -> list[Part]:
    stage, rank = ("-" if number is None else str(number) for number in (one.stage, one.rank))
    numbers = ["-" if number is None else small(number) for number in (one.floor, one.limit)]
    return [one.parameter, stage, rank, _error(one), *numbers]


def _strip(every: Sequence[Compared]) -> Html | None:
    """A mark for each gradient that is not exact, on a line of powers of ten."""
    marks = [(one, decades(one.error, one.limit)) for one in every if one.error and one.limit]
    if not marks:
        return None
    low, high = min(-2.0, *(math.floor(at) for _, at in marks)), max(2.0, *(math.ceil(at) for _, at in marks))

    def x(at: float) -> float:
        return 20 + 660 * (at - low) / (high - low)

    ticks = [at for at in range(int(low), int(high) + 1) if high - low <= 12 or at % 2 == 0]
    lines = [_tick(at, f"{x(at):.1f}") for at in ticks]
    dots = [
        tag("circle", cx=f"{x(at):.1f}", cy=20 + k * 7 % 28, r="3.2", class_=step_of(one.error, one.limit))
        for k, (one, at) in enumerate(marks)
    ]
    said = f"{len(marks)} gradients that are not bit for bit, by error over what rounding allows"
    drawn = tag("svg", *lines, *dots, viewBox="0 0 700 74", role="img", aria_label=said, class_="strip")
    return tag("figure", drawn, tag("figcaption", "error ÷ what rounding allows, one mark a gradient"))


def _tick(power: int, x: str) -> Html:
    raised = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    line = tag("line", x1=x, x2=x, y1="8", y2="52", class_="tick" if power else "zero")
    return joined([line, tag("text", f"10{raised}" if power else "1", x=x, y="68")])


def coefficients(verdict: Verdict) -> Html | None:
    """How often each microbatch is in each stage's gradients, and in each parameter's of the stage at fault.

    None where the cause is no matter of that.
    """
    if verdict.cells is None:
        return None
    rows = verdict.cells.rows
    columns = range(len(rows[0]))
    if len(columns) > ROWS:
        columns = [m for m in columns if not all(row[m].right for row in rows)][:ROWS]  # type: ignore[assignment]
    head = ["", *map(str, columns)]
    stages = [[f"stage {stage}", *(_coefficient(row[m]) for m in columns)] for stage, row in enumerate(rows)]
    numbers = tuple(range(1, len(head)))
    said = (
        "Once is right. “3's”: with the output gradient of microbatch 3. *: with what the next stage handed on wrongly."
    )
    parts = [table(head, stages, caption="Stage × microbatch: how often", numbers=numbers)]
    measured = verdict.measured
    if measured.weights:
        title = f"Parameters of stage {measured.stage} × microbatch"
        parts.append(table(head, _by_parameter(measured.weights, columns), caption=title, numbers=numbers))
    left = len(rows[0]) - len(columns)
    parts += [tag("p", f"{', '.join(verdict.cells.but_for)}.")] if verdict.cells.but_for else []
    rest = tag("p", f"{left} more microbatches are not shown.", class_="quiet") if left else None
    return section("Microbatches in the gradients", *parts, rest, tag("p", said, class_="quiet"), wide=True)


def _by_parameter(weights: Sequence[Weights], columns: Iterable[int]) -> list[list[Part]]:
    """Parameters in rows; those that have the same coefficients are one row."""
    groups: dict[tuple[tuple[Cell, ...], str], list[str]] = {}
    for one in weights:
        groups.setdefault((one.cells, one.seen), []).append(one.parameter)
    columns = list(columns)
    return [
        [
            joined([_names(names), tag("small", f" {seen}") if seen else None]),
            *(_coefficient(cells[m]) for m in columns),
        ]
        for (cells, seen), names in groups.items()
    ]


def _names(names: Sequence[str]) -> Html:
    if len(names) <= 3:
        return joined(names, ", ")
    return more(f"{len(names)} parameters", tag("span", ", ".join(names), class_="names"))


def _coefficient(cell: Cell) -> Html:
    step = "unknown" if cell.own is None else ("x" if cell.right else "w3")
    return tag("span", str(cell), class_=f"k {step}")


def laws(verdict: Verdict) -> Html:
    """Every law: how it fared, and how much of it was compared."""
    head = ["law", "outcome", "compared", "bit for bit", verdict.outcome("wrong"), "worst error", "floor", "note"]
    rows = [
        [
            law.name,
            tag("span", verdict.outcome(law.outcome), class_=f"outcome {law.outcome.replace(' ', '-')}"),
            *(str(count) if law.checked else "-" for count in (law.checked, law.exact, law.wrong)),
            small(law.worst) if law.worst or law.exact == law.checked > 0 else "-",
            small(law.floor) if law.worst else "-",
            "" if _missed(law) else law.note,
        ]
        for law in verdict.laws
    ]
    shown = table(head, rows, caption="Laws and their counts", numbers=(2, 3, 4, 5, 6))
    return section("Laws", shown, wide=True)


def not_compared(verdict: Verdict) -> Html:
    """What was left out, and why."""
    found: dict[str, list[LawResult]] = {}
    for law in filter(_missed, verdict.laws):
        found.setdefault(law.name if law.left_out else law.note or law.outcome, []).append(law)
    rows = [
        joined([tag("dt", ", ".join(law.name for law in laws)), tag("dd", laws[0].note or why, _left_out(laws[0]))])
        for why, laws in found.items()
    ]
    everything = tag("p", "Everything that the laws name was compared.")
    return section("Not compared, and why", tag("dl", *rows) if rows else everything)


def _missed(law: LawResult) -> bool:
    """Whether something that it names was not compared."""
    return bool(law.left_out) or not law.checked


def _left_out(law: LawResult) -> Html | None:
    return (
        more(f"{len(law.left_out)} names", tag("span", ", ".join(law.left_out), class_="names"))
        if law.left_out
        else None
    )


def reasons(verdict: Verdict) -> Html | None:
    """What speaks for the cause: other explanations, what was ruled out, and what is open."""
    others = [tag("li", "; and ".join(f"{cause.kind}: {cause}" for cause in causes)) for causes in verdict.alternatives]
    parts = [
        _list("It may also be", others),
        _list("Ruled out", [tag("li", str(one)) for one in verdict.ruled_out]),
        _list("Open", [tag("li", one) for one in verdict.undecided]),
    ]
    return section("Why", *parts) if any(parts) else None


def _list(title: str, items: Sequence[Html]) -> Html | None:
    return joined([tag("h3", title), tag("ul", *items)]) if items else None


def _why(verdict: Verdict, law: str) -> str:
    notes = [one.note for one in verdict.laws if one.name == law and one.note]
    return notes[0] if notes else "nothing of it was compared"


def _away(one: Compared) -> float:
    return one.error / one.limit if one.limit else one.error


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.9g}"


def _error(one: Compared) -> Html:
    text = "bit for bit" if one.error == 0 else small(one.error)
    return tag("span", text, class_=f"k {step_of(one.error, one.limit)}")

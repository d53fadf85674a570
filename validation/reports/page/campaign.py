"""Many verdicts as one page: a table of all, the slowest and the closest cases, and whole pages of what is no pass."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeproof.core.verdict import Verdict, small
from pipeproof.pipeline.sizes import SHOWN, some
from pipeproof.reports.page.grid import Grid
from pipeproof.reports.page.markup import Html, Part, joined, section, tag
from pipeproof.reports.page.page import grid_of, page, parts, top, whole
from pipeproof.reports.page.sentences import OUTCOMES


@dataclass(frozen=True)
class Entry:
    """One case of a campaign; ``outcome`` is what it says of that, and ``note`` which kind of case it is."""

    verdict: Verdict
    outcome: str
    note: str = ""

    @property
    def worst(self) -> float:
        """The largest error of all its laws."""
        return max((law.worst for law in self.verdict.laws), default=0.0)

    @property
    def closeness(self) -> float | None:
        """The largest error in floors of its law; None where all agree bit for bit."""
        found = [law.worst / law.floor for law in self.verdict.laws if law.worst and law.floor]
        return max(found, default=None)


def campaign(entries: Sequence[Entry], *, said: str, left_out: Mapping[str, str]) -> str:
    """The page of ``entries``; of one, its own. ``said`` sums them up, ``left_out`` says what did not run, and why."""
    if len(entries) == 1 and not left_out and entries[0].outcome == entries[0].verdict.verdict:
        return page(entries[0].verdict)
    counts = Counter(entry.outcome for entry in entries)
    outcome = next((one for one in ("fail", "unknown") if counts[one]), "pass" if entries else "unknown")
    badge = tag("p", tag("span", OUTCOMES[outcome], class_=f"badge {outcome}"), tag("span", said, class_="quiet"))
    wrong = [(k, entry) for k, entry in enumerate(entries) if entry.outcome != "pass"]
    shown, grids = _whole_pages(wrong[:SHOWN])
    body = [
        tag("header", badge, tag("h1", _sentence(entries, counts, len(left_out)))),
        tag("main", _table(entries, {k for k, _ in wrong[:SHOWN]}), *_extremes(entries), _left_out(left_out)),
        *shown,
    ]
    return whole(f"{OUTCOMES[outcome]}: {said}", joined(body), grids)


def _sentence(entries: Sequence[Entry], counts: Counter[str], missing: int) -> str:
    total = counts.total()
    if counts["pass"] == total and total and not missing:
        agree = sum(entry.verdict.verdict == "pass" for entry in entries)
        caught = ", and the planted fault is caught" if agree < total else ""
        many = "The case agrees" if agree == 1 else f"All {agree} cases agree"
        return f"{many} with the reference{caught}."
    parts = [f"{counts['fail']} wrong", f"{counts['unknown']} without a verdict", f"{counts['pass']} right"]
    told = ", ".join(part for part in parts if part[0] != "0") or "nothing"
    return f"Of {some(total, 'case')}: {told}." + (f" {missing} did not run." if missing else "")


def _whole_pages(wrong: Sequence[tuple[int, Entry]]) -> tuple[list[Html], list[Grid]]:
    """The pages of cases, and their grids, whose cells are numbered through."""
    shown, grids, first = [], list[Grid](), 0
    for k, entry in wrong:
        grid = grid_of(entry.verdict)
        inside = [tag("header", *top(entry.verdict, "h2")), tag("main", *parts(entry.verdict, grid, first))]
        shown.append(tag("article", *inside, id=f"case-{k}"))
        if grid is not None:
            grids.append(grid)
            first += sum(map(len, grid.rows))
    return shown, grids


def _table(entries: Sequence[Entry], linked: set[int]) -> Html:
    names = ["outcome", "case", "tier", "compared", "worst error", "÷ floor", "seconds"]
    head = (
        tag("th", tag("button", name, type="button"), scope="col", class_="n" * (k > 2)) for k, name in enumerate(names)
    )
    order = sorted(range(len(entries)), key=lambda k: entries[k].outcome == "pass")
    rows = (_row(k, entries[k], k in linked) for k in order)
    caption = "Every case; choose a heading to sort"
    inside = tag("table", tag("caption", caption), tag("thead", tag("tr", *head)), tag("tbody", *rows))
    shown = tag("div", inside, class_="wide tall", tabindex="0", role="region", aria_label=caption)
    whole_ones = tag("p", "Cases that are links are shown whole below.", class_="quiet") if linked else None
    return section("Cases", shown, whole_ones, wide=True)


def _row(k: int, entry: Entry, linked: bool) -> Html:
    verdict, close = entry.verdict, entry.closeness
    name: Part = tag("a", verdict.config, href=f"#case-{k}") if linked else verdict.config
    note = tag("small", f" {entry.note}") if entry.note else None
    checked = sum(law.checked for law in verdict.laws)
    word = verdict.word if entry.outcome == verdict.verdict else entry.outcome
    return tag(
        "tr",
        tag("td", tag("span", word, class_=f"outcome {entry.outcome}")),
        tag("th", name, note, scope="row"),
        tag("td", verdict.tier),
        _value(checked, str(checked)),
        _value(entry.worst, small(entry.worst)),
        _value(close or 0.0, "-" if close is None else f"{close:.2g}"),
        _value(verdict.seconds, f"{verdict.seconds:.2f}"),
    )


def _value(value: float, text: str) -> Html:
    return tag("td", text, class_="n", data_v=min(value, 1e99))


def _extremes(entries: Sequence[Entry]) -> list[Html]:
    """The cases that took longest, and those of the passed ones that came nearest to a fault."""
    slow = sorted(entries, key=lambda one: -one.verdict.seconds)[:SHOWN]
    near = sorted(
        (one for one in entries if one.closeness and one.verdict.verdict == "pass"),
        key=lambda one: -(one.closeness or 0),
    )
    slowest = [tag("li", f"{one.verdict.seconds:.2f} s: {one.verdict.config}") for one in slow]
    closest = [tag("li", f"{one.closeness:.2g} floors: {one.verdict.config}") for one in near[:SHOWN]]
    exact = tag("p", "Every case that passed did so bit for bit.", class_="quiet")
    return [
        section("Slowest", tag("ol", *slowest)),
        section("Closest", tag("ol", *closest) if closest else exact),
    ]


def _left_out(left_out: Mapping[str, str]) -> Html | None:
    rows = [joined([tag("dt", name), tag("dd", reason)]) for name, reason in left_out.items()]
    return section("Not run, and why", tag("dl", *rows)) if rows else None

"""A verdict as one file of HTML: what is wrong, where, what to do next, and all the numbers that this rests on."""

from collections.abc import Sequence

from pipeproof.core.cause import KINDS, Cause
from pipeproof.core.measured import versions
from pipeproof.core.verdict import SCHEMA, Verdict
from pipeproof.reports.page import sections
from pipeproof.reports.page.grid import Grid
from pipeproof.reports.page.grid_view import cells_told, grid_view
from pipeproof.reports.page.markup import Html, Part, facts, framed, joined, more, section, table, tag, typed
from pipeproof.reports.page.sentences import OUTCOMES, closest, sentence

Configs = Sequence[tuple[str, object, object]]
Rows = Sequence[tuple[str, str]]
_NO_GRID = (
    "Not recorded: nobody noted which actions ran. Stages that watch(module) watches in whitebox.validate note them; "
    "records and check_step do not"
)


def page(verdict: Verdict, *, configs: Configs = (), why: Rows = ()) -> str:
    """The page of one verdict.

    configs: what is different in the configs of two runs, by name. why: the reason of what differs, each part with its
    name.
    """
    grid = grid_of(verdict)
    body = joined([tag("header", *top(verdict)), tag("main", _differences(configs), _why(why), *parts(verdict, grid))])
    return whole(f"{OUTCOMES[verdict.word]}: {verdict.config}", body, [] if grid is None else [grid])


def grid_of(verdict: Verdict) -> Grid | None:
    """What the ranks did, where anybody noted it."""
    ran = verdict.measured.ran
    return None if ran is None else Grid(verdict, ran)


def whole(title: str, body: Html, grids: Sequence[Grid]) -> str:
    """A file: ``body`` with the style, the script, and what that has to tell of ``grids``."""
    return framed(title, body, cells_told(grids))


def top(verdict: Verdict, heading: str = "h1") -> list[Html]:
    """What is read first: the outcome, a sentence, the cause, its place, what to do next, and how to have it again."""
    known = facts([*_of_cause(verdict), *_of_numbers(verdict)])
    said = tag("span", OUTCOMES[verdict.word], class_=f"badge {verdict.verdict}")
    first = tag("p", said, tag("span", f" {verdict.config}", class_="quiet"))
    return [first, tag(heading, sentence(verdict), class_="said"), known, _replay(verdict)]


def _of_cause(verdict: Verdict) -> list[tuple[str, Part]]:
    told: list[tuple[str, Part]] = []
    for number, cause in enumerate(verdict.cause):
        kind = KINDS[cause.kind] if number or verdict.headline else ""  # of the first the heading says it
        told.append(("And" if number else "Cause", joined([tag("b", cause.kind), f": {kind}" if kind else None])))
        told.append(("Place", joined([f"{cause}", _own_line(cause)])))
    told += [("Next", text) for text in verdict.next]
    if verdict.stopped:
        told.append(("Stopped", f"before all was compared: {verdict.stopped}"))
    if verdict.unsought:
        told.append(("Cause", f"not sought: looking for it raised {verdict.unsought}"))
    elif verdict.failure and not verdict.cause:
        told.append(("Next", "Read below where each rank stood."))
    elif verdict.judged and not verdict.cause and (verdict.undecided or verdict.mismatches):
        told.append(("Cause", "; ".join(verdict.undecided) or "unknown"))
    return told


def _own_line(cause: Cause) -> Html | None:
    """The lines of the user's own code, where the cause knows them."""
    lines = [f"{'' if k else 'ran at':<6} {line}" for k, line in enumerate(cause.own_lines())]
    return joined([tag("code", line, class_="line") for line in lines]) if lines else None


def _of_numbers(verdict: Verdict) -> list[tuple[str, Part]]:
    if not verdict.mismatches:
        return [("Numbers", closest(verdict))]
    found, due = verdict.sides
    first, left = verdict.mismatches[0], len(verdict.mismatches) - 1
    told: list[tuple[str, Part]] = [
        ("Where", f"{first.law}: {first.where}{first.later}"),
        (found.title(), first.read(due)),
        (due.title(), f"{first.expected}{first.allowance}"),
    ]
    rest = (tag("li", one.line(due)) for one in verdict.mismatches[1:101])
    also = more(f"{left} more that differ", tag("ul", *rest), f"and {left - 100} more" if left > 100 else None)
    return [*told, ("Then", also)] if left else told


def _replay(verdict: Verdict) -> Html:
    return typed(verdict.replay, named="the replay line")


def parts(verdict: Verdict, grid: Grid | None, first: int = 0) -> list[Html | None]:
    """All below that; the cells of ``grid`` are numbered from ``first`` on."""
    shown = None if grid is None else grid_view(grid, first)
    failed = tag("pre", verdict.failure) if verdict.failure else None
    title = "What is broken" if verdict.verdict == "fail" else "What the ranks did instead"
    instead = section(title, failed, wide=True) if failed else None
    if not any(law.checked for law in verdict.laws):
        return [instead, sections.laws(verdict) if verdict.laws else None, _about(verdict)]
    return [
        instead,
        section("Schedule", shown, wide=True, missing=_NO_GRID),
        sections.coefficients(verdict),
        sections.losses(verdict),
        sections.gradients(verdict),
        sections.norms(verdict),
        sections.reasons(verdict),
        sections.laws(verdict),
        sections.not_compared(verdict),
        _about(verdict),
    ]


def _differences(configs: Configs) -> Html | None:
    rows = [[str(part) or "-" for part in row] for row in configs]
    shown = table(["", "one", "other"], rows, caption="What is different in the configs of the two runs")
    return section("Configs", shown) if rows else None


def _why(rows: Rows) -> Html | None:
    return section("Why", facts(rows, class_="about")) if rows else None


def _about(verdict: Verdict) -> Html:
    """Numbers of the case, what computed, and the verdict as text."""
    known: list[tuple[str, Part]] = [
        ("bindings", verdict.bindings),
        ("tier", "" if verdict.tier == "none" else verdict.tier),
        ("seconds", f"{verdict.seconds:.2f}"),
        *versions().items(),
        ("schema", SCHEMA),
    ]
    text = more("As text", tag("pre", verdict.details))
    trace = more("Traceback", tag("pre", verdict.traceback)) if verdict.traceback else None
    return section("This run", facts(known, class_="about"), text, trace)

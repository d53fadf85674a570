"""All that a verdict says, as text: causes with their lines, what was ruled out, values, laws, and what to type."""

from collections.abc import Iterable, Sequence

from pipeproof.core.cause import KINDS, Cause
from pipeproof.core.findings import Findings, LawResult
from pipeproof.worlds.stack import Line

CAUSES = 3  # causes that hold together, or explanations
_SHOWN = 4  # mismatches; the rest are counted


def details(verdict: Findings) -> str:
    """Everything, a line for each thing; nothing is cut."""
    rows = [f"{verdict.word.upper()} {headline(verdict)}", *_causes(verdict)]
    if verdict.failure:
        rows += [verdict.failure, *_next(verdict)]
    if verdict.mismatches:
        first = verdict.mismatches[0]
        found, due = verdict.sides
        rows.append(f"  where     {first.where}{first.later}")
        values = [(found, first.read(due)), (due, first.expected)]
        (a, one), (b, other) = values if verdict.judged else reversed(values)  # as they were named
        rows += [f"  {a:<9} {one}", f"  {b:<9} {other}{first.allowance}"]
    rows.append(f"  bindings  {verdict.bindings}" if verdict.bindings else f"  case      {verdict.config}")
    rows += [f"  then      {mismatch.line(verdict.sides[1])}" for mismatch in verdict.mismatches[1:_SHOWN]]
    if len(verdict.mismatches) > _SHOWN:
        rows.append(f"  then      and {len(verdict.mismatches) - _SHOWN} more")
    return "\n".join([*rows, *_laws(verdict), f"  replay    {verdict.replay}"])


def headline(verdict: Findings) -> str:
    """What broke, by the laws, or what stood in the way of judging them."""
    if verdict.headline:
        return verdict.headline
    if verdict.failure:
        return "the ranks failed before there was anything to judge"
    if verdict.verdict == "pass":
        return f"{sum(law.checked for law in verdict.laws)} comparisons, {verdict.tier}"
    if verdict.verdict == "unknown" and verdict.stopped:
        return f"not all was compared: {verdict.stopped}"
    broken = [law for law in verdict.laws if law.outcome == verdict.verdict]
    if verdict.verdict == "fail":
        return ", ".join(f"{law.name} ({law.wrong} of {law.checked})" for law in broken)
    return "; ".join(f"{law.name}: {law.note}" if law.note else law.name for law in broken)


def by_note(laws: Sequence[LawResult]) -> list[tuple[str, list[LawResult]]]:
    """``laws`` of which the same is noted, together."""
    found: dict[str, list[LawResult]] = {}
    for law in laws:
        found.setdefault(law.note, []).append(law)
    return [*found.items()]


def _causes(verdict: Findings) -> list[str]:
    told = [cause for cause in verdict.cause if not (verdict.ended and cause.detail in headline(verdict))]
    rows = _conjunction("cause", told)
    for causes in verdict.alternatives[:CAUSES]:
        rows += _conjunction("or", causes)
    if len(verdict.alternatives) > CAUSES:
        rows += _labelled("or", [f"{len(verdict.alternatives) - CAUSES} more explanations"])
    rows += [] if verdict.failure else _next(verdict)
    if verdict.stopped:
        rows += _labelled("stopped", [f"before all was compared: {verdict.stopped}"])
    if verdict.unsought:
        rows += _labelled("cause", [f"not sought: looking for it raised {verdict.unsought}"])
    elif not verdict.cause and (verdict.undecided or (verdict.judged and verdict.verdict == "fail")):
        rows += _labelled("cause", [f"unknown{': the evidence does not decide' if verdict.undecided else ''}"])
    rows += _labelled("found", verdict.cells.lines() if verdict.cells is not None else [])
    return [*rows, *_labelled("open", verdict.undecided), *_labelled("ruled out", map(str, verdict.ruled_out))]


def _next(verdict: Findings) -> list[str]:
    return _labelled("next", verdict.next[:CAUSES])


def _laws(verdict: Findings) -> list[str]:
    """The laws that matter; where any did not pass, those that did, in a line for each note."""
    if verdict.verdict == "pass":
        shown, passed = list(verdict.laws), []
    else:
        shown = [law for law in verdict.laws if law.outcome in ("fail", "unknown")]
        passed = [law for law in verdict.laws if law.outcome == "pass"]
    rows = [law.line(verdict.outcome(law.outcome)) for law in shown]
    for note, alike in by_note(passed):
        compared = f"{', '.join(law.name for law in alike)}: {sum(law.checked for law in alike)} compared"
        rows.append(f"{verdict.outcome('pass'):<18} {', '.join(filter(None, [compared, note]))}")
    missed = [law for law in verdict.laws if passed and law.outcome == "not seen"]
    rows += [f"{'not seen':<18} {', '.join(law.name for law in laws)}: {note}" for note, laws in by_note(missed)]
    return _labelled("laws", rows)


def _conjunction(label: str, causes: Sequence[Cause]) -> list[str]:
    """Causes that hold together; those that there is no room for are counted."""
    rows = []
    shown: set[Line] = set()
    for cause in causes[:CAUSES]:
        rows += _labelled(label, [f"{cause.kind}: {KINDS[cause.kind]}", str(cause)])
        own = {one.line for one in cause.lines}
        rows += _labelled("ran at", cause.own_lines() if not own <= shown else ())
        label, shown = "and", shown | own
    left = len(causes) - CAUSES
    return rows + (_labelled("and", [f"{left} more"]) if left > 0 else [])


def _labelled(label: str, lines: Iterable[str]) -> list[str]:
    """``lines``, with ``label`` at the first."""
    return [f"  {'' if k else label:<9} {line}" for k, line in enumerate(lines)]

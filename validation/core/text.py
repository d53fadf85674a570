"""Verdicts as text: brief, and in full.

A pass takes one line. Others take at most 14 lines, each at most 100 columns: fault, place, user lines, next steps,
compared laws. Beyond that, the least useful lines go first. Commands are never cut, so that users can copy them. The
details omit nothing.
"""

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from pipeproof.core.cause import KINDS, Cause
from pipeproof.core.findings import Findings, LawResult
from pipeproof.core.mismatch import Mismatch, Size, small
from pipeproof.core.observe.stack import Line
from pipeproof.pipeline.sizes import digits, shorten, some

_LINES, _COLUMNS, _LABEL = 14, 100, 14
_WIDTH = _COLUMNS - _LABEL - 2  # room beside a label
# Sections to shorten when a text has too many lines, each with its minimum.
_LEAST: Sequence[tuple[str, int]] = (
    *(("right", 1), ("not compared", 1), ("and", 1), ("ranks", 6), ("mismatch", 1), ("wrong", 1), ("at", 1)),
    *(("stopped", 1), ("cause", 1), ("wrong", 0), ("gradients", 2), ("open", 1), ("shown by", 1), ("try", 1)),
    *(("or", 0), ("", 2)),
)
_TEXTS = {"", "stopped", "cause", "right", "not compared", "wrong", "shown by", "open", "try", "mismatch"}
LISTED = 3  # causes, explanations, later mismatches, or microbatches to print; the rest are counted


def brief(verdict: Findings) -> str:
    """Summarize a verdict for its first reader."""
    if verdict.outcome == "pass":
        missed = [law.name for law in verdict.laws if law.outcome == "not observed"]
        left = f"; not compared: {', '.join(missed)}" if missed else ""
        return f"{verdict.word.upper()} {headline(verdict)}{left}"
    first = _wrap(f"{verdict.word.upper()} {sentence(verdict)}", 5, width=_COLUMNS - 2)
    sections = {"": first} | {label: lines for label, lines in _sections(verdict) if lines}
    for label, least in _LEAST:
        over = sum(map(len, sections.values())) - _LINES
        if over > 0 and label in sections:
            sections[label] = _cut(sections[label], max(least, len(sections[label]) - over), text=label in _TEXTS)
    first = sections.pop("")
    labels = {} if verdict.judged else {"wrong": "different", "right": "same"}
    rows = [
        f"  {'' if k else labels.get(label, label):<{_LABEL}}{line}"
        for label, lines in sections.items()
        for k, line in enumerate(lines)
    ]
    return "\n".join([first[0], *(f"  {one}" for one in first[1:]), *rows])


def sentence(verdict: Findings) -> str:
    """Describe the fault and its place: the first cause, or the broken law."""
    if verdict.causes and verdict.outcome == "fail" and not verdict.failure:
        began = any(one.law == "initial-weights" for one in verdict.mismatches[:1])
        return cause_sentence(verdict.causes[0], before="other weights as the step began: " * began)
    unexplained = verdict.outcome == "fail" and verdict.judged and bool(verdict.mismatches)
    return headline(verdict) + "; the cause is not known" * unexplained


def cause_sentence(cause: Cause, *, before: str = "") -> str:
    """Describe a cause after its stage and rank. ``before``: words between place and cause."""
    stages, ranks, microbatches = cause.numbered
    place = f"{stages} ({ranks})" if stages and ranks else stages or ranks
    few = microbatches if len(cause.microbatches) <= LISTED else ""
    place = ", ".join(filter(None, [place, few, cause.parameter])) or "everywhere"
    times = "" if cause.factor in (None, 1.0) else f" (x{digits(cause.factor)})"
    return f"{place}: {before}{KINDS[cause.kind]}{times}"


def _sections(verdict: Findings) -> Iterator[tuple[str, list[str]]]:
    """Yield labelled sections in reading order."""
    causes = verdict.causes if not verdict.failure else ()
    lines = [one for cause in causes[:1] for one in cause.own_lines()]
    yield "at", [shorten(str(one), _WIDTH) for one in [*lines, *verdict.failed_at][:2]]
    yield "mismatch", [row for one in verdict.mismatches[:1] for row in _wrap(_first(verdict, one))]
    yield "shown by", _wrap(causes[0].detail) if causes else []
    yield "and", [shorten(cause_sentence(one), _WIDTH) for one in causes[1:]]
    sentences = [cause_sentence(one[0]) for one in verdict.alternatives[:1]]
    yield "or", [shorten(one, _WIDTH) for one in sentences if one != sentence(verdict)]
    yield "ranks", [shorten(one, _WIDTH) for one in verdict.ranks or verdict.failure.splitlines()]
    yield "stopped", _wrap(f"{verdict.stopped}, before all was compared" if verdict.stopped else "")
    yield "cause", _wrap(f"not looked for: {verdict.unsought}" if verdict.unsought else "")
    yield "open", [] if causes else [row for one in verdict.undecided[:1] for row in _wrap(one)]
    yield "try", [row for one in verdict.next[:1] for row in _wrap(one, 3)]
    table = verdict.cells.lines() if verdict.cells and verdict.cells.known and not verdict.cells.right else []
    yield "gradients", [shorten(row, _WIDTH) for row in table]
    wrong = [law for law in verdict.laws if law.outcome == "fail"]
    more = causes or verdict.headline or any(law.note for law in wrong)  # otherwise the first line says it
    far = [f", up to {small(law.worst)}" * bool(law.worst) for law in wrong]
    broken = ", ".join(f"{law.name} ({law.wrong} of {law.checked}{most})" for law, most in zip(wrong, far, strict=True))
    notes = dict.fromkeys(law.note for law in wrong if law.note)
    yield "wrong", _wrap("; ".join([broken, *notes])) if more else []
    right = [law for law in verdict.laws if law.outcome == "pass"]
    checked, exact = sum(law.checked for law in right), sum(law.exact for law in right)
    how = "bit for bit" if exact == checked else f"{exact} bit for bit"
    yield "right", _wrap(f"{some(checked, 'comparison')}, {how}: {_names(right)}") if right else []
    others = () if verdict.outcome == "unknown" else ("unknown",)
    missed = by_note([law for law in verdict.laws if law.outcome in ("not observed", *others)])
    yield "not compared", _wrap("; ".join(f"{_names(laws)}: {note}" for note, laws in missed))
    yield "again", [verdict.replay]
    counts = {"difference": verdict.mismatches, "cause": verdict.causes, "explanation": verdict.alternatives}
    every = [some(len(of), what) for what, of in (counts | {"law": verdict.laws}).items() if len(of) > 1]
    rest = ", ".join([*every, *["stacks"] * bool(verdict.ranks)])
    yield "more", [f"{rest}: -v, or verdict.details"] if rest else []


def _first(verdict: Findings, first: Mismatch) -> str:
    """Describe the first mismatch with its place."""
    run, reference = verdict.sides
    observed, expected = (
        f"norm {value.norm:.4g}" if isinstance(value, Size) and value.norm is not None else text
        for value, text in (
            (first.observed, first.text_beside(reference)),
            (first.expected, first.expected_text),
        )
    )
    values = f"{observed}, {reference} {expected}" if verdict.judged else f"{reference} {expected}, {run} {observed}"
    apart = "" if first.error is None else f"; relative error {small(first.error)}"
    rank = "" if first.rank is None else f", rank {first.rank}"
    known = first.action is not None and first.microbatch is not None  # an action's name includes its stage
    where = f"microbatch {first.microbatch} ({first.action}{rank})" if known else first.where
    return f"{where}{first.later}: {values}{apart}"


def _names(laws: Sequence[LawResult]) -> str:
    return ", ".join(law.name for law in laws)


def _wrap(text: str, most: int = 2, *, width: int = _WIDTH) -> list[str]:
    """Wrap ``text`` into at most ``most`` rows, and cut the rest."""
    return _cut(textwrap.wrap(text, width, break_on_hyphens=False), most, text=True)


def _cut(rows: Sequence[str], most: int, *, text: bool) -> list[str]:
    """Keep the first ``most`` rows. ``text``: mark the cut with an ellipsis."""
    if len(rows) <= most or not (text and most):
        return [*rows[:most]]
    last = rows[most - 1]
    return [*rows[: most - 1], f"{last if len(last) <= _WIDTH - 2 else last.rpartition(' ')[0]} …"]


def details(verdict: Findings) -> str:
    """Print the whole verdict, uncut, one item per line."""
    rows = [f"{verdict.word.upper()} {headline(verdict)}", *_causes(verdict)]
    if verdict.failure:
        rows += [verdict.failure, *_label("next", verdict.next[:LISTED])]
    if verdict.mismatches:
        first = verdict.mismatches[0]
        found, expected = verdict.sides
        rows.append(f"  where     {first.where}{first.later}")
        values = [(found, first.text_beside(expected)), (expected, first.expected_text)]
        (a, one), (b, other) = values if verdict.judged else reversed(values)  # in the order of their names
        rows += [f"  {a:<9} {one}", f"  {b:<9} {other}{first.allowance}"]
    rows.append(f"  bindings  {verdict.bindings}" if verdict.bindings else f"  case      {verdict.config}")
    later = verdict.mismatches[1:]
    rows += [f"  then      {mismatch.line(verdict.sides[1])}" for mismatch in later[:LISTED]]
    if len(later) > LISTED:
        rows.append(f"  then      and {len(later) - LISTED} more")
    return "\n".join([*rows, *_laws(verdict), f"  replay    {verdict.replay}"])


def headline(verdict: Findings) -> str:
    """Name the broken laws, or the obstacle to judging them."""
    if verdict.headline:
        return verdict.headline
    if verdict.failure:
        return "the ranks failed before there was anything to judge"
    if verdict.outcome == "pass":
        return f"{sum(law.checked for law in verdict.laws)} comparisons, {verdict.tier}"
    if verdict.outcome == "unknown" and verdict.stopped:
        return f"not all was compared: {verdict.stopped}"
    broken = [law for law in verdict.laws if law.outcome == verdict.outcome]
    if verdict.outcome == "fail":
        return ", ".join(f"{law.name} ({law.wrong} of {law.checked})" for law in broken)
    return "; ".join(f"{law.name}: {law.note}" if law.note else law.name for law in broken)


def by_note(laws: Sequence[LawResult]) -> list[tuple[str, list[LawResult]]]:
    """Group ``laws`` by note."""
    found: dict[str, list[LawResult]] = {}
    for law in laws:
        found.setdefault(law.note, []).append(law)
    return [*found.items()]


def _causes(verdict: Findings) -> list[str]:
    shown = [cause for cause in verdict.causes if not (verdict.ended and cause.detail in headline(verdict))]
    rows = _conjunction("cause", shown)
    for causes in verdict.alternatives[:LISTED]:
        rows += _conjunction("or", causes)
    if len(verdict.alternatives) > LISTED:
        rows += _label("or", [f"{len(verdict.alternatives) - LISTED} more explanations"])
    rows += [] if verdict.failure else _label("next", verdict.next[:LISTED])
    if verdict.stopped:
        rows += _label("stopped", [f"before all was compared: {verdict.stopped}"])
    if verdict.unsought:
        rows += _label("cause", [f"not sought: looking for it raised {verdict.unsought}"])
    elif not verdict.causes and (verdict.undecided or (verdict.judged and verdict.outcome == "fail")):
        rows += _label("cause", [f"unknown{': the evidence does not decide' if verdict.undecided else ''}"])
    rows += _label("found", verdict.cells.lines() if verdict.cells is not None else [])
    return [*rows, *_label("open", verdict.undecided), *_label("ruled out", map(str, verdict.ruled_out))]


def _laws(verdict: Findings) -> list[str]:
    """Print laws by outcome: failures each, passes grouped by note."""
    if verdict.outcome == "pass":
        shown, passed = list(verdict.laws), []
    else:
        shown = [law for law in verdict.laws if law.outcome in ("fail", "unknown")]
        passed = [law for law in verdict.laws if law.outcome == "pass"]
    rows = [law.line(verdict.word_for(law.outcome)) for law in shown]
    for note, alike in by_note(passed):
        compared = f"{', '.join(law.name for law in alike)}: {sum(law.checked for law in alike)} compared"
        rows.append(f"{verdict.word_for('pass'):<18} {', '.join(filter(None, [compared, note]))}")
    missed = [law for law in verdict.laws if passed and law.outcome == "not observed"]
    rows += [f"{'not observed':<18} {', '.join(law.name for law in laws)}: {note}" for note, laws in by_note(missed)]
    return _label("laws", rows)


def _conjunction(label: str, causes: Sequence[Cause]) -> list[str]:
    """List causes that hold together, and count those beyond the limit."""
    rows = []
    shown: set[Line] = set()
    for cause in causes[:LISTED]:
        rows += _label(label, [f"{cause.kind}: {KINDS[cause.kind]}", str(cause)])
        own = {one.line for one in cause.lines}
        rows += _label("ran at", cause.own_lines() if not own <= shown else ())
        label, shown = "and", shown | own
    left = len(causes) - LISTED
    return rows + (_label("and", [f"{left} more"]) if left > 0 else [])


def _label(label: str, lines: Iterable[str]) -> list[str]:
    """Prefix the first line with ``label``."""
    return [f"  {'' if k else label:<9} {line}" for k, line in enumerate(lines)]

"""A verdict as text: in a few lines, and all of it.

The few lines say what is wrong and where, the user's lines, what to try, and what was compared. A pass is one line. All
else has at most 14 lines of at most 100 columns; where there is more to say, what tells least gives way first. The
command alone is never cut: it is there to be copied. The details leave nothing out.
"""

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from pipeproof.core.cause import KINDS, Cause, Cells, listed
from pipeproof.core.findings import Findings, LawResult
from pipeproof.core.mismatch import Mismatch, Size, Value, small
from pipeproof.core.observe.stack import Line
from pipeproof.pipeline.sizes import digits, shortened, some

_LINES, _COLUMNS, _LABEL = 14, 100, 14
_FEW = 3  # microbatches that a sentence names
_WIDTH = _COLUMNS - _LABEL - 2  # of what stands beside a label
# What gives way where there are too many lines, and how many of its own stay.
_LEAST: Sequence[tuple[str, int]] = (
    *(("right", 1), ("not compared", 1), ("and", 1), ("ranks", 6), ("first seen", 1), ("wrong", 1), ("at", 1)),
    *(("stopped", 1), ("cause", 1), ("wrong", 0), ("gradients", 2), ("open", 1), ("shown by", 1), ("try", 1)),
    *(("or", 0), ("", 2)),
)
_TEXTS = {"", "stopped", "cause", "right", "not compared", "wrong", "shown by", "open", "try", "first seen"}
CAUSES = 3  # causes that hold together, or explanations
_SHOWN = 4  # mismatches; the rest are counted


def brief(verdict: Findings) -> str:
    """What a reader needs first."""
    if verdict.verdict == "pass":
        missed = [law.name for law in verdict.laws if law.outcome == "not seen"]
        left = f"; not compared: {', '.join(missed)}" if missed else ""
        return f"{verdict.word.upper()} {headline(verdict)}{left}"
    first = _wrapped(f"{verdict.word.upper()} {sentence(verdict)}", _COLUMNS - 2, 5)
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
    """What is wrong, with its place: the first cause, or what broke."""
    if verdict.cause and verdict.verdict == "fail" and not verdict.failure:
        began = any(one.law == "initial-weights" for one in verdict.mismatches[:1])
        return cause_sentence(verdict.cause[0], before="other weights as the step began: " * began)
    unexplained = verdict.verdict == "fail" and verdict.judged and bool(verdict.mismatches)
    return headline(verdict) + "; the cause is not known" * unexplained


def cause_sentence(cause: Cause, *, before: str = "") -> str:
    """A cause, after its stage and rank, and after what is to be said ``before`` it."""
    stages = cause.stages or (() if cause.stage is None else (cause.stage,))
    ranks = cause.ranks or (() if cause.rank is None else (cause.rank,))
    of_stages, of_ranks = _numbered("stage", stages), _numbered("rank", ranks)
    place = f"{of_stages} ({of_ranks})" if stages and ranks else of_stages or of_ranks
    microbatches = _numbered("microbatch", cause.microbatches) if len(cause.microbatches) <= _FEW else ""
    place = ", ".join(filter(None, [place, microbatches, cause.parameter])) or "everywhere"
    times = "" if cause.factor in (None, 1.0) else f" (x{digits(cause.factor)})"
    return f"{place}: {before}{KINDS[cause.kind]}{times}"


def _sections(verdict: Findings) -> Iterator[tuple[str, list[str]]]:
    """What there is to say, by label, in the order in which it is read."""
    causes = verdict.cause if not verdict.failure else ()
    lines = [one for cause in causes[:1] for one in cause.own_lines()]
    yield "at", [shortened(str(one), _WIDTH) for one in [*lines, *verdict.failed_at][:2]]
    yield "first seen", [row for one in verdict.mismatches[:1] for row in _wrapped(_first(verdict, one), _WIDTH)]
    yield "shown by", _wrapped(causes[0].detail, _WIDTH) if causes else []
    yield "and", [shortened(cause_sentence(one), _WIDTH) for one in causes[1:]]
    told = [cause_sentence(one[0]) for one in verdict.alternatives[:1]]
    yield "or", [shortened(one, _WIDTH) for one in told if one != sentence(verdict)]
    yield "ranks", [shortened(one, _WIDTH) for one in verdict.ranks or verdict.failure.splitlines()]
    yield "stopped", _wrapped(f"{verdict.stopped}, before all was compared" if verdict.stopped else "", _WIDTH)
    yield "cause", _wrapped(f"not looked for: {verdict.unsought}" if verdict.unsought else "", _WIDTH)
    yield "open", [] if causes else [row for one in verdict.undecided[:1] for row in _wrapped(one, _WIDTH)]
    yield "try", [row for one in verdict.next[:1] for row in _wrapped(one, _WIDTH, 3)]
    yield "gradients", _matrix(verdict.cells)
    wrong = [law for law in verdict.laws if law.outcome == "fail"]
    more = causes or verdict.headline or any(law.note for law in wrong)  # else the first line has it
    yield "wrong", _wrapped(_differences(wrong), _WIDTH) if more else []
    right = [law for law in verdict.laws if law.outcome == "pass"]
    yield "right", _wrapped(_agreement(right), _WIDTH) if right else []
    others = () if verdict.verdict == "unknown" else ("unknown",)
    missed = by_note([law for law in verdict.laws if law.outcome in ("not seen", *others)])
    yield "not compared", _wrapped("; ".join(f"{_names(laws)}: {note}" for note, laws in missed), _WIDTH)
    yield "again", [verdict.replay]
    rest = _rest(verdict)
    yield "more", [f"{rest}: -v, or verdict.details"] if rest else []


def _first(verdict: Findings, first: Mismatch) -> str:
    """Where a difference was first observed, and which."""
    found, due = verdict.sides
    seen, expected = _short(first.found, first.read(due)), _short(first.due, first.expected)
    values = f"{seen}, {due} {expected}" if verdict.judged else f"{due} {expected}, {found} {seen}"
    apart = "" if first.error is None else f"; relative error {small(first.error)}"
    rank = "" if first.rank is None else f", rank {first.rank}"
    known = first.action is not None and first.microbatch is not None  # an action has the stage in its name
    where = f"microbatch {first.microbatch} ({first.action}{rank})" if known else first.where
    return f"{where}{first.later}: {values}{apart}"


def _short(value: Value, text: str) -> str:
    """How a value reads where there is little room: of a tensor its norm alone, else its ``text``."""
    return text if not isinstance(value, Size) or value.norm is None else f"norm {value.norm:.4g}"


def _matrix(cells: Cells | None) -> list[str]:
    """What gradients are made of: a row for each stage, or for those that are alike."""
    if cells is None or cells.right or not cells.told:
        return []
    return [shortened(row, _WIDTH) for row in cells.lines()]


def _differences(laws: Sequence[LawResult]) -> str:
    """Which laws are broken, and by how much."""
    worst = [f", up to {small(law.worst)}" * bool(law.worst) for law in laws]
    told = ", ".join(f"{law.name} ({law.wrong} of {law.checked}{far})" for law, far in zip(laws, worst, strict=True))
    return "; ".join([told, *dict.fromkeys(law.note for law in laws if law.note)])


def _agreement(laws: Sequence[LawResult]) -> str:
    """Which laws hold, by how many comparisons."""
    checked, exact = sum(law.checked for law in laws), sum(law.exact for law in laws)
    how = "bit for bit" if exact == checked else f"{exact} bit for bit"
    return f"{some(checked, 'comparison')}, {how}: {_names(laws)}"


def _names(laws: Sequence[LawResult]) -> str:
    return ", ".join(law.name for law in laws)


def _rest(verdict: Findings) -> str:
    """What the details have besides."""
    counts = {
        "difference": len(verdict.mismatches),
        "cause": len(verdict.cause),
        "explanation": len(verdict.alternatives),
        "law": len(verdict.laws),
    }
    told = [some(count, what) for what, count in counts.items() if count > 1]
    return ", ".join([*told, *(["stacks"] if verdict.ranks else [])])


def _wrapped(text: str, width: int, most: int = 2) -> list[str]:
    """``text`` in at most so many rows; what does not fit is cut."""
    rows = textwrap.wrap(text, width, break_on_hyphens=False)
    return _cut(rows, most, text=True)


def _cut(rows: Sequence[str], most: int, *, text: bool) -> list[str]:
    """The first of ``rows``, where there are too many; in a ``text`` with a sign of that."""
    if len(rows) <= most or not (text and most):
        return [*rows[:most]]
    last = rows[most - 1]
    return [*rows[: most - 1], f"{last if len(last) <= _WIDTH - 2 else last.rpartition(' ')[0]} …"]


def _numbered(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{('es' if what.endswith('ch') else 's') * (len(numbers) > 1)} {listed(numbers)}" if numbers else ""


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

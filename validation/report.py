"""A verdict in words: one line for a table, or one screen that says where, what was seen, what was expected, what next."""

from collections.abc import Sequence

from validation.case import Case
from validation.verdict import Law, Mismatch, Verdict

_SHOWN = 6  # mismatches of a screen; the rest are counted

HEADER = (
    f"{'schedule':<12} {'model':<9} {'P':>2} {'V':>2} {'M':>3}  {'split':<16} {'losses':>6} {'params':>6}  "
    f"{'tier':<8} {'worst err':>9} {'floor':>8} {'norm err':>9}  {'verdict':<8} {'time':>7}"
)


def line(case: Case, verdict: Verdict) -> str:
    """One line of the table under ``HEADER``.

    losses and params are how many were compared over the whole plan; worst err and norm err are relative, 0 where
    every bit agreed; floor is the largest that rounding alone made on this run.
    """
    losses, gradients, norm = (verdict.law(name) for name in ("loss", "gradient", "grad-norm"))
    split = ",".join(map(str, case.split))
    split = split if len(split) <= 16 else f"{split[:15]}…"
    return (
        f"{case.schedule:<12} {case.model:<9} {case.ranks:>2} {case.virtual:>2} {case.microbatches:>3}  {split:<16} "
        f"{losses.checked:>6} {gradients.checked:>6}  {verdict.tier:<8} {_small(gradients.worst):>9} "
        f"{_small(verdict.floor):>8} {_small(norm.worst):>9}  {verdict.verdict:<8} {verdict.seconds:>5.1f} s"
    )


def screen(verdict: Verdict) -> str:
    """All that a reader of a failure needs, on one screen."""
    rows = [f"{verdict.verdict.upper()} {_headline(verdict)}", f"  case      {verdict.config}"]
    if verdict.mismatches:
        first = verdict.mismatches[0]
        rows += [
            f"  where     {first.where}; operation {first.operation} of the plan",
            f"  seen      {first.seen}",
            f"  expected  {first.expected}" + _allowed(first),
        ]
    rows += [f"  then      {_brief(mismatch)}" for mismatch in verdict.mismatches[1:_SHOWN]]
    if len(verdict.mismatches) > _SHOWN:
        rows.append(f"  then      and {len(verdict.mismatches) - _SHOWN} more")
    rows += [f"  {'laws' if k == 0 else '':<9} {_law(law)}" for k, law in enumerate(verdict.laws)]
    rows.append(f"  replay    {verdict.replay}")
    return "\n".join(rows)


def summary(verdicts: Sequence[Verdict]) -> str:
    """The last line of a table."""
    counts = {outcome: sum(v.verdict == outcome for v in verdicts) for outcome in ("pass", "fail", "unknown")}
    bitwise = sum(v.tier == "bitwise" for v in verdicts)
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count or outcome == "pass")
    return f"{said}; {bitwise} of {len(verdicts)} bit for bit"


def _headline(verdict: Verdict) -> str:
    broken = [law for law in verdict.laws if law.outcome == verdict.verdict]
    if verdict.verdict == "pass":
        return f"{sum(law.checked for law in verdict.laws)} comparisons, {verdict.tier}"
    notes = (f"{law.name}: {law.note}" if law.note else f"{law.name}" for law in broken)
    return "; ".join(notes) if verdict.verdict == "unknown" else ", ".join(law.name for law in broken)


def _law(law: Law) -> str:
    exact = f"{law.checked} compared, {law.exact} bit for bit" if law.checked else ""
    worst = f"worst {_small(law.worst)}" if law.worst else ""
    details = ", ".join(text for text in (exact, worst, law.note) if text)
    return f"{law.name:<18} {law.outcome:<14} {details}".rstrip()


def _brief(mismatch: Mismatch) -> str:
    return f"{mismatch.law}: {mismatch.where}: {mismatch.seen} (expected {mismatch.expected})"


def _allowed(mismatch: Mismatch) -> str:
    if mismatch.error is None or mismatch.limit is None:
        return ""
    return f"; relative error {_small(mismatch.error)}, rounding allows {_small(mismatch.limit)}"


def _small(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"

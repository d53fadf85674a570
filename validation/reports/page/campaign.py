"""Many verdicts as one page: a table of all, the slowest and the closest cases, and whole pages of what is no pass."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeproof.core.verdict import Verdict, small
from pipeproof.pipeline.sizes import SHOWN, some
from pipeproof.reports.page.page import page, whole


@dataclass(frozen=True)
class Entry:
    """One case of a campaign; ``outcome`` is what it says of that, and ``note`` which kind of case it is."""

    verdict: Verdict
    outcome: str
    note: str = ""

    @property
    def word(self) -> str:
        """The outcome as a reader meets it."""
        return self.verdict.word if self.outcome == self.verdict.verdict else self.outcome

    @property
    def closeness(self) -> float | None:
        """The largest error in floors of its law; None where all agree bit for bit."""
        found = [law.worst / law.floor for law in self.verdict.laws if law.worst and law.floor]
        return max(found, default=None)

    @property
    def numbers(self) -> list[tuple[float, str]]:
        """What was compared, the largest error, the same in floors, and seconds: each to sort by, and as text."""
        checked = sum(law.checked for law in self.verdict.laws)
        worst = max((law.worst for law in self.verdict.laws), default=0.0)
        close, seconds = self.closeness, self.verdict.seconds
        floors = (0.0, "-") if close is None else (close, f"{close:.2g}")
        told = [(checked, str(checked)), (worst, small(worst)), floors, (seconds, f"{seconds:.2f}")]
        return [(min(number, 1e99), text) for number, text in told]


def campaign(entries: Sequence[Entry], *, said: str, left_out: Mapping[str, str]) -> str:
    """The page of ``entries``; of one, its own. ``said`` sums them up, ``left_out`` says what did not run, and why."""
    if len(entries) == 1 and not left_out and entries[0].outcome == entries[0].verdict.verdict:
        return page(entries[0].verdict)
    counts = Counter(entry.outcome for entry in entries)
    outcome = next((one for one in ("fail", "unknown") if counts[one]), "pass" if entries else "unknown")
    wrong = [(k, entry.verdict) for k, entry in enumerate(entries) if entry.outcome != "pass"]
    near = [one for one in entries if one.closeness and one.verdict.verdict == "pass"]
    return whole(
        "campaign.html",
        f"{outcome.title()}: {said}",
        dict(wrong[:SHOWN]),
        said=said,
        outcome=outcome,
        sentence=_sentence(entries, counts, len(left_out)),
        entries=sorted(enumerate(entries), key=lambda pair: pair[1].outcome == "pass"),
        slowest=sorted(entries, key=lambda one: -one.verdict.seconds)[:SHOWN],
        closest=sorted(near, key=lambda one: -(one.closeness or 0))[:SHOWN],
        left_out=left_out,
    )


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

"""Pytest's ``whitebox`` fixture: a ``WhiteBox`` that tracks which verdicts a test has read."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from pipeproof.core.verdict import Verdict
from pipeproof.whitebox.rank import Step
from pipeproof.whitebox.validator import WhiteBox

# Fields that reveal the outcome; other properties, text and truth derive from them.
_TELLING = frozenset(
    "outcome tier laws mismatches causes alternatives undecided failure headline stopped ended".split()
)


class FixtureVerdict(Verdict):
    """A verdict that remembers its readers."""

    def __getattribute__(self, name: str) -> Any:
        if name in _TELLING:
            super().__getattribute__("__dict__")["looked_at"] = True
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        """Return the first line, for pytest's assertion report."""
        return f"<Verdict {str(self).partition(chr(10))[0]}>"

    def __eq__(self, other: object) -> bool:
        """Compare as verdicts, read or unread."""
        return isinstance(other, Verdict) and _plain(self) == _plain(other)

    __hash__ = Verdict.__hash__


def _plain(verdict: Verdict) -> Verdict:
    return Verdict(**{one.name: getattr(verdict, one.name) for one in fields(verdict)})


@dataclass(frozen=True)
class FixtureBox(WhiteBox):
    """Validates on a test's ranks; ``handed_out`` lists its unread verdicts in order, ``verdicts`` all of them.

    ``ranks``: the number that a marker gives. ``failed``: verdicts that failed the test unread.

    mutate: ``pipeproof.whitebox.mutate`` on these ranks, passed in by the plugin, as rooms know no wings.
    """

    mutate: Callable[..., Any] = field(kw_only=True, repr=False, compare=False)
    ranks: int | None = None
    handed_out: list[FixtureVerdict] = field(default_factory=list, repr=False, compare=False)
    verdicts: list[Verdict] = field(default_factory=list, repr=False, compare=False)
    failed: list[Verdict] = field(default_factory=list, repr=False, compare=False)

    def validate(self, step: Step, **given: Any) -> Verdict:
        """As ``WhiteBox.validate``; without ``ranks`` on as many as the test's marker says."""
        return super().validate(step, **({} if self.ranks is None else {"ranks": self.ranks}) | given)

    def hand_out(self, verdict: Verdict) -> Verdict:
        """Return a tracked verdict: unless it passes, the test must read it."""
        self.verdicts.append(_plain(verdict))
        watched = FixtureVerdict(**vars(_plain(verdict)))
        self.handed_out.append(watched)
        return watched

    def take_told(self) -> list[Verdict]:
        """The verdicts that failed the test unread; once."""
        failed = [*self.failed]
        self.failed.clear()
        return failed

    def unread(self) -> list[Verdict]:
        """Return unread verdicts other than passes, once."""
        found = [verdict for verdict in self.handed_out if "looked_at" not in vars(verdict)]
        self.handed_out.clear()
        unread: list[Verdict] = [verdict for verdict in found if not verdict]
        self.failed.extend(unread)
        return unread

"""What pytest's fixture ``whitebox`` is: a ``WhiteBox`` that knows which of its verdicts a test has looked at."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from pipeproof.core.verdict import Verdict
from pipeproof.whitebox.validator import WhiteBox

# What of a verdict says whether it is a pass; its other properties, its text and its truth are made of these.
_TELLING = frozenset("verdict tier laws mismatches cause alternatives undecided failure headline stopped ended".split())


class FixtureVerdict(Verdict):
    """A verdict that remembers whether anybody looked at it."""

    def __getattribute__(self, name: str) -> Any:
        if name in _TELLING:
            super().__getattribute__("__dict__")["looked_at"] = True
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        """Its first line, for what pytest says of an assertion."""
        return f"<Verdict {str(self).partition(chr(10))[0]}>"

    def __eq__(self, other: object) -> bool:
        """As a verdict: what a test has looked at makes no difference."""
        return isinstance(other, Verdict) and _plain(self) == _plain(other)

    __hash__ = Verdict.__hash__


def _plain(verdict: Verdict) -> Verdict:
    return Verdict(**{one.name: getattr(verdict, one.name) for one in fields(verdict)})


@dataclass(frozen=True)
class FixtureBox(WhiteBox):
    """Validates on the ranks of a test; ``handed_out`` are its verdicts, in order.

    ``mutate`` is ``pipeproof.whitebox.mutate`` on these ranks, which the plugin gives: no wing is known here.
    """

    mutate: Callable[..., Any] = field(kw_only=True, repr=False, compare=False)
    handed_out: list[FixtureVerdict] = field(default_factory=list, repr=False, compare=False)

    def hand_out(self, verdict: Verdict) -> Verdict:
        """``verdict``, which from now on has to be looked at unless it is a pass."""
        watched = FixtureVerdict(**vars(_plain(verdict)))
        self.handed_out.append(watched)
        return watched

    def unread(self) -> list[Verdict]:
        """The verdicts that are no pass and that were not looked at; they are told once."""
        found = [verdict for verdict in self.handed_out if "looked_at" not in vars(verdict)]
        self.handed_out.clear()
        return [verdict for verdict in found if not verdict]

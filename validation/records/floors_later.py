"""Comparisons that wait for floors: what rounding does is measured once bits differ, and not before."""

from collections.abc import Callable, Mapping

from torch import Tensor

from pipeproof.core.ledger import Ledger
from pipeproof.core.tolerance import same_bits
from pipeproof.worlds.accelerator import CPU


class FloorsLater:
    """The comparisons of a step, each made at once as long as all are bit for bit; then the rest waits, in its order.

    wait: whether floors can be asked for later. Else every comparison is made at once.
    """

    def __init__(self, *, wait: bool) -> None:
        self._wait = wait
        self._entries: list[Callable[[], None]] = []

    def asks(self, ledger: Ledger) -> bool:
        """Whether anything waits for floors, or those in ``ledger`` that were made at once are not all bit for bit."""
        return self._wait and (bool(self._entries) or not ledger.all_exact)

    def enter(self, entry: Callable[[], None], *, exact: bool = True) -> None:
        """Make an ``entry`` now or later. ``exact``: no floor decides on it."""
        if self._wait and (self._entries or not exact):
            self._entries.append(entry)
        else:
            entry()

    def gradient(
        self, name: str, seen: Tensor | None, due: Mapping[str, Tensor | None], entry: Callable[[Tensor | None], None]
    ) -> None:
        """As ``enter``, of a gradient. If it waits and is not what is ``due``, a copy of it is on the host."""
        wanted = due[name] if self._wait and seen is not None else None
        same = seen is not None and wanted is not None and same_bits(seen.detach(), wanted)
        exact = same or seen is None or wanted is None
        if seen is None or not self._wait or not (self._entries or not exact):
            self.enter(lambda: entry(seen))
        elif same:
            self.enter(lambda: entry(due[name]))
        else:
            kept = seen.detach().to(CPU, copy=True)
            self.enter(lambda: entry(kept), exact=exact)

    def settled(self) -> list[Callable[[], None]]:
        """All that waited, for floors are known now: what is entered from here on does not wait."""
        self._wait, entries, self._entries = False, self._entries, []
        return entries

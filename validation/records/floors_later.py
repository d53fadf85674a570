"""Comparisons that wait for floors: rounding gets measured only after bits differ."""

from collections.abc import Callable, Mapping

from torch import Tensor

from pipeproof.core.ledger import Ledger
from pipeproof.core.tolerance import same_bits
from pipeproof.worlds.accelerator import CPU


class FloorsLater:
    """Comparisons of a step, each immediate until bits differ; then the rest waits, in order.

    wait: floors can be measured later. Else every comparison is immediate.
    """

    def __init__(self, *, wait: bool) -> None:
        self._wait = wait
        self._entries: list[Callable[[], None]] = []

    def asks(self, ledger: Ledger) -> bool:
        """True if an entry waits for floors, or an immediate one in ``ledger`` differs in bits."""
        return self._wait and (bool(self._entries) or not ledger.all_exact)

    def enter(self, entry: Callable[[], None], *, exact: bool = True) -> None:
        """Make an ``entry`` now or later. ``exact``: no floor decides it."""
        if self._wait and (self._entries or not exact):
            self._entries.append(entry)
        else:
            entry()

    def gradient(
        self,
        name: str,
        observed: Tensor | None,
        expected: Mapping[str, Tensor | None],
        entry: Callable[[Tensor | None], None],
    ) -> None:
        """Enter a gradient. If it waits and differs from ``expected``, keep a copy on the host."""
        wanted = expected[name] if self._wait and observed is not None else None
        same = observed is not None and wanted is not None and same_bits(observed.detach(), wanted)
        exact = same or observed is None or wanted is None
        if observed is None or not self._wait or not (self._entries or not exact):
            self.enter(lambda: entry(observed))
        elif same:
            self.enter(lambda: entry(expected[name]))
        else:
            kept = observed.detach().to(CPU, copy=True)
            self.enter(lambda: entry(kept), exact=exact)

    def settle(self) -> list[Callable[[], None]]:
        """Return the waiting entries, now with floors: later entries are immediate."""
        self._wait, entries, self._entries = False, self._entries, []
        return entries

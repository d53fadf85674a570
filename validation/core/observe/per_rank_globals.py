"""Process-wide Python state that each rank needs for itself, where ranks share a process.

A real rank has its own process, so observers keep state in modules and patch torch functions. In a simulated world
ranks take turns, and each must find its state as it left it.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_Fresh = Callable[[Any], Any]


@dataclass(frozen=True)
class Belonging:
    """A rank's own attribute on a module, class or object.

    fresh: makes a new rank's initial value. first: value at registration. within: the holder's raw attributes, since
    getattr would bind them.
    """

    holder: Any
    name: str
    fresh: _Fresh
    first: Any
    within: Mapping[str, Any]

    @property
    def value(self) -> Any:
        """The current value."""
        return self.within[self.name]

    def put(self, value: Any) -> None:
        """Assign ``value``, if different."""
        if self.within[self.name] is not value:
            setattr(self.holder, self.name, value)


_known: dict[tuple[int, str], Belonging] = {}
_awaited: dict[str, Callable[[], None]] = {}
_shared = False


@contextmanager
def share_process() -> Iterator[None]:
    """Mark the process as shared by several ranks, inside the context."""
    global _shared
    _shared = True
    try:
        yield
    finally:
        _shared = False


def ranks_share_process() -> bool:
    """True if simulated ranks share this process."""
    return _shared


def belongs_to_rank(holder: Any, *names: str, fresh: _Fresh) -> None:
    """Register attributes on ``holder`` (a class, object, module or module name) as a rank's own."""
    found = sys.modules[holder] if isinstance(holder, str) else holder
    within = vars(found)
    for name in names:
        _known[id(found), name] = Belonging(found, name, fresh, within[name], within)


def once_imported(module: str, name_them: Callable[[], None]) -> None:
    """Call ``name_them``, which registers attributes, after ``module`` gets imported."""
    _awaited[module] = name_them


def belongings() -> tuple[Belonging, ...]:
    """Return all registered attributes."""
    for module in [one for one in _awaited if one in sys.modules]:
        _awaited.pop(module)()
    return tuple(_known.values())

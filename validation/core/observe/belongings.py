"""What Python keeps once for a process and belongs to a rank, so that ranks which share a process each have their own.

A real rank has a process of its own, so observers keep what they know in modules and put functions of theirs in place
of torch's. In a simulated world ranks take turns, and whoever gets the turn finds all of this as it left it.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_Fresh = Callable[[Any], Any]


@dataclass(frozen=True)
class Belonging:
    """An attribute of a module, a class or an object.

    ``fresh`` makes of the process's value what a new rank begins with. ``first``: the value when it was named.
    ``within``: the attributes of ``holder``, of which getattr's would not bind when put back.
    """

    holder: Any
    name: str
    fresh: _Fresh
    first: Any
    within: Mapping[str, Any]

    @property
    def value(self) -> Any:
        """As it is now."""
        return self.within[self.name]

    def put(self, value: Any) -> None:
        """Change it, where it is another."""
        if self.within[self.name] is not value:
            setattr(self.holder, self.name, value)


_known: dict[tuple[int, str], Belonging] = {}
_awaited: dict[str, Callable[[], None]] = {}
_shared = False


@contextmanager
def shared_process() -> Iterator[None]:
    """While this is open, several ranks are in this process."""
    global _shared
    _shared = True
    try:
        yield
    finally:
        _shared = False


def ranks_share_process() -> bool:
    """Whether other ranks are in this process: they are simulated."""
    return _shared


def belongs_to_rank(holder: Any, *names: str, fresh: _Fresh) -> None:
    """Say that attributes of ``holder``, a class, an object, a module or a module's name, are a rank's own."""
    found = sys.modules[holder] if isinstance(holder, str) else holder
    within = vars(found)
    for name in names:
        _known[id(found), name] = Belonging(found, name, fresh, within[name], within)


def once_imported(module: str, name_them: Callable[[], None]) -> None:
    """Call ``name_them``, which names what belongs to a rank, as soon as somebody has imported ``module``."""
    _awaited[module] = name_them


def belongings() -> tuple[Belonging, ...]:
    """All that have been named so far."""
    for module in [one for one in _awaited if one in sys.modules]:
        _awaited.pop(module)()
    return tuple(_known.values())

"""Extension points: contributions from wings and other packages, found by name and loaded on first use.

Each extensible room asks for its point by name: ``extensions("faults")``. Wings contribute through ``wings.GIVEN``;
other packages through the entry point group ``pipeproof.faults`` in their own pyproject.toml. So only wings import
wings, and a removed wing is merely an unknown name.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from pipeproof.wings import GIVEN


@cache
def extensions(point: str) -> Mapping[str, Any]:
    """Return contributions at ``point``, by name."""
    return MappingProxyType({one.name: one.load() for one in _entries(point)})


@cache
def extension(point: str, name: str) -> Any | None:
    """Return the contribution called ``name`` at ``point``, or None. Loads no other."""
    return next((one.load() for one in _entries(point) if one.name == name), None)


@cache
def names(point: str) -> tuple[str, ...]:
    """Return contribution names at ``point`` without loading them."""
    return tuple(one.name for one in _entries(point))


def _entries(point: str) -> Iterator[EntryPoint]:
    """Yield contributions whose module exists."""
    group = f"pipeproof.{point}"
    own = [EntryPoint(name, value, group) for name, value in GIVEN.get(point, {}).items()]
    return (one for one in [*own, *entry_points(group=group)] if _is_there(one.module))


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False

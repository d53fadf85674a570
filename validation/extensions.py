"""Extension points: what wings, and other packages, give to the rest, found by name and loaded on first use.

Whatever can be extended has a point with a name, and asks for it: ``extensions("faults")``. Wings give what stands in
``wings.GIVEN``; other packages give entry points of the group ``pipeproof.faults``, which each lists in its own
pyproject.toml. So nothing outside of a wing imports it, and a wing that was taken away is a name that is not known.
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
    """What is given at ``point``, by name."""
    return MappingProxyType({one.name: one.load() for one in _given(point)})


@cache
def extension(point: str, name: str) -> Any | None:
    """What is given at ``point`` under this ``name``; None where nothing is. Nothing else is loaded."""
    return next((one.load() for one in _given(point) if one.name == name), None)


@cache
def names(point: str) -> tuple[str, ...]:
    """The names that are given at ``point``; nothing of them is loaded."""
    return tuple(one.name for one in _given(point))


def _given(point: str) -> Iterator[EntryPoint]:
    """What is given there, but for what is of a wing, or of a package, that is not there."""
    group = f"pipeproof.{point}"
    own = [EntryPoint(name, value, group) for name, value in GIVEN.get(point, {}).items()]
    return (one for one in [*own, *entry_points(group=group)] if _is_there(one.module))


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False

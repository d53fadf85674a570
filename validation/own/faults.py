"""Extension point ``faults``: changes to plant in a case's step, by composition, and lookup by name.

A case names its change, and each rank looks it up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pipeproof.core.observe.wrappers import Steps
from pipeproof.extensions import extensions
from pipeproof.own.case import Case
from pipeproof.pipeline.program import Program
from pipeproof.pipeline.schedules import nearest
from pipeproof.pipeline.step import Parts
from pipeproof.pipeline.transports import Transport
from pipeproof.reference.data import Batch

Plant = Callable[[Parts], Parts]
Feed = Callable[[Sequence[Batch], Parts], Sequence[Batch]]
Drive = Callable[[Steps], Steps]
Reorder = Callable[[Program], Program]
T = TypeVar("T")


class SpecimenError(ValueError):
    """Raised for unknown or impossible specimens."""


def pass_on(what: T, about: object = None) -> T:
    """Return the argument: plants nothing."""
    return what


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change to a step, invisible to the runtime; this base changes nothing.

    plant: changes a rank's parts. feed: changes its microbatches. drive: changes how steps run. reorder: changes the
    program. timeout_s: bounds waits that can never end.
    """

    name: str = ""
    plant: Plant = pass_on
    feed: Feed = pass_on
    drive: Drive = pass_on
    reorder: Reorder = pass_on
    timeout_s: float | None = None

    @property
    def smallest(self) -> str:
        """Replay line for the smallest revealing case, without the change."""
        return ""

    def missing(self, case: Case, transport: Transport | None = None) -> str:
        """Return why ``case`` cannot reveal the change; empty if it can. ``transport``: None on real ranks."""
        return ""

    def hidden(self, room: int) -> str:
        """Return why a run with ``room`` bytes for messages passes nevertheless; empty if room is irrelevant."""
        return ""


class Faults(Protocol):
    """An extension's changes by name, including those registered by user files."""

    @property
    def files(self) -> tuple[str, ...]:
        """Loaded files."""

    @property
    def names(self) -> Sequence[str]:
        """Names for suggestions."""

    def load(self, path: str, /) -> object:
        """Read a file once. Raises ``SpecimenError``."""

    def find(self, name: str, /) -> Change | None:
        """Return the change called ``name``, if any."""


def specimen(name: str) -> Change:
    """Return the change called ``name``; an empty name plants nothing. Raises ``SpecimenError`` if unknown."""
    found: Change | None = None if name else Change()
    for faults in extensions("faults").values() if name else ():
        found = found or faults.find(name)
    if found is None:
        raise unknown(name)
    return found


def unknown(name: str) -> SpecimenError:
    """Return an error with the nearest name."""
    names = [one for faults in extensions("faults").values() for one in faults.names]
    others = "pipeproof mutate --list prints all; one of your own needs --plugin FILE"
    return SpecimenError(f"unknown specimen {name!r}: {nearest(name, names)}{others}")


Files = tuple[tuple[str, str], ...]  # user files by extension


def files_behind(name: str) -> Files:
    """Return files that ranks must read before a lookup; none for an empty name."""
    given = extensions("faults").items() if name else ()
    return tuple((by, file) for by, faults in given for file in faults.files)


def read(files: Files) -> None:
    """Read files loaded in another process."""
    for by, file in files:
        extensions("faults")[by].load(file)

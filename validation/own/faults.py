"""The extension point ``faults``: what is planted in a case's step, by composition alone, and where its name is known.

A case names what is planted in it, and every rank looks that up for itself.
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
    """A specimen that does not exist, or cannot be."""


def unchanged(what: T, about: object = None) -> T:
    """Plants nothing: what passes is passed on."""
    return what


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change to a step, which nothing in the runtime knows of; as it is here, none.

    ``plant`` changes the parts of a rank's step; ``feed`` the microbatches that this rank is given; ``drive`` how steps
    are taken; ``reorder`` the program. ``timeout_s`` bounds the waits of ranks that can never end.
    """

    name: str = ""
    plant: Plant = unchanged
    feed: Feed = unchanged
    drive: Drive = unchanged
    reorder: Reorder = unchanged
    timeout_s: float | None = None

    @property
    def smallest(self) -> str:
        """The line of the smallest case that shows what it does, without it."""
        return ""

    def missing(self, case: Case, transport: Transport | None = None) -> str:
        """Why ``case`` cannot show it; empty if it can. ``transport``: that of simulated ranks; None on real ones."""
        return ""

    def hidden(self, room: int) -> str:
        """Why a run with this room for messages, in bytes, passes all the same; empty if room changes nothing."""
        return ""


class Faults(Protocol):
    """What an extension gives: changes by name, also those that files of a user's own register."""

    @property
    def files(self) -> tuple[str, ...]:
        """The files that were read."""

    @property
    def names(self) -> Sequence[str]:
        """What a user may have meant."""

    def load(self, path: str, /) -> object:
        """Read a file once. Raises ``SpecimenError``."""

    def named(self, name: str, /) -> Change | None:
        """The change of that name, if there is one."""


def specimen(name: str) -> Change:
    """What is planted by ``name``; the empty one plants nothing. Raises ``SpecimenError`` for an unknown one."""
    found: Change | None = None if name else Change()
    for faults in extensions("faults").values() if name else ():
        found = found or faults.named(name)
    if found is None:
        raise unknown(name)
    return found


def unknown(name: str) -> SpecimenError:
    """The error that says which is nearest."""
    names = [one for faults in extensions("faults").values() for one in faults.names]
    others = "pipeproof specimens --list prints all; one of your own needs --plugin FILE"
    return SpecimenError(f"unknown specimen {name!r}: {nearest(name, names)}{others}")


Files = tuple[tuple[str, str], ...]  # of users: which extension has read each, by its name


def files_behind(name: str) -> Files:
    """What ranks must read before they look up ``name``; nothing for the empty one."""
    given = extensions("faults").items() if name else ()
    return tuple((by, file) for by, faults in given for file in faults.files)


def read(files: Files) -> None:
    """Read what another process has."""
    for by, file in files:
        extensions("faults")[by].load(file)

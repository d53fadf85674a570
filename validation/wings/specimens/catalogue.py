"""All specimens by name: the tables of ``families``, and what files of a user's own register.

catalogue.csv describes each: its family, classes of reports, one such report, and the mistake. The catalogue has the
file's order.
"""

import csv
import re
from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

from pipeproof.core.cause import KINDS
from pipeproof.own.case import Case, CaseError
from pipeproof.own.faults import SpecimenError, unknown
from pipeproof.pipeline.files import cannot_read
from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.pipeline.schedules import list_known
from pipeproof.wings.specimens.families import (
    collectives,
    crossings,
    devices,
    gradients,
    messages,
    microbatches,
    model,
    order,
    races,
    steps,
)
from pipeproof.wings.specimens.specimen import CLASSES, Entry, Specimen, Where

_TABLES = (gradients, microbatches, steps, messages, model, order, devices, races, crossings, collectives)
_NAME = re.compile(r"[a-z][a-z0-9-]*")
_WANTED = "expected Python that calls register(Specimen(...))"
T = TypeVar("T")


@cache
def _read_file() -> Mapping[str, Mapping[str, Any]]:
    """Read each specimen's entry from the file, by name."""
    with Path(__file__).with_name("catalogue.csv").open(encoding="utf-8", newline="") as file:
        return {row["name"]: {**row, "classes": tuple(row["classes"].split())} for row in csv.DictReader(file)}


def describe(rows: Mapping[str, T]) -> Mapping[str, T]:
    """Add the file's entries to ``rows`` of a table, in the catalogue's order."""
    those: Mapping[str, Any] = rows
    found = {name: replace(those[name], **said) for name, said in _read_file().items() if name in those}
    assert found.keys() == rows.keys(), f"catalogue.csv has no {', '.join(sorted(rows.keys() - found.keys()))}"
    return MappingProxyType(found)


_SPECIMENS: Mapping[str, Specimen] = describe(ChainMap(*(table.SPECIMENS for table in _TABLES)))
_CONTROLS: Mapping[str, Entry] = describe(ChainMap(*(getattr(table, "CONTROLS", {}) for table in _TABLES)))


E = TypeVar("E", bound=Entry)


def _show(rows: Mapping[str, E], where: Where) -> Mapping[str, E]:
    return MappingProxyType({name: one for name, one in rows.items() if one.needs.where is where})


_KNOWN = dict(_show(_SPECIMENS, Where.ANYWHERE))  # and what files register
SPECIMENS: Mapping[str, Specimen] = MappingProxyType(_KNOWN)
ON_DEVICES, IN_SIMULATION = _show(_SPECIMENS, Where.DEVICE), _show(_SPECIMENS, Where.SIMULATED)
# Changes without a fault, which must pass.
CONTROLS, DEVICE_CONTROLS, SIMULATED_CONTROLS = (_show(_CONTROLS, where) for where in Where)


class Catalogue:
    """The ``known`` specimens, including registered ones, and ``others`` that show in few places."""

    def __init__(self, known: MutableMapping[str, Specimen], others: Mapping[str, Entry]) -> None:
        self._known = known
        self._others = others
        self._read: dict[str, list[str]] = {}
        self._now: list[str] = []

    @property
    def files(self) -> tuple[str, ...]:
        """Files that ranks must read too."""
        return tuple(self._read)

    @property
    def own(self) -> list[Specimen]:
        """Registered specimens."""
        return [self._known[name] for names in self._read.values() for name in names]

    @property
    def names(self) -> list[str]:
        """Names of all specimens."""
        return [*self._known, *(name for name, one in self._others.items() if isinstance(one, Specimen))]

    def find(self, name: str, /) -> Entry | None:
        """Find a specimen or control by name."""
        return self._known.get(name) or self._others.get(name)

    def register(self, specimen: Specimen) -> Specimen:
        """Register ``specimen`` for planting. Raises ``SpecimenError`` if unsuitable."""
        if why := self._wrong(specimen):
            raise SpecimenError(why)
        self._known[specimen.name] = specimen
        self._now.append(specimen.name)
        return specimen

    def load(self, path: str | Path, /) -> list[str]:
        """Load the file at ``path`` once; return the registered names. Raises ``SpecimenError`` in one sentence."""
        file = str(Path(path).resolve())
        if file not in self._read:
            self._now = []
            try:
                self._run(file)
            except BaseException:
                self._forget(self._now)
                raise
            self._read[file] = self._now
        return self._read[file]

    def unload(self, path: str | Path) -> None:
        """Forget the registrations from the file at ``path``."""
        self._forget(self._read.pop(str(Path(path).resolve()), []))

    def _forget(self, names: Sequence[str]) -> None:
        for name in names:
            del self._known[name]

    def _run(self, file: str) -> None:
        try:
            code = compile(Path(file).read_text(encoding="utf-8"), file, "exec")
        except OSError as error:
            raise SpecimenError(cannot_read(file, error)) from error
        except (SyntaxError, ValueError) as error:
            raise SpecimenError(f"{file} is no Python: {_one_line(error)}; {_WANTED}") from error
        module = ModuleType(f"specimens_in_{Path(file).stem}")
        module.__file__ = file
        try:
            exec(code, vars(module))
        except SpecimenError as error:
            raise SpecimenError(f"{file}: {error}") from error
        except Exception as error:  # the user's own code runs in it
            raise SpecimenError(f"{file} raised {type(error).__name__}: {_one_line(error)}; {_WANTED}") from error
        if not self._now:
            raise SpecimenError(f"{file} registers nothing; {_WANTED}")

    def _wrong(self, specimen: object) -> str:
        """Say why it cannot be registered; empty if it can."""
        if not isinstance(specimen, Specimen):
            return f"register was given a {type(specimen).__name__}: expected a Specimen"
        name, kind = specimen.name, specimen.fault.kind
        strange = [one for one in specimen.classes if one not in CLASSES]
        reasons = (
            (not _NAME.fullmatch(name), f"the name {name!r}: expected small letters, digits and hyphens"),
            (self.find(name) is not None, f"there is a specimen {name!r} already"),
            (not specimen.summary, f"specimen {name!r} has no summary: say what is wrong in it"),
            (kind not in KINDS, f"specimen {name!r} has the fault {kind!r}: {list_known(kind, list(KINDS))}"),
            (bool(strange), f"specimen {name!r} has the classes {', '.join(strange)}: known are {', '.join(CLASSES)}"),
        )
        if wrong := next((reason for wrong, reason in reasons if wrong), ""):
            return wrong
        try:
            why = specimen.needs.missing(Case.parse(specimen.smallest))
        except (CaseError, ScheduleError) as error:
            why = _one_line(error)
        return f"no smallest case has what specimen {name!r} needs: {why}" if why else ""


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


CATALOGUE = Catalogue(_KNOWN, {**CONTROLS, **ON_DEVICES, **DEVICE_CONTROLS, **IN_SIMULATION, **SIMULATED_CONTROLS})
register = CATALOGUE.register


def fault(name: str) -> Specimen:
    """Return the specimen ``name``, a fault."""
    found = CATALOGUE.find(name)
    if not isinstance(found, Specimen):
        raise unknown(name)
    return found

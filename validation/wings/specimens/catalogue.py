"""All specimens by name: the tables of ``families``, and what files of a user's own register.

A table composes each. catalogue.csv has the rest, and its order is the catalogue's: family, classes of reports, one
such report, and the mistake; the truth: kind, law, place, kinds that final gradients cannot tell apart; and the case's
needs. A row without a kind is a control.
"""

import csv
import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple, TypeVar

from pipeproof.core.cause import KINDS
from pipeproof.own.case import Case, CaseError
from pipeproof.own.faults import SpecimenError, unknown
from pipeproof.pipeline.files import cannot_read
from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.pipeline.schedules import list_known
from pipeproof.pipeline.transports import Transport
from pipeproof.wings.specimens.families import (
    by_hand,
    collectives,
    crossings,
    devices,
    gradients,
    messages,
    microbatches,
    model,
    order,
    steps,
)
from pipeproof.wings.specimens.planting import first, last, middle, second
from pipeproof.wings.specimens.specimen import (
    CLASSES,
    Entry,
    Fault,
    Needs,
    Specimen,
    StageAt,
    split_microbatches,
)

_TABLES = (gradients, microbatches, steps, messages, model, order, devices, by_hand, crossings, collectives)
_NAME = re.compile(r"[a-z][a-z0-9-]*")
_WANTED = "expected Python that calls register(Specimen(...))"
_STAGES: Mapping[str, StageAt] = {one.__name__: one for one in (first, second, middle, last)}
# Words for what depends on the case; M is the number of its microbatches.
_MICROBATCHES: Mapping[str, Callable[[Case], tuple[int, ...]]] = {
    "all": lambda case: tuple(range(case.microbatches)),
    "last": lambda case: (case.microbatches - 1,),
    "first-split": lambda case: split_microbatches(case.built, case.stages // 2)[:1],
}
_FACTORS: Mapping[str, Callable[[Case], float]] = {
    "M": lambda case: float(case.microbatches),
    "1/M": lambda case: 1 / case.microbatches,
}
Read = Mapping[str, Callable[[str], Any]]  # how a field is read; others are numbers, and without a value true
_PLACE: Read = {
    "stage": lambda text: _STAGES[text],
    "microbatches": lambda text: _MICROBATCHES.get(text) or tuple(map(int, text.split(","))),
    "parameter": str,
    "factor": lambda text: _FACTORS.get(text) or (lambda case: float(text)),
}
_NEEDS: Read = {
    "models": lambda text: tuple(text.split(",")),
    "plan": lambda text: tuple(text.split("+")),
    "loss": str,
    "transports": lambda text: tuple(map(Transport, text.split(","))),
}


def _fields(text: str, read: Read) -> dict[str, Any]:
    pairs = (word.partition("=") for word in text.split())
    return {name: read.get(name, int)(value) if given else True for name, given, value in pairs}


class Row(NamedTuple):
    """A row of the file: the ``about`` of an entry, its truth unless it is right, and the needs of its cases."""

    about: Mapping[str, Any]
    fault: Fault | None
    needs: Needs
    schedule: str


@cache
def read_rows() -> Mapping[str, Row]:
    """Read the file's rows, by name."""
    found = {}
    with Path(__file__).with_name("catalogue.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            about = {field: row[field] for field in ("name", "family", "origin", "summary")}
            place, alike = _fields(row["place"], _PLACE), tuple(row["alike"].split())
            found[row["name"]] = Row(
                {**about, "classes": tuple(row["classes"].split())},
                Fault(row["kind"], row["law"], alike=alike, **place) if row["kind"] else None,
                Needs(**_fields(row["needs"], _NEEDS)),
                row["schedule"],
            )
    return found


def _entries() -> Iterator[Entry]:
    """What the tables compose, with the file's rows, in their order."""
    tables = ChainMap(*(table.PLANTS for table in _TABLES))
    assert tables.keys() <= read_rows().keys(), f"catalogue.csv has no {', '.join(tables.keys() - read_rows().keys())}"
    for name, row in read_rows().items():
        if name in tables:
            plant = tables[name]
            own = plant if isinstance(plant, Entry) else Entry(plant=plant)
            needs = replace(row.needs, also=own.needs.also)
            fields = {**vars(own), **row.about, "needs": needs, "schedule": row.schedule}
            yield Entry(**fields) if row.fault is None else Specimen(**fields, fault=row.fault)


_ENTRIES = {one.name: one for one in _entries()}
_SPECIMENS = {name: one for name, one in _ENTRIES.items() if isinstance(one, Specimen)}
_CONTROLS = {name: one for name, one in _ENTRIES.items() if name not in _SPECIMENS}


E = TypeVar("E", bound=Entry)


def _show(rows: Mapping[str, E], *, device: bool = False, simulated: bool = False) -> Mapping[str, E]:
    """Rows that show anywhere; or on a device or simulated ranks alone, because others show them by luck."""
    own = {name: (one.needs.device, bool(one.needs.transports)) for name, one in rows.items()}
    return MappingProxyType({name: one for name, one in rows.items() if own[name] == (device, simulated)})


_KNOWN = dict(_show(_SPECIMENS))  # and what files register
SPECIMENS: Mapping[str, Specimen] = MappingProxyType(_KNOWN)
ON_DEVICES, IN_SIMULATION = _show(_SPECIMENS, device=True), _show(_SPECIMENS, simulated=True)
# Changes without a fault, which must pass.
CONTROLS, DEVICE_CONTROLS = _show(_CONTROLS), _show(_CONTROLS, device=True)
SIMULATED_CONTROLS = _show(_CONTROLS, simulated=True)


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

"""Specimens of one's own: a Python file that registers them, read wherever they are planted."""

import re
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from types import ModuleType

from pipeproof.cases.case import Case, CaseError
from pipeproof.cases.specimens.specimen import CLASSES, Specimen
from pipeproof.core.cause import KINDS
from pipeproof.pipeline.files import cannot_read
from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.pipeline.schedules import known_are

_NAME = re.compile(r"[a-z][a-z0-9-]*")


class SpecimenError(ValueError):
    """A specimen that does not exist, or cannot be."""


class Plugins:
    """The files that were read, and what they registered among all specimens that are ``known``."""

    def __init__(self, known: MutableMapping[str, Specimen], taken: Sequence[str]) -> None:
        self._known = known
        self._taken = frozenset(taken)
        self._read: dict[str, list[str]] = {}
        self._now: list[str] = []

    @property
    def files(self) -> tuple[str, ...]:
        """What ranks must read too."""
        return tuple(self._read)

    @property
    def own(self) -> list[Specimen]:
        """What was registered."""
        return [self._known[name] for names in self._read.values() for name in names]

    def register(self, specimen: Specimen) -> Specimen:
        """Make ``specimen`` one of those that can be planted. Raises ``SpecimenError`` where it cannot be."""
        if why := self._wrong(specimen):
            raise SpecimenError(why)
        self._known[specimen.name] = specimen
        self._now.append(specimen.name)
        return specimen

    def load(self, path: str | Path) -> list[str]:
        """The names of what the file at ``path`` registers; read once. Raises ``SpecimenError`` in one sentence."""
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
        """Forget what the file at ``path`` registered."""
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
        """Why it cannot be registered; empty if it can."""
        if not isinstance(specimen, Specimen):
            return f"register was given a {type(specimen).__name__}: expected a Specimen"
        name, kind = specimen.name, specimen.fault.kind
        unknown = [one for one in specimen.classes if one not in CLASSES]
        reasons = (
            (not _NAME.fullmatch(name), f"the name {name!r}: expected small letters, digits and hyphens"),
            (name in self._known or name in self._taken, f"there is a specimen {name!r} already"),
            (kind not in KINDS, f"specimen {name!r} has the fault {kind!r}: {known_are(kind, list(KINDS))}"),
            (bool(unknown), f"specimen {name!r} has the classes {', '.join(unknown)}: known are {', '.join(CLASSES)}"),
        )
        return next((reason for wrong, reason in reasons if wrong), "") or _unfit(specimen)


def _unfit(specimen: Specimen) -> str:
    """Why its smallest case cannot show it; empty if it can."""
    try:
        why = specimen.needs.missing(Case.parse(specimen.smallest))
    except (CaseError, ScheduleError) as error:
        why = _one_line(error)
    return f"no smallest case has what specimen {specimen.name!r} needs: {why}" if why else ""


_WANTED = "expected Python that calls register(Specimen(...))"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())

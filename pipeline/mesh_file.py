"""A file with a job's groups, microbatches and sums. Missing parts follow from its axes."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pipeproof.pipeline.files import read_json
from pipeproof.pipeline.mesh import PIPELINE, Groups, Mesh, Rows, Sum, Tied, pipelines_of
from pipeproof.pipeline.schedule import Schedule, ScheduleError

FORMAT, VERSION = "pipeproof/mesh", 1
_WANTED = "a mesh"
_KNOWN = ("axes", "groups", "microbatches", "sums", "divisor", "tied", "rows", "holds")
_MOST = 1 << 40  # a number
_MOST_TIMES = 1 << 53  # that something is in a sum: up to here floats count


def read_axes(text: str) -> dict[str, int]:
    """Parse ``dp=2,pp=4``: sizes of axes, in order. Raises ``ScheduleError``."""
    found: dict[str, int] = {}
    for word in text.split(","):
        axis, equals, size = word.strip().partition("=")
        if not (equals and size.isascii() and size.isdecimal() and len(size) < 10):
            raise ScheduleError(f"the mesh has {word!r}: expected an axis and its size, as in dp=2,pp=4")
        if axis in found:
            raise ScheduleError(f"the mesh has {axis} twice: leave one out")
        found[axis] = int(size)
    return found


def mesh_of(axes: Mapping[str, int]) -> "MeshFile":
    """A file's content from ``axes`` alone."""
    return MeshFile("the mesh", {"axes": dict(axes)})


def read_mesh(path: str | Path) -> "MeshFile":
    """Read the mesh in the file at ``path``. Raises ``ScheduleError`` for other content."""
    data = read_json(path, expected=_WANTED)
    version = data.pop("version", None)
    if data.pop("format", None) != FORMAT or type(version) is not int or version != VERSION:
        raise ScheduleError(f'{path} is no mesh: expected "format": "{FORMAT}", "version": {VERSION}; add them')
    for unknown in (name for name in data if name not in _KNOWN):
        raise ScheduleError(f"{path} has {unknown!r}: expected some of {', '.join(_KNOWN)}")
    return MeshFile(str(path), data)


class MeshFile:
    """A file's content, or axes alone. Each part is read, and checked, on demand."""

    def __init__(self, path: str, data: Mapping[str, Any]) -> None:
        self._path = path
        self._data = data

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of axes, in order."""
        found = self._data.get("axes")
        if not isinstance(found, dict) or not found:
            raise self._wrong("axes", found, 'axes and their sizes, e.g. {"dp": 2, "pp": 4}')
        return {axis: self._whole(f"axes: {axis}", size) for axis, size in found.items()}

    @property
    def pipelines(self) -> Groups:
        """Ranks by pipeline; none without a pipeline axis."""
        said = self._object("groups").get(PIPELINE)
        return pipelines_of(self.axes) if said is None else self._groups(f"groups: {PIPELINE}", said)

    def mesh(self, schedule: Schedule, *, known: Mapping[str, Groups] = MappingProxyType({})) -> Mesh:
        """Build the mesh around pipelines that run ``schedule``. Groups default to ``known`` ones."""
        rows = self._whole("rows", self._data.get("rows", 0))
        made = Mesh.of(self.axes, schedule, rows=rows)
        groups = {axis: self._groups(f"groups: {axis}", found) for axis, found in self._object("groups").items()}
        for unknown in (axis for axis in groups if axis not in made.axes):
            raise ScheduleError(f"{self._path} has groups along {unknown!r}: expected some of {', '.join(made.axes)}")
        tied = tuple(map(self._tied, self._list("tied")))
        groups = {axis: groups.get(axis, known.get(axis, own)) for axis, own in made.groups.items()}
        made = replace(made, groups=groups).with_tied(tied, schedule)
        if "microbatches" in self._data:
            made = replace(made, shares=self._shares(made, schedule))
        if "sums" in self._data:
            made = replace(made, sums=self._sums(made))
        if "divisor" in self._data:
            made = replace(made, divisor=self._whole("divisor", self._data["divisor"], least=1))
        if "holds" in self._data:
            holds = tuple(self._rows("holds", rows) for rows in self._of_ranks("holds", made))
            made = replace(made, holds=holds)
        return made

    def _shares(self, mesh: Mesh, schedule: Schedule) -> list[Any]:
        """Read shares, with one array for equal lists."""
        shares: dict[tuple[int, ...], Any] = {}
        found = []
        for rank, one in enumerate(self._of_ranks("microbatches", mesh)):
            numbers = self._numbers(f"microbatches of rank {rank}", one)
            if len(numbers) != schedule.microbatches:
                said = f"gives rank {rank} {len(numbers)} microbatches, but {schedule.name} has {schedule.microbatches}"
                raise ScheduleError(f"{self._path} {said}: give each rank as many")
            found.append(shares.setdefault(numbers, np.array(numbers, dtype=np.int64)))
        return found

    def _sums(self, mesh: Mesh) -> tuple[Sum, ...]:
        """Read sums with countable weights."""
        found = tuple(self._sum(mesh, one) for one in self._list("sums"))
        if max(math.prod(mesh.axes[one.over] for one in found), math.prod(one.divisor for one in found)) > _MOST_TIMES:
            said = f"has {len(found)} sums, which together add up or divide by more than {_MOST_TIMES}"
            raise ScheduleError(f"{self._path} {said}: leave out those of one axis that are there twice")
        return found

    def _sum(self, mesh: Mesh, one: object) -> Sum:
        over = one.get("over") if isinstance(one, dict) and not {*one} - {"over", "divisor", "keeps"} else None
        if not isinstance(one, dict) or not isinstance(over, str) or over not in mesh.axes:
            wanted = f'{{"over": AXIS, "divisor": N}}, with an axis of {", ".join(mesh.axes)}; "keeps" if it scatters'
            raise self._wrong("sums", one, wanted)
        divisor = self._whole("divisor", one.get("divisor", 1), least=1)
        if "keeps" in one:
            return Sum(over, divisor, self._keeps(over, mesh.axes[over], one["keeps"]))
        return Sum(over, divisor, next((made.keeps for made in mesh.sums if made.over == over), ()))

    def _keeps(self, over: str, size: int, found: object) -> tuple[Rows, ...]:
        if not isinstance(found, list) or not all(isinstance(one, list) for one in found):
            raise self._wrong("keeps", found, "of each of a group its rows, e.g. [[0, 2], [2, 4]]")
        if len(found) != size:
            said = f"has {len(found)} parts to keep over {over}, which has {size} ranks"
            raise ScheduleError(f"{self._path} {said}: give one for each")
        return tuple(self._rows("keeps", rows) for rows in found)

    def _tied(self, one: object) -> Tied:
        if isinstance(one, list):
            return Tied(self._numbers("tied", one))
        if not isinstance(one, dict) or {*one} != {"stages", "groups"}:
            wanted = 'a list of stages for each parameter, e.g. [[0, 3]], or [{"stages": [0, 3], "groups": [[0, 3]]}]'
            raise self._wrong("tied", self._data["tied"], wanted)
        return Tied(self._numbers("tied", one["stages"]), self._groups("tied", one["groups"]))

    def _of_ranks(self, name: str, mesh: Mesh) -> list[Any]:
        found = self._list(name)
        if len(found) != mesh.ranks:
            raise ScheduleError(
                f"{self._path} has {name} of {len(found)} ranks: expected {mesh.ranks}, all of the mesh"
            )
        return found

    def _rows(self, name: str, found: object) -> Rows:
        numbers = self._numbers(name, found)
        if len(numbers) != 2 or numbers[0] > numbers[1]:
            raise self._wrong(name, found, "the first row and the one after the last, e.g. [0, 4]")
        return numbers[0], numbers[1]

    def _groups(self, name: str, found: object) -> Groups:
        if not isinstance(found, list):
            raise self._wrong(name, found, "lists of ranks, e.g. [[0, 1], [2, 3]]")
        return tuple(self._numbers(name, group) for group in found)

    def _numbers(self, name: str, found: object) -> tuple[int, ...]:
        if not isinstance(found, list):
            raise self._wrong(name, found, "a list of whole numbers")
        return tuple(self._whole(name, one) for one in found)

    def _whole(self, name: str, found: object, *, least: int = 0) -> int:
        if type(found) is not int or found < least:
            raise self._wrong(name, found, f"a whole number, at least {least}")
        if found > _MOST:
            raise self._wrong(name, found, f"a whole number, at most {_MOST}")
        return found

    def _object(self, name: str) -> dict[str, Any]:
        found = self._data.get(name, {})
        if not isinstance(found, dict):
            raise self._wrong(name, found, "an object")
        return found

    def _list(self, name: str) -> list[Any]:
        found = self._data.get(name, [])
        if not isinstance(found, list):
            raise self._wrong(name, found, "a list")
        return found

    def _wrong(self, name: str, found: object, wanted: str) -> ScheduleError:
        text = json.dumps(found)
        return ScheduleError(
            f"{self._path}: {name} is {text if len(text) <= 60 else f'{text[:60]}...'}: expected {wanted}"
        )

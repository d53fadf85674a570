"""A mesh: ranks along axes around the pipeline, with groups, shares and sums.

Axes are named as ``init_device_mesh`` users name them, and ranks numbered as it numbers them: the last axis first.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np

from pipeproof.pipeline.columns import Ints
from pipeproof.pipeline.schedule import Schedule, ScheduleError

PIPELINE = "pp"
DATA = ("dp", "ddp", "dp_replicate", "dp_shard", "fsdp", "ep")  # ranks along them have data of their own
MODEL = ("tp", "sp", "cp")  # and along these they work on the same
SHARDED = ("fsdp", "dp_shard")  # data axes whose ranks keep a part of every parameter
PARTS, PIECES = "tp", "cp"  # parts of parameters; pieces of sequences
SUMMED = (*(axis for axis in DATA if axis != "ep"), PIECES)  # along them all gradients are summed
PROVEN = (PIPELINE, *SUMMED, PARTS)  # along ep and sp the sums depend on the parameter
MOST_MESH = 1 << 20  # ranks
AXES: Mapping[str, str] = {"ranks": PIPELINE, "replicas": DATA[0]}  # a case's words, in the field's names

Groups = tuple[tuple[int, ...], ...]
Rows = tuple[int, int]  # of a parameter, from the first to before the last


class Sum(NamedTuple):
    """Gradients are added in each group along the axis ``over``, and divided by ``divisor``.

    ``keeps``: each group member's rows of the result, counted from its first; empty: all keep all.
    """

    over: str
    divisor: int
    keeps: tuple[Rows, ...] = ()


class Tied(NamedTuple):
    """A parameter's copies in ``stages``, summed within each group; None: within each pipeline."""

    stages: tuple[int, ...]
    groups: Groups | None = None


@dataclass(frozen=True)
class Mesh:
    """``groups``: each axis's ranks in order. ``shares[rank]``: the rank's microbatches out of the step's, in order.

    ``divisor``: the product for all sums. ``rows``: per parameter; each rank's optimizer ``holds`` some (empty: those
    that it keeps).
    """

    axes: Mapping[str, int]
    groups: Mapping[str, Groups]
    shares: Sequence[Ints]
    sums: tuple[Sum, ...]
    divisor: int
    tied: tuple[Tied, ...] = ()
    rows: int = 1
    holds: tuple[Rows, ...] = ()

    @classmethod
    def of(cls, axes: Mapping[str, int], schedule: Schedule, *, rows: int = 0) -> "Mesh":
        """Build the mesh for ``axes`` and their sizes, around pipelines that run ``schedule``.

        Of n replicas, replica r gets the microbatches r, r + n, and so on. A mean is taken over each axis of data, and
        over cp. ``rows``: per parameter; 0: one for each part. Raises ``ScheduleError`` for impossible axes.
        """
        _check(axes, schedule)
        replica, replicas = along(axes, DATA), _size(axes, DATA)
        each = [np.arange(one, schedule.microbatches * replicas, replicas) for one in range(replicas)]
        cut = math.prod(axes.get(axis, 1) for axis in SHARDED)
        total = rows or cut
        sums = [Sum(axis, axes[axis], chunks(total, cut)) for axis in axes if axis in SHARDED and axes[axis] > 1]
        sums += [Sum(axis, axes[axis]) for axis in axes if axis in SUMMED and axis not in SHARDED and axes[axis] > 1]
        groups = {axis: groups_along(axes, axis) for axis in axes}
        divisor = _size(axes, SUMMED)
        return cls(dict(axes), groups, [each[one] for one in replica], tuple(sums), divisor, rows=total)

    def with_tied(self, tied: Sequence[Tied], schedule: Schedule) -> "Mesh":
        """Add tied copies. Raises ``ScheduleError`` for stages that cannot have any."""
        for one in tied:
            beyond = next((stage for stage in one.stages if not 0 <= stage < schedule.n_stages), None)
            if beyond is not None:
                raise ScheduleError(f"tied: there is no stage {beyond}, stages are 0..{schedule.n_stages - 1}")
            if len({*one.stages}) < max(2, len(one.stages)):
                said = ",".join(map(str, one.stages))
                raise ScheduleError(f"tied: {said!r} names no two stages: expected those with a copy, each once")
        return replace(self, tied=(*self.tied, *tied))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return math.prod(self.axes.values())

    @property
    def replicas(self) -> int:
        """Number of shares in a step's microbatches."""
        return _size(self.axes, DATA)

    @property
    def pieces(self) -> int:
        """Number of pieces per sequence."""
        return self.axes.get(PIECES, 1)

    @property
    def sizes(self) -> str:
        """``dp 128, pp 16, tp 8``."""
        return ", ".join(f"{axis} {size}" for axis, size in self.axes.items())

    def places(self, axis: str) -> Ints:
        """Every rank's place in its group along ``axis``, given one group per rank."""
        found = np.zeros(self.ranks, dtype=np.int64)
        for group in self.groups.get(axis, ()):
            found[list(group)] = range(len(group))
        return found


def along(axes: Mapping[str, int], some: Sequence[str]) -> tuple[int, ...]:
    """Every rank's place along ``some`` axes."""
    numbers = []
    for place in product(*map(range, axes.values())):
        number = 0
        for (axis, size), at in zip(axes.items(), place, strict=True):
            number = number * size + at if axis in some else number
        numbers.append(number)
    return tuple(numbers)


def groups_along(axes: Mapping[str, int], axis: str) -> Groups:
    """Ranks that differ along ``axis`` alone, group by group."""
    numbered = np.arange(math.prod(axes.values())).reshape(list(axes.values()))
    lines = np.moveaxis(numbered, list(axes).index(axis), -1).reshape(-1, axes[axis])
    return tuple(map(tuple, lines.tolist()))


def pipelines_of(axes: Mapping[str, int]) -> Groups:
    """Ranks by pipeline; none for impossible ``axes`` or without pipelines."""
    may = PIPELINE in axes and 1 <= math.prod(axes.values()) <= MOST_MESH
    return groups_along(axes, PIPELINE) if may else ()


def chunks(rows: int, count: int) -> tuple[Rows, ...]:
    """Cut ``rows`` into ``count`` parts like ``torch.chunk``: equal ones first, then the rest, then none."""
    size = -(-rows // count)
    return tuple((min(rows, k * size), min(rows, (k + 1) * size)) for k in range(count))


def _size(axes: Mapping[str, int], some: Sequence[str]) -> int:
    return math.prod(size for axis, size in axes.items() if axis in some)


def _check(axes: Mapping[str, int], schedule: Schedule) -> None:
    """Raise ``ScheduleError`` for axes impossible around ``schedule``."""
    for unknown in (axis for axis in axes if axis not in PROVEN):
        known = unknown in (*DATA, *MODEL)
        why = ": what is summed along it depends on the parameter" if known else ""
        raise ScheduleError(f"the mesh has an axis {unknown!r}{why}; expected some of {', '.join(PROVEN)}")
    for axis, size in axes.items():
        if size < 1:
            raise ScheduleError(f"the mesh has {size} ranks along {axis}: expected at least 1")
    if all(axes.get(axis, 1) > 1 for axis in SHARDED):
        raise ScheduleError(f"the mesh has {' and '.join(SHARDED)}, which are two names of one: leave one out")
    if (total := math.prod(axes.values())) > MOST_MESH:
        raise ScheduleError(f"the mesh has {total} ranks: expected at most {MOST_MESH}")
    if (pipeline := axes.get(PIPELINE, 1)) != schedule.n_ranks:
        said = f"{schedule.name} is for {schedule.n_ranks} ranks"
        raise ScheduleError(f"the mesh has {PIPELINE} {pipeline}, but {said}: give it {PIPELINE}={schedule.n_ranks}")

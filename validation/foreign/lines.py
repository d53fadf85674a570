"""Ranks that hold the same stages and work on the same data: which of them show first what is wrong."""

from collections.abc import Sequence

from pipeproof.core.execution import flow
from pipeproof.diagnosis.evidence import Line
from pipeproof.observers.observed import Crossing

_BY_DESIGN = ("zero", "missing", "shape")  # one rank of a line may have the loss, or hand on a part, for all


def from_the_first_wrong(lines: Sequence[Line]) -> list[Line]:
    """``lines``, from the one on of which a tensor is wrong nearest to where data comes in; else from the first on."""
    return sorted(lines, key=lambda line: _first_wrong(line, told=line is lines[0]))


def _first_wrong(line: Line, *, told: bool) -> tuple[float, ...]:
    """Where in the flow a tensor is first wrong. Not ``told``: what no law judges may be meant so on this line."""
    wrong = [one for one in line.seen.crossings(0) if not one.same and (told or one.judged or not _meant(one))]
    return min((flow(one, line.seen.schedule.n_stages) for one in wrong), default=(float("inf"),))


def _meant(one: Crossing) -> bool:
    return one.really is None or one.really.kind in _BY_DESIGN

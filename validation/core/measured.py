"""What a verdict rests on, in numbers: every comparison that was measured, and what each action took and made."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from platform import python_version

from pipeproof.core.cause import Cell
from pipeproof.pipeline.action import Kind


@dataclass(frozen=True)
class Compared:
    """Two numbers, or two tensors, that were compared: where, how far apart they are, and what rounding allows.

    ``error`` is relative, and 0 where every bit agrees: then nobody measured ``floor``, which is what rounding alone
    did, and ``limit``, which is what it allows. ``found`` and ``due`` are numbers; of tensors they are None.
    """

    law: str
    operation: int
    outcome: str
    rank: int | None = None
    stage: int | None = None
    microbatch: int | None = None
    parameter: str | None = None
    error: float = 0.0
    floor: float | None = None
    limit: float | None = None
    found: float | None = None
    due: float | None = None

    @property
    def apart(self) -> float:
        """``error``; infinite where it is not sought, as of rounding alone, though bits do not agree."""
        return math.inf if self.floor is not None and not self.error else self.error


@dataclass(frozen=True)
class Sight:
    """A tensor that an action took or made, beside the one that is due.

    ``agrees``: whether it is that; None where it was not compared. ``seen`` says what it is instead. ``error`` is
    relative, None where no number says it, and ``limit`` is what rounding allows. ``really``: the action that made what
    it really is; ``due``: the one that should have.
    """

    what: str
    made: bool
    agrees: bool | None
    seen: str = ""
    error: float | None = None
    limit: float | None = None
    really: str = ""
    due: str = ""


@dataclass(frozen=True)
class Done:
    """One action as a rank did it; ``sights`` are empty where nobody looked."""

    stage: int
    kind: Kind
    microbatch: int | None
    sights: tuple[Sight, ...] = ()

    @property
    def action(self) -> str:
        """As it is written."""
        return f"{self.stage}{self.kind.value}{'?' if self.microbatch is None else self.microbatch}"


@dataclass(frozen=True)
class Ran:
    """One operation as the ranks did it: each one's actions in their order, and the rank of every stage."""

    operation: int
    microbatches: int
    placement: tuple[int, ...]
    ranks: tuple[tuple[Done, ...], ...]

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON: every rank's actions, and the tensors of those that were looked at."""
        seen = [{"action": done.action, **_told(one)} for row in self.ranks for done in row for one in done.sights]
        return {**vars(self), "ranks": [[done.action for done in row] for row in self.ranks], "tensors": seen}


@dataclass(frozen=True)
class Weights:
    """One parameter's coefficients, by microbatch; ``seen`` says what it is where they do not hold for it."""

    parameter: str
    cells: tuple[Cell, ...]
    seen: str = ""


@dataclass(frozen=True)
class Measured:
    """All of it; a part that this kind of run does not have, or that nobody recorded, is empty.

    ``weights`` are those of the parameters of ``stage``, where the fault is.
    """

    compared: tuple[Compared, ...] = ()
    ran: Ran | None = None
    stage: int | None = None
    weights: tuple[Weights, ...] = ()

    def of(self, law: str) -> list[Compared]:
        """What was compared under ``law``."""
        return [one for one in self.compared if one.law == law]

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON; what does not apply is left out."""
        ran = None if self.ran is None else self.ran.as_dict()
        weights = [asdict(one) for one in self.weights]
        return {"compared": [*map(_told, self.compared)], "ran": ran, "stage": self.stage, "weights": weights}


def _told(one: Compared | Sight) -> dict[str, object]:
    return {name: value for name, value in vars(one).items() if value not in (None, "")}


@cache
def versions() -> Mapping[str, str]:
    """What computed, by name."""
    return {"pipeproof": _version("pipeproof"), "torch": _version("torch"), "python": python_version()}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed as a package"

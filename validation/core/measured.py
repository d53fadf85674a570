"""Numbers behind a verdict: comparisons, and tensors by action."""

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
    """Two compared numbers or tensors: place, error and allowance.

    error: relative; 0 if all bits agree. floor, limit: measured rounding and its allowance; None if bits agree.
    observed, expected: numbers; None for tensors.
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
    observed: float | None = None
    expected: float | None = None

    @property
    def apart(self) -> float:
        """``error``, or infinity for pure-rounding values with unequal bits."""
        return math.inf if self.floor is not None and not self.error else self.error


@dataclass(frozen=True)
class Sight:
    """A tensor taken or made by an action, beside its expectation.

    agrees: whether they agree; None if uncompared. observed: what arrived instead. error: relative; None if not a
    number. limit: rounding allowance. really: the action that made the tensor; expected: the action that should
    have.
    """

    what: str
    made: bool
    agrees: bool | None
    observed: str = ""
    error: float | None = None
    limit: float | None = None
    really: str = ""
    expected: str = ""


@dataclass(frozen=True)
class Done:
    """An action on a rank, with its recorded tensors, if any."""

    stage: int
    kind: Kind
    microbatch: int | None
    sights: tuple[Sight, ...] = ()

    @property
    def action(self) -> str:
        """The action's notation, such as ``2F0``."""
        return f"{self.stage}{self.kind.value}{'?' if self.microbatch is None else self.microbatch}"


@dataclass(frozen=True)
class Ran:
    """An operation on all ranks: their actions in order, and each stage's rank."""

    operation: int
    microbatches: int
    placement: tuple[int, ...]
    ranks: tuple[tuple[Done, ...], ...]

    def as_dict(self) -> dict[str, object]:
        """Return plain data for JSON: each rank's actions, with recorded tensors."""
        observed = [
            {"action": done.action, **_as_dict(one)} for row in self.ranks for done in row for one in done.sights
        ]
        return {**vars(self), "ranks": [[done.action for done in row] for row in self.ranks], "tensors": observed}


@dataclass(frozen=True)
class Weights:
    """A parameter's coefficients by microbatch. ``observed``: description if they do not fit."""

    parameter: str
    cells: tuple[Cell, ...]
    observed: str = ""


@dataclass(frozen=True)
class Measured:
    """All numbers; parts that this run lacks are empty.

    weights: coefficients for parameters in ``stage``, the faulty one.
    """

    compared: tuple[Compared, ...] = ()
    ran: Ran | None = None
    stage: int | None = None
    weights: tuple[Weights, ...] = ()

    def of(self, law: str) -> list[Compared]:
        """Return comparisons under ``law``."""
        return [one for one in self.compared if one.law == law]

    def as_dict(self) -> dict[str, object]:
        """Return plain data for JSON, without inapplicable fields."""
        ran = None if self.ran is None else self.ran.as_dict()
        weights = [asdict(one) for one in self.weights]
        return {"compared": [*map(_as_dict, self.compared)], "ran": ran, "stage": self.stage, "weights": weights}


def _as_dict(one: Compared | Sight) -> dict[str, object]:
    return {name: value for name, value in vars(one).items() if value not in (None, "")}


@cache
def versions() -> Mapping[str, str]:
    """Return software versions by name."""
    return {"pipeproof": _version("pipeproof"), "torch": _version("torch"), "python": python_version()}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed as a package"

"""One thing that differs, as data: where, what was found, what was due, and how both read."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

_SAME_WAY = 0.99  # the cosine from which on one tensor reads as a multiple of another


@dataclass(frozen=True)
class Size:
    """A tensor in numbers: its shape and norm, and of one that was seen, how much of it is the expected one.

    ``began``: it is a parameter's movement, from what was of this norm. ``factor`` times the expected one is its part
    along that; None where one of the two is zero, or of another shape.
    """

    shape: tuple[int, ...]
    norm: float | None = None
    began: float | None = None
    factor: float | None = None
    cosine: float | None = None

    def __str__(self) -> str:
        if self.norm is None:
            return f"shape {list(self.shape)}"
        return f"{'' if self.began is None else 'update of '}norm {self.norm:.6g}{self._alike()}"

    def _alike(self) -> str:
        if self.factor is None or self.cosine is None:
            return ""
        # What leads elsewhere is no multiple of what was expected, however long it is.
        times = f", {self.factor:.6g} times expected" if abs(self.cosine) > _SAME_WAY else ""
        return f"{times}, cosine {self.cosine:.6f}"


# What was compared, which says how its values read. "text": of what has no value but words.
What = Literal[
    "text", "number", "tensor", "gradient", "buffer", "held", "losses", "outputs", "mode", "forward", "backward",
    "calls", "not-finite",
]  # fmt: skip
Value = str | float | bool | Size | tuple[int | None, ...]

_READS: Mapping[What, Callable[[Any], str]] = {
    "number": lambda value: f"{value:.9g}",
    "gradient": lambda there: "a gradient" if there else "None",
    "buffer": lambda there: "a buffer" if there else "no such buffer",
    "held": lambda count: f"held {count} times",
    "losses": lambda count: f"{count} losses",
    "outputs": lambda count: f"handed back for {count} microbatches",
    "mode": lambda training: f"{'training' if training else 'evaluation'} mode",
    "forward": lambda order: f"forward of {_order(order)}",
    "backward": lambda order: f"backward of {_order(order)}",
    "calls": lambda order: f"its module ran for {_order(order)}",
    "not-finite": lambda value: f"loss {value:.9g}",
}
_DUE: Mapping[What, Callable[[Any], str]] = {
    "forward": lambda every: f"forward of each of {_order(every)} once",
    "backward": lambda every: f"backward of each of {_order(every)} once",
    "calls": lambda every: f"once for each of {_order(every)}",
}


@dataclass(frozen=True, eq=False)
class Mismatch:
    """One thing that differs: where, what was found, what was due, and by how much it may differ.

    ``operation`` counts from 1 over the plan. ``what`` was compared says what ``found`` and ``due`` are: numbers, sizes
    of tensors, whether something is there, how often, which microbatches in which order (None: nobody knows). ``told``
    is what was found in words, where its value alone does not say it. ``beside`` is the rank that it was held against,
    which may itself be wrong; None where that was the model. ``doing``: what the operation does, where the plan has
    several. ``output`` is the name of one that a step handed back, ``router`` that of the module that chose experts.
    ``step``: of a run of many, its number there. Fields that do not apply are None.
    """

    law: str
    operation: int
    found: Value = ""
    due: Value = ""
    what: What = "text"
    rank: int | None = None
    stage: int | None = None
    microbatch: int | None = None
    action: str | None = None
    parameter: str | None = None
    error: float | None = None
    limit: float | None = None
    told: str = ""
    beside: int | None = None
    doing: str = ""
    output: str | None = None
    router: str | None = None
    step: int | None = None

    @property
    def seen(self) -> str:
        """What was found, in words."""
        return self.told or _READS.get(self.what, str)(self.found)

    @property
    def expected(self) -> str:
        """What was due, in words."""
        return _DUE.get(self.what, _READS.get(self.what, str))(self.due)

    def read(self, due: str) -> str:
        """``seen``, where what was due goes by the name ``due``."""
        return self.seen.replace("times expected", f"times {due}")

    @property
    def within(self) -> bool:
        """Whether it is no more than rounding allows, so that it is no proof of anything."""
        return self.error is not None and self.limit is not None and self.error <= self.limit

    @property
    def ratio(self) -> float | None:
        """How many times the due number the found one is; None where they are no such numbers."""
        if self.what != "number" or not isinstance(self.found, float) or not isinstance(self.due, float):
            return None
        return self.found / self.due if self.due and math.isfinite(self.found) else None

    @property
    def where(self) -> str:
        """Rank, stage, microbatch, action and parameter, as far as they are known."""
        return ", ".join(f"{name} {value}" for name, value in self._place if value is not None) or "every rank"

    @property
    def later(self) -> str:
        """Which step of a run, or operation of the plan, it is in; a first operation goes without saying."""
        if self.step is not None:
            return f"; step {self.step}"
        if self.operation == 1 and self.doing in ("", "train"):
            return ""
        return f"; operation {self.operation}{f', {self.doing}' if self.doing else ' of the plan'}"

    @property
    def allowance(self) -> str:
        """How large the error is, and how large it might be, if that is known; empty where size was no question."""
        if self.error is None:
            return ""
        allowed = "" if self.limit is None else f", rounding allows {small(self.limit)}"
        return f"; relative error {small(self.error)}{allowed}"

    @property
    def _place(self) -> tuple[tuple[str, object], ...]:
        return (
            ("rank", self.rank),
            ("stage", self.stage),
            ("microbatch", self.microbatch),
            ("action", self.action),
            ("parameter", self.parameter),
            ("output", self.output),
            ("router", self.router),
        )

    def __str__(self) -> str:
        return self.line()

    def line(self, due: str = "expected") -> str:
        """All of it on one line; ``due`` is what the one side is called."""
        return f"{self.law}: {self.where}: {self.read(due)} ({due} {self.expected})"

    def __eq__(self, other: object) -> bool:
        """As they read: a NaN is no other than another."""
        return isinstance(other, Mismatch) and self._reads == other._reads

    def __hash__(self) -> int:
        return hash(self._reads)

    @property
    def _reads(self) -> tuple[object, ...]:
        return self.law, self.operation, self._place, self.seen, self.expected, self.error, self.limit

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON: the values, and how they read."""
        return {**asdict(self), "seen": self.seen, "expected": self.expected}


def _order(microbatches: Sequence[int | None]) -> str:
    return f"[{', '.join('?' if one is None else str(one) for one in microbatches)}]"


def small(value: float) -> str:
    """A relative error in two digits; 0 only for exactly nothing."""
    return "0" if value == 0 else f"{value:.1e}"

"""Mismatches as data: place, observed and expected values, and their text."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

_SAME_WAY = 0.99  # cosine above which one tensor reads as a multiple of another


@dataclass(frozen=True)
class Size:
    """A tensor in numbers: shape and norm; observed ones also by their share along the expected one.

    began: for a parameter's movement, the starting norm. factor: share along the expected tensor, as a multiple; None
    for zero tensors or unequal shapes.
    """

    shape: tuple[int, ...]
    norm: float | None = None
    began: float | None = None
    factor: float | None = None
    cosine: float | None = None

    def __str__(self) -> str:
        if self.norm is None:
            return f"shape {list(self.shape)}"
        # A tensor in another direction is no multiple, whatever its length.
        same_way = self.factor is not None and self.cosine is not None and abs(self.cosine) > _SAME_WAY
        times = f", {self.factor:.6g} times expected" if same_way else ""
        cosine = "" if self.factor is None or self.cosine is None else f", cosine {self.cosine:.6f}"
        return f"{'' if self.began is None else 'update of '}norm {self.norm:.6g}{times}{cosine}"


# Kind of compared value, which decides its text. "text": words alone.
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
_EXPECTED: Mapping[What, Callable[[Any], str]] = {
    "forward": lambda every: f"forward of each of {_order(every)} once",
    "backward": lambda every: f"backward of each of {_order(every)} once",
    "calls": lambda every: f"once for each of {_order(every)}",
}


@dataclass(frozen=True, eq=False)
class Mismatch:
    """A mismatch: place, observed value, expected value, allowance.

    operation: counted from 1 over the plan. what: kind of value, which decides its text: numbers, tensor sizes,
    presence, counts, microbatch orders (None: unknown microbatch). text: description beyond the value. beside: the rank
    compared with, which may itself be wrong; None for the model. doing: the operation's kind, in plans with several.
    output: a returned output's name. router: the choosing module's name. step: number within a run. Inapplicable fields
    are None.
    """

    law: str
    operation: int
    observed: Value = ""
    expected: Value = ""
    what: What = "text"
    rank: int | None = None
    stage: int | None = None
    microbatch: int | None = None
    action: str | None = None
    parameter: str | None = None
    error: float | None = None
    limit: float | None = None
    text: str = ""
    beside: int | None = None
    doing: str = ""
    output: str | None = None
    router: str | None = None
    step: int | None = None

    @property
    def observed_text(self) -> str:
        """The observed value in words."""
        return self.text or _READS.get(self.what, str)(self.observed)

    @property
    def expected_text(self) -> str:
        """The expected value in words."""
        return _EXPECTED.get(self.what, _READS.get(self.what, str))(self.expected)

    def text_beside(self, expected: str) -> str:
        """``observed_text``, with ``expected`` as the other side's name."""
        return self.observed_text.replace("times expected", f"times {expected}")

    @property
    def within(self) -> bool:
        """True if the error is within the rounding limit, and so proves nothing."""
        return self.error is not None and self.limit is not None and self.error <= self.limit

    @property
    def ratio(self) -> float | None:
        """Observed over expected number; None for other values."""
        if self.what != "number" or not isinstance(self.observed, float) or not isinstance(self.expected, float):
            return None
        return self.observed / self.expected if self.expected and math.isfinite(self.observed) else None

    @property
    def where(self) -> str:
        """Known rank, stage, microbatch, action and parameter."""
        return ", ".join(f"{name} {value}" for name, value in self._place if value is not None) or "every rank"

    @property
    def later(self) -> str:
        """The step or operation, unless it is the plan's first."""
        if self.step is not None:
            return f"; step {self.step}"
        if self.operation == 1 and self.doing in ("", "train"):
            return ""
        return f"; operation {self.operation}{f', {self.doing}' if self.doing else ' of the plan'}"

    @property
    def allowance(self) -> str:
        """The error with its limit, if known; empty for values without sizes."""
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

    def line(self, expected: str = "expected") -> str:
        """Format the mismatch on one line. ``expected``: the other side's name."""
        return f"{self.law}: {self.where}: {self.text_beside(expected)} ({expected} {self.expected_text})"

    def __eq__(self, other: object) -> bool:
        """Compare as text: NaN equals NaN."""
        return isinstance(other, Mismatch) and self._reads == other._reads

    def __hash__(self) -> int:
        return hash(self._reads)

    @property
    def _reads(self) -> tuple[object, ...]:
        return self.law, self.operation, self._place, self.observed_text, self.expected_text, self.error, self.limit

    def as_dict(self) -> dict[str, object]:
        """Return plain data for JSON: values, and their text."""
        return {**asdict(self), "observed_text": self.observed_text, "expected_text": self.expected_text}


def _order(microbatches: Sequence[int | None]) -> str:
    return f"[{', '.join('?' if one is None else str(one) for one in microbatches)}]"


def small(value: float) -> str:
    """Format a relative error with two digits; 0 for exact zero alone."""
    return "0" if value == 0 else f"{value:.1e}"

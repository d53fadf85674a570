"""What a tensor is in place of the one that is due, and whose, as values; all that is said of it is said here."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from pipeproof.core.observe.recording import Point, Site
from pipeproof.pipeline.sizes import SHOWN, digits

# Types that a tensor may have gone through on its way, by the names that people use.
NARROWER = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDED_TO = {**NARROWER, "fp32": torch.float32}  # what a tensor of a wider type may have been rounded to


def narrower(dtype: torch.dtype) -> Collection[str]:
    """The names of types through which a tensor of ``dtype`` may have gone, and lost something."""
    return (ROUNDED_TO if dtype is torch.float64 else NARROWER).keys()


GRADIENT, PARAMETER = "gradient", "parameter"  # places of what belongs to a parameter
SAME_NUMBER, MEAN = "same number", "mean"  # what can be added to every element of anything
_NO_PART = 1e-2  # a coefficient this near to 0 or 1 is said to be that


@dataclass(frozen=True)
class Label:
    """Whose a tensor of the reference is: where it passes, or the parameter ``name`` that it belongs to.

    ``ago``: how many operations before the one in question; ``number``: which it is of several at one place.
    """

    point: Point
    ago: int = 0
    number: int = 0
    name: str = ""

    @classmethod
    def of_gradient(cls, site: Site, *, ago: int = 0) -> Self:
        """That of a parameter's gradient, as one stage has it."""
        return cls(Point(site[0], -1, GRADIENT), ago, name=site[1])

    def text(self, at: "Label") -> str:
        """Named as seen from ``at``: what is the same goes without saying."""
        if self.point.where in (SAME_NUMBER, MEAN):
            return f"the {self.point.where} in every element"
        if self.name:
            return self._of_parameter(at)
        if self.point == at.point and not self.ago:
            return f"number {self.number + 1} of the tensors there"
        words = [f"microbatch {self.point.microbatch}'s"]
        if self.point.where != at.point.where:
            words.append(self.point.where)
        if self.point.stage != at.point.stage:
            words.append(f"at stage {self.point.stage}")
        if self.ago:
            words.append("of the previous step" if self.ago == 1 else f"of {self.ago} operations earlier")
        return " ".join(words)

    def _of_parameter(self, at: "Label") -> str:
        own = self.name == at.name and self.point.stage == at.point.stage
        stage = f" of stage {self.point.stage}" if self.point.stage != at.point.stage else ""
        if self.point.where == PARAMETER:
            return "the parameters themselves" if own else f"the parameter {self.name}{stage}"
        if self.ago:
            return "an earlier step's gradients" if own else f"an earlier step's gradient of {self.name}{stage}"
        return f"that of {self.name}{stage}"


@dataclass(frozen=True)
class Elements:
    """Some elements of a tensor: whole lines of it by their numbers (``line`` is "row", "column" or "element").

    Without such lines, ``count`` elements ``of`` all. ``first`` and ``last`` are those of the tensor laid end to end.
    """

    count: int
    of: int
    first: int
    last: int
    line: str = ""
    numbers: tuple[int, ...] = ()
    lines: int = 0

    @property
    def text(self) -> str:
        if not self.line:
            return f"{self.count} of {self.of} elements"
        return numbered(self.line, self.numbers, self.lines)

    @property
    def is_run(self) -> bool:
        """Whether they lie together, but for a few that may be right by chance."""
        return self.count >= 0.9 * (self.last - self.first + 1)

    @property
    def is_tail(self) -> bool:
        """Whether they are a run up to the end, and not all there is."""
        return self.is_run and self.last == self.of - 1 and self.first > 0


def numbered(word: str, numbers: Sequence[int], count: int) -> str:
    """``row 3``, ``rows 2 to 5``, ``rows 1, 4``, or how many."""
    if len(numbers) == 1:
        return f"{word} {numbers[0]}"
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{word}s {numbers[0]} to {numbers[-1]}"
    if len(numbers) <= SHOWN:
        return f"{word}s {', '.join(map(str, numbers))}"
    return f"{len(numbers)} of {count} {word}s"


@dataclass(frozen=True)
class Likeness:
    """What a tensor is in place of the one that is due.

    kind: missing, unexpected, shape, not-finite, zero, rounded (to ``narrow``), multiple (``factor`` times its own),
    reordered (its ``line``s), other (whose: ``label``), counted (each microbatch in it so often: ``counts``), sum
    (``factor`` of its own and ``more`` of ``label``'s), noisy, different (like nothing known), or right (although what
    is around it is not).

    ``at`` is its own place. ``part``: the elements concerned, where all others are right; ``source``: where in the due
    tensor these belong. ``error`` and ``cosine`` are against the due tensor. ``which`` names the tensor, and ``words``
    are those of a place that knows more than this.
    """

    kind: str
    at: Label | None = None
    label: Label | None = None
    factor: float | None = None
    more: float | None = None
    part: Elements | None = None
    source: Elements | None = None
    line: str = ""
    narrow: str = ""
    counts: tuple[tuple[int, float], ...] = ()
    error: float | None = None
    cosine: float | None = None
    forms: tuple[str, str] = ("", "")
    which: str = ""
    words: str = ""

    @property
    def is_known(self) -> bool:
        """Whether this says what it is, and not only that it is another."""
        return self.kind not in ("different", "noisy")

    @property
    def text(self) -> str:
        """What it is, in words that follow "is"."""
        found = self.words or _IS[self.kind](self)
        return f"wrong in {self.part.text} alone, where it is {found}" if self.part is not None else found

    @property
    def change(self) -> str:
        """What was done to it, in words that follow "was"."""
        found = "set to zero" if self.part is not None and self.kind == "zero" else _WAS[self.kind](self)
        return f"{found} in {self.part.text}" if self.part is not None else found

    @property
    def parameter(self) -> str:
        """The parameter whose gradient it is; empty where it is none."""
        return "" if self.at is None else self.at.name

    @property
    def whose(self) -> str:
        """Whose it is, or whose is in it."""
        return "" if self.label is None or self.at is None else self.label.text(self.at)


def _expected(found: Likeness) -> str:
    """Whose it is, and whose it should be."""
    if found.source is not None:
        return f"what belongs in {found.source.text}"
    at = found.at
    wanted = ""
    if at is not None and not at.name and found.label is not None:
        same = found.label.point == at.point and not found.label.ago
        wanted = f", expected number {at.number + 1}" if same else f", expected microbatch {at.point.microbatch}'s"
    return f"{found.whose}{wanted if found.part is None else ''}"


def _sum(found: Likeness) -> str:
    own, more = found.factor or 0.0, found.more or 0.0
    plain = abs(own - 1) <= _NO_PART
    if plain and abs(more - 1) <= _NO_PART:
        return f"the expected plus {found.whose}"
    return f"{'the expected' if plain else f'{digits(own)} of the expected'} plus {digits(more)} of {found.whose}"


def _added(found: Likeness) -> str:
    own, more = found.factor or 0.0, found.more or 0.0
    where = None if found.label is None else found.label.point.where
    if where in (SAME_NUMBER, MEAN) and abs(own - 1) <= _NO_PART:
        return "rid of its mean" if where == MEAN else "given the same number more in every element"
    if abs(own) <= _NO_PART * abs(more):
        return f"replaced by {digits(more)} times {found.whose}"
    if abs(own - 1) <= _NO_PART:
        return f"given {digits(more)} of {found.whose} more"
    return f"made {digits(own)} of its own and {digits(more)} of {found.whose}"


def _nothing_known(found: Likeness) -> str:
    if found.error is None:
        return "like nothing known"
    cosine = "" if found.cosine is None else f", cosine {found.cosine:.4f}"
    return f"like nothing known: relative error {found.error:.1e}{cosine}"


_IS: Mapping[str, Callable[[Likeness], str]] = {
    "missing": lambda found: "none",
    "unexpected": lambda found: "a tensor where there should be none",
    "shape": lambda found: f"{found.forms[0]}, expected {found.forms[1]}",
    "not-finite": lambda found: "not finite",
    "zero": lambda found: "zero",
    "rounded": lambda found: f"{found.narrow}-rounded",
    "multiple": lambda found: f"{digits(found.factor or 0.0, 6)} times the expected",
    "reordered": lambda found: f"its own {found.line}s in another order",
    "other": _expected,
    "counted": lambda found: ", ".join(f"{digits(c)} of microbatch {m}'s" for m, c in found.counts),
    "sum": _sum,
    "noisy": lambda found: "close to the expected one, but not equal",
    "different": _nothing_known,
    "right": lambda found: "right",
}
_WAS: Mapping[str, Callable[[Likeness], str]] = {
    **_IS,
    "missing": lambda found: "cleared",
    "unexpected": lambda found: "put there" if found.label is None else "an earlier step's were put there",
    "not-finite": lambda found: "made not finite",
    "zero": lambda found: "cleared",
    "multiple": lambda found: f"multiplied by {digits(found.factor or 0.0)}",
    "reordered": lambda found: "put in another order",
    "other": lambda found: f"replaced by {found.whose}",
    "sum": _added,
    "different": lambda found: "changed into what is like nothing known" if found.part is None else "changed",
}

"""Likeness: what a wrong tensor is and where it came from, with all texts about it."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Self

import torch

from pipeproof.core.observe.recording import Point, Site
from pipeproof.pipeline.sizes import SHOWN, digits

# Narrower types a tensor may pass through, by usual names.
NARROWER = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDED_TO = {**NARROWER, "fp32": torch.float32}  # targets for rounding from wider types


def narrower(dtype: torch.dtype) -> Collection[str]:
    """Return names of narrower types for ``dtype``."""
    return (ROUNDED_TO if dtype is torch.float64 else NARROWER).keys()


GRADIENT, PARAMETER = "gradient", "parameter"  # places for parameter tensors
SAME_NUMBER, MEAN = "same number", "mean"  # constant shifts, possible for any tensor
_NO_PART = 1e-2  # a coefficient this near to 0 or 1 counts as equal


@dataclass(frozen=True)
class Label:
    """Names a reference tensor: its place, or its parameter ``name``.

    ago: operations before the current one. number: index among several tensors at one place.
    """

    point: Point
    ago: int = 0
    number: int = 0
    name: str = ""

    @classmethod
    def of_gradient(cls, site: Site, *, ago: int = 0) -> Self:
        """Label a parameter's gradient on one stage."""
        return cls(Point(site[0], -1, GRADIENT), ago, name=site[1])

    def text(self, at: "Label") -> str:
        """Describe the label relative to ``at``, without common parts."""
        if self.point.where in (SAME_NUMBER, MEAN):
            return f"the {self.point.where} in every element"
        stage = f" of stage {self.point.stage}" if self.point.stage != at.point.stage else ""
        own = self.name == at.name and not stage
        if self.name and self.point.where == PARAMETER:
            return "the parameters themselves" if own else f"the parameter {self.name}{stage}"
        if self.name and self.ago:
            return "an earlier step's gradients" if own else f"an earlier step's gradient of {self.name}{stage}"
        if self.name:
            return f"that of {self.name}{stage}"
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


@dataclass(frozen=True)
class Elements:
    """Selected elements: whole lines by number (``line``: "row", "column" or "element").

    Otherwise ``count`` elements ``of`` all. first, last: positions in the flattened tensor.
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
        first, *others = self.numbers
        if not others:
            return f"{self.line} {first}"
        if list(self.numbers) == list(range(first, others[-1] + 1)):
            return f"{self.line}s {first} to {others[-1]}"
        if len(self.numbers) <= SHOWN:
            return f"{self.line}s {', '.join(map(str, self.numbers))}"
        return f"{len(self.numbers)} of {self.lines} {self.line}s"

    @property
    def is_run(self) -> bool:
        """True for adjacent elements, up to chance matches."""
        return self.count >= 0.9 * (self.last - self.first + 1)

    @property
    def is_tail(self) -> bool:
        """True for a run to the end, but not the whole tensor."""
        return self.is_run and self.last == self.of - 1 and self.first > 0


@dataclass(frozen=True)
class Likeness:
    """A wrong tensor's nature, beside its expectation.

    kind: missing, unexpected, shape, not-finite, zero, rounded (to ``narrow``), multiple (``factor`` times its own),
    reordered (its ``line``s), other (whose: ``label``), counted (each microbatch's share: ``counts``), sum (``factor``
    times its own plus ``more`` times ``label``'s), noisy, different (like nothing known), or right (although its
    surroundings are wrong).

    at: its own place. part: affected elements, if all others are right; source: where they belong in the expected
    tensor. error, cosine: against the expected tensor. which: the tensor's name. words: text from a better informed
    place.
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
        """True if the origin is known."""
        return self.kind not in ("different", "noisy")

    @property
    def text(self) -> str:
        """Nature, as a predicate after "is"."""
        found = self.words or _IS[self.kind](self)
        return f"wrong in {self.part.text} alone, where it is {found}" if self.part is not None else found

    @property
    def change(self) -> str:
        """Change, as a predicate after "was"."""
        found = "set to zero" if self.part is not None and self.kind == "zero" else _WAS[self.kind](self)
        return f"{found} in {self.part.text}" if self.part is not None else found

    @property
    def parameter(self) -> str:
        """Parameter name for a gradient; empty for other tensors."""
        return "" if self.at is None else self.at.name

    @property
    def whose(self) -> str:
        """Owner, or contributor, in words."""
        return "" if self.label is None or self.at is None else self.label.text(self.at)


def _expected(found: Likeness) -> str:
    """Name the actual owner, and the right one."""
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


def _describe_sum(found: Likeness) -> str:
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
    "sum": _describe_sum,
    "different": lambda found: "changed into what is like nothing known" if found.part is None else "changed",
}

"""Oracles: right answers, and the conditions for judging a step."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from torch import Tensor

from pipeproof.core.comparison import Follow
from pipeproof.core.floors import Floors
from pipeproof.core.limits import Precision, precision_among
from pipeproof.core.nudged import Nudged, OtherProducts
from pipeproof.core.updates import Orders, Pending
from pipeproof.reference.data import Batch
from pipeproof.reference.step import Expected, Gradient, Reference, Site, clip_factor


@dataclass(frozen=True)
class Answer:
    """Expected results for one operation. ``floors``: for training; ``max_norm``: its clipping bound.

    follow: maps observed gradients to norm and parameters; called once.
    """

    expected: Expected
    floors: Floors | None
    max_norm: float
    follow: Follow | None = None


class Oracle(Protocol):
    """Source of right answers."""

    @property
    def precision(self) -> Precision:
        """The answers' precision."""

    def answer(self, number: int, orders: Orders) -> Answer:
        """Answer operation ``number`` for given backward orders by stage. Called once each, in plan order."""

    def nudged(self, number: int) -> Nudged | None:
        """Measure movement under weights one rounding off in operation ``number``. None if unknown."""
        return None

    def products(self, number: int) -> OtherProducts | None:
        """Return products that ranks rounded otherwise in operation ``number``, or None."""
        return None


class LiveOracle(Oracle):
    """Runs the reference through a plan. ``batches`` and ``max_norm`` take an operation's number."""

    def __init__(
        self,
        reference: Reference,
        *,
        plan: Sequence[str],
        batches: Callable[[int], Sequence[Batch]],
        max_norm: Callable[[int], float],
    ) -> None:
        self._reference = reference
        self._plan = tuple(plan)
        self._batches = batches
        self._max_norm = max_norm
        self._pending: list[Pending] = []  # operations before the next update

    @property
    def precision(self) -> Precision:
        """The reference parameters' precision."""
        return precision_among(self._reference.model.parameters())

    def answer(self, number: int, orders: Mapping[int, Sequence[int]]) -> Answer:
        """Run operation ``number``."""
        name, batches, max_norm = self._plan[number], self._batches(number), self._max_norm(number)
        expected = self._reference.perform(name, batches, orders=orders, update=False)
        if name == "eval":
            return Answer(expected, None, max_norm)
        self._pending.append(Pending(expected, batches, orders))
        floors = Floors(self._reference, tuple(self._pending))
        if name != "train":
            return Answer(expected, floors, max_norm)
        self._pending.clear()
        return Answer(expected, floors, max_norm, partial(self._follow, max_norm))

    def _follow(self, max_norm: float, gradients: Mapping[Site, Gradient]) -> tuple[float, Mapping[Site, Tensor]]:
        norm = self._reference.norm(gradients)
        return norm, self._reference.step(gradients, clip_factor(norm, max_norm or self._reference.recipe.max_norm))


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Conditions on actions and parameters.

    plan: operations. counts: microbatches per operation. expected: sites that ranks must hold. unmatched: sites unknown
    to the reference. unseen: stages without observed actions. uncalled: stages with unwatched modules. frozen: stages
    that owe no backward. traced: stages whose actions the step itself reports. weightless: microbatches without a
    training loss, which owe no backward. mode_matters: whether training mode changes any result.
    """

    counts: tuple[int, ...]
    plan: tuple[str, ...] = ("train",)
    expected: frozenset[Site] = frozenset()
    unmatched: Mapping[Site, str] = field(default_factory=dict)
    unseen: Collection[int] = ()
    uncalled: Collection[int] = ()
    frozen: Collection[int] = ()
    traced: Collection[int] = ()
    weightless: Collection[int] = ()
    mode_matters: Callable[[], bool] = lambda: True


@dataclass(frozen=True, kw_only=True)
class Requirements(Conditions):
    """Facts about a run before any comparison.

    config: the run's name. bindings: its numbers in words. tied: parameters with copies in several stages, as names by
    stage. skipped: inapplicable laws with reasons. missed: unobserved laws with reasons. remarks: notes on other laws.
    foreign: the step is not ours. Its ranks may leave losses and norm to others; and if all results are right, calls,
    boundaries and starting weights decide nothing.
    """

    config: str
    laws: tuple[str, ...]
    oracle: Oracle
    tied: Sequence[Mapping[int, str]] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    missed: Mapping[str, str] = field(default_factory=dict)
    remarks: Mapping[str, str] = field(default_factory=dict)
    foreign: bool = False
    bindings: str = ""

"""What is judged, under which conditions, and what the right answers are."""

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
    """What one operation must give. ``floors`` are those of a training step; ``max_norm`` is what it clips to.

    ``follow``: the norm and the parameters that follow from gradients; asked once, for those that were observed.
    """

    expected: Expected
    floors: Floors | None
    max_norm: float
    follow: Follow | None = None


class Oracle(Protocol):
    """Whoever knows the right answers."""

    @property
    def precision(self) -> Precision:
        """How the answers are rounded."""

    def answer(self, number: int, orders: Orders) -> Answer:
        """Operation ``number`` of the plan, with each stage's backwards in the order given. Asked in order, once."""

    def moved(self, number: int) -> Nudged | None:
        """How far weights that are one rounding off move operation ``number``; None where nobody knows."""

    def products(self, number: int) -> OtherProducts | None:
        """The products of operation ``number`` that the ranks rounded otherwise; None where there are none."""


def precision_of_reference(reference: Reference) -> Precision:
    """How a reference's parameters are rounded; those of one dtype, as a rule."""
    return precision_among(reference.model.parameters())


class LiveOracle:
    """Runs the reference through a plan. ``batches`` and ``max_norm`` are asked for the number of an operation."""

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
        self._pending: list[Pending] = []  # operations whose gradients the next update uses

    @property
    def precision(self) -> Precision:
        """That of the reference's parameters."""
        return precision_of_reference(self._reference)

    def answer(self, number: int, orders: Mapping[int, Sequence[int]]) -> Answer:
        """Perform operation ``number``."""
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

    def moved(self, number: int) -> None:
        """Nobody asks that of our own runtime: it is held to bits."""

    def products(self, number: int) -> None:
        """Our own runtime computes in this process's own way."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What must hold of actions and parameters.

    ``plan`` are the operations, and ``counts`` how many microbatches each has. ``due`` are the sites that must be held;
    ``unmatched`` are held and not known to the reference. ``unseen`` stages are those whose actions nobody noted,
    ``uncalled`` those whose modules nobody watched, ``frozen`` those that owe no backward, ``traced`` those whose
    actions the step itself tells. ``weightless``: the microbatches whose losses train nothing, and that owe none.
    ``mode_matters``: whether a mode changes any result.
    """

    counts: tuple[int, ...]
    plan: tuple[str, ...] = ("train",)
    due: frozenset[Site] = frozenset()
    unmatched: Mapping[Site, str] = field(default_factory=dict)
    unseen: Collection[int] = ()
    uncalled: Collection[int] = ()
    frozen: Collection[int] = ()
    traced: Collection[int] = ()
    weightless: Collection[int] = ()
    mode_matters: Callable[[], bool] = lambda: True


@dataclass(frozen=True, kw_only=True)
class Requirements(Conditions):
    """What is known of a run before anything is compared.

    ``config`` names it, ``bindings`` says its numbers in words. ``tied``: parameters with copies in several stages, for
    each the name of its copy by stage. ``skipped`` are laws that do not apply, with the reason, ``missed`` those of
    whose matter nothing was seen, and ``remarks`` what readers of others should know. Where ``every_rank`` is False,
    ranks may leave it to others to report losses and norm. ``results_decide``: calls, boundaries and starting weights
    decide nothing where every result is right.
    """

    config: str
    laws: tuple[str, ...]
    oracle: Oracle
    tied: Sequence[Mapping[int, str]] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    missed: Mapping[str, str] = field(default_factory=dict)
    remarks: Mapping[str, str] = field(default_factory=dict)
    every_rank: bool = True
    results_decide: bool = False
    bindings: str = ""

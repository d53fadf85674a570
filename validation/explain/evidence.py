"""What an explanation rests on: the broken laws, and of the run that they are about as much as is known."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

from torch import Tensor

from pipeproof.core.limits import PRECISIONS
from pipeproof.core.observe.observed import Observed, Passed
from pipeproof.core.observe.recording import RECEIVED, Recording, Site
from pipeproof.core.old_weights import StaleCall, WithWeights
from pipeproof.core.verdict import Verdict
from pipeproof.explain.atoms import Update
from pipeproof.explain.attribution import Attribution, attribute, update_of
from pipeproof.explain.copies import Makeup, makeups
from pipeproof.explain.divergence import Divergence, Ground, Positions, divergences
from pipeproof.explain.loss_scale import LossScale
from pipeproof.explain.members import Members
from pipeproof.explain.model_beside import ModelBeside
from pipeproof.explain.played import Played, Setup, beside_of, play
from pipeproof.reference.copies import copies_apart
from pipeproof.reference.step import Expected, Gradient

Found = TypeVar("Found")

_OF_GRADIENTS = ("gradient", "presence", "tied-copies")


class RightOperation(Protocol):
    """What is known of the right operation, where the run cannot be played again; it begins with ``weights``."""

    @property
    def expected(self) -> Expected: ...

    @property
    def update(self) -> Update: ...

    @property
    def weights(self) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True)
class Line:
    """What one line of ranks did, and what passed the boundaries of its watched stages."""

    seen: Observed
    passed: Mapping[int, Passed]


_MADE_RIGHT = "gradients are off by more than rounding explains, and are made of what they should be nevertheless"
_COARSE = "gradients differ by no more than rounding allows: it is so coarse here that it may hide a lost microbatch"


@dataclass(frozen=True)
class Evidence:
    """A failed verdict with what is known of the run that it is about. A rule names the parts that it needs.

    What there always is: ``placement`` has the rank of every stage, ``number`` is the operation that disagrees, and
    ``gradients`` and ``norms`` are those that ranks had in it.

    The parts: ``playable`` is what it takes to play the run again on one device, ``played`` the reference's operations
    up to this one, and ``due`` what is known of the right operation otherwise; ``beside`` is the model that gives it.
    ``seen`` is what the ranks did. ``passed`` is what passed the boundaries of watched stages: of one line of ranks;
    ``others`` are further ones, which hold the same stages. ``earlier_weights``: those that operations before it began
    with, the latest first, ``with_weights`` what it gives with others than its own, and ``stale`` the calls that were
    given what those before had. ``members`` are ranks with stages in common. ``clipped_to`` is what somebody says of
    the step's clipping. ``scale``: how losses are scaled, where they are. ``left_out`` wrong gradients were not kept.
    ``alike``: all microbatches are the same, and known together alone.

    ``unseen`` are stages of which nobody knows what they did; of the ``told`` ones the step says it itself; to the
    ``frozen`` ones no gradient flows. ``strange``: there are parameters that the reference does not have, and the
    option ``renamed_by`` says which they are. ``lengths``: the norms of gradients that are with their ranks alone.
    What is costly is worked out when first asked for.
    """

    verdict: Verdict
    placement: Sequence[int]
    microbatches: int
    ranks: int
    gradients: Mapping[Site, Gradient]
    norms: Sequence[float | None]
    number: int = 0
    operation: str = "train"
    playable: Setup | None = None
    due: RightOperation | None = None
    beside: ModelBeside | None = None
    seen: Observed | None = None
    passed: Mapping[int, Passed] = field(default_factory=dict)
    others: tuple[Line, ...] = ()
    earlier_weights: Sequence[Mapping[str, Tensor]] = ()
    with_weights: WithWeights | None = None
    stale: tuple[StaleCall, ...] = ()
    members: Members | None = None
    left_out: int = 0
    alike: bool = False
    clipped_to: float | None = None
    scale: LossScale | None = None
    unseen: frozenset[int] = frozenset()
    told: frozenset[int] = frozenset()
    frozen: range = range(0)
    strange: bool = False
    renamed_by: str = ""
    lengths: Mapping[Site, float] = field(default_factory=dict)
    played: Sequence[Played] = ()
    _found: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, look: "Callable[[Evidence], Found]") -> Found:
        """What ``look`` finds here: it is costly, and several rules ask for it."""
        if look not in self._found:
            self._found[look] = look(self)
        return self._found[look]  # type: ignore[no-any-return]

    @property
    def setup(self) -> Setup:
        assert self.playable is not None, "asked for by rules that need it"
        return self.playable

    @property
    def observed(self) -> Observed:
        assert self.seen is not None, "asked for by rules that need it"
        return self.seen

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def sizes(self) -> Mapping[Site, float]:
        """The norms of gradients."""
        known = {site: float(one.double().norm()) for site, one in self.gradients.items() if one is not None}
        return known or self.lengths

    def holders(self, stage: int) -> list[int]:
        """The ranks that hold ``stage``."""
        return ([] if self.members is None else self.members.ranks(stage)) or [self.placement[stage]]

    def held(self, rank: int) -> frozenset[Site] | None:
        """Whose gradients ``rank`` has; None where it has parts of some, or where nobody knows."""
        if self.members is None:
            return frozenset(site for site in self.gradients if self.placement[site[0]] == rank)
        own = [(name, one) for name, every in self.members.held.items() for one in every if one.rank == rank]
        sites = {site if (site := (one.stage, name)) in self.gradients else self._site(name) for name, one in own}
        return None if any(one.where is not None for _, one in own) else frozenset(sites)

    def _site(self, name: str) -> Site:
        """Where a parameter is that is known in one stage of several."""
        return next(site for site in self.gradients if site[1] == name)

    @property
    def lines(self) -> "list[Evidence]":
        """This, and the same as each other line of ranks shows it."""
        return [self, *(self._along(line) for line in self.others)]

    def _along(self, line: Line) -> "Evidence":
        placement = line.seen.schedule.placement
        return replace(self, seen=line.seen, passed=line.passed, placement=placement, others=())

    @property
    def used(self) -> Mapping[str, int]:
        """By parameter, when the module ends that uses it in the reference, where that is known."""
        ended = {} if self.beside is None else self.beside.modules
        return {name: ended.get(name.rpartition(".")[0], 0) for _, name in self.expected.gradients if ended}

    @property
    def max_norm(self) -> float | None:
        """What gradients are clipped to, where somebody says so."""
        return self.clipped_to if self.playable is None else self.playable.max_norm(self.number)

    @cached_property
    def concerned(self) -> range:
        """The operations whose gradients the failing one uses; an error may lie in any of them."""
        updates = [k for k in range(self.number) if self.setup.plan[k] == "train"]
        return range(updates[-1] + 1 if updates else 0, self.number + 1)

    @property
    def expected(self) -> Expected:
        """What the failing operation must give."""
        return self.played[self.number].expected if self.due is None else self.due.expected

    @cached_property
    def recording(self) -> Recording | None:
        """The failing operation's; None where the run was not recorded."""
        return self.recorded(self.number) if self.playable is not None and self.seen is not None else None

    def recorded(self, number: int) -> Recording | None:
        """That of an operation concerned."""
        return self._recordings.get(number)

    @cached_property
    def _recordings(self) -> Mapping[int, Recording]:
        return {k: one for k in self.concerned if (one := self.observed.recording(k)) is not None}

    @property
    def limit(self) -> float:
        """The largest relative error that rounding explains, as the laws measured it."""
        least = PRECISIONS[self.setup.dtype].least
        return max([least, *(m.limit for m in self.verdict.mismatches if m.limit is not None)])

    @cached_property
    def divergences(self) -> list[Divergence]:
        """What is first wrong in the first operation concerned that has any."""
        return self._first[1]

    @property
    def diverged(self) -> int:
        """The operation that the divergences are of."""
        return self._first[0]

    @cached_property
    def _first(self) -> tuple[int, list[Divergence]]:
        each = ((number, self._divergences(number)) for number in self.concerned)
        return next((one for one in each if one[1]), (self.number, []))

    @cached_property
    def shared(self) -> frozenset[Site]:
        """The copies of parameters that several stages hold."""
        return frozenset(site for copies in self.tied for site in copies)

    @cached_property
    def tied(self) -> list[list[Site]]:
        """For each parameter that several stages hold, its copies."""
        return [list(copies.items()) for copies in copies_apart(self.played[0].model, self.setup.owner)]

    @cached_property
    def attribution(self) -> Attribution | None:
        """What the gradients of the update that the failing operation is part of are made of.

        None without one, where gradients are right and nothing else can be asked, and where ranks have shards of sums
        that differ: together these are of no one sum.
        """
        if not self.differs("replicas") and self.shards_apart:
            return None
        if self.due is not None:
            return attribute(self.due.update) if self.gradients and any(map(self.differs, _OF_GRADIENTS)) else None
        updates = [k for k in range(self.number, len(self.setup.plan)) if self.setup.plan[k] == "train"]
        if not updates:
            return None
        played = self.played if updates[0] == self.number else play(self.setup, self.observed, updates[0])
        return attribute(update_of(self.setup, self.observed.gradients(updates[0]), played))

    @cached_property
    def makeups(self) -> Mapping[str, Makeup]:
        """By parameter, what is known of the gradients of all ranks that hold it."""
        return {} if self.members is None else makeups(self.members, self.expected)

    @property
    def shards_apart(self) -> bool:
        """Whether ranks' parts of gradients are not made of microbatches alike."""
        return (
            self.members is not None and self.members.in_shards and not all(one.alike for one in self.makeups.values())
        )

    @property
    def unexplained(self) -> tuple[str, ...]:
        """What attribution says of gradients that it finds nothing for, and what it could not try."""
        found = self.attribution
        if found is None:
            return ()
        if self.alike:
            return ("all microbatches are the same: a multiple of their sum may be a sum of fewer, or more, of them",)
        if found.right and self.differs("gradient"):
            return (_MADE_RIGHT if self._beyond_rounding else _COARSE,)
        untried = getattr(self.due.update.now, "unpaired", "") if self.due is not None and found.unknown else ""
        return tuple(filter(None, (*found.unknown, untried)))

    @property
    def _beyond_rounding(self) -> bool:
        """Whether any gradient is off by more than rounding allows."""
        return any(m.law == "gradient" and not m.within for m in self.verdict.mismatches)

    def flowed_right(self, stages: Collection[int], factor: float | None) -> bool:
        """Whether every output gradient of these stages was compared, and was not ``factor`` times what it should be.

        With replicas they may pass as those of one or as those of all.
        """
        replicas = 1 if self.members is None else self.members.replicas.count
        if self.seen is None or factor in (float(replicas), 1 / replicas):
            return False
        crossings = [one for one in self.seen.crossings(self.number) if one.where == RECEIVED]
        right = {(one.action.stage, one.action.microbatch) for one in crossings if one.judged and one.same}
        wrong = {one.action.stage for one in crossings if not one.same}
        every = {(stage, microbatch) for stage in stages for microbatch in range(self.microbatches)}
        return bool(every) and right >= every and wrong.isdisjoint(stages)

    def backwards(self, stage: int) -> Sequence[int]:
        """The microbatches whose backwards added to the gradients of ``stage``, in order; empty where nobody saw it."""
        if self.recording is not None:
            return self.recording.adders.get(stage, ())
        return () if self.seen is None else self.seen.backwards(self.number).get(stage, ())

    def differs(self, law: str) -> bool:
        """Whether ``law`` has a mismatch."""
        return any(mismatch.law == law for mismatch in self.verdict.mismatches)

    def wrong(self, *laws: str) -> frozenset[Site]:
        """The parameters of which any of ``laws`` has a mismatch, and more than rounding alone may be."""
        found = [m for m in self.verdict.mismatches if m.law in laws and not m.within]
        return frozenset((m.stage, m.parameter) for m in found if m.stage is not None and m.parameter is not None)

    def ground(self, number: int) -> Ground:
        """What a recording of operation ``number`` is held against."""
        earlier = [one.tensors() for one in reversed(self.played[:number])]
        return Ground(self.played[number].tensors(), earlier, self.limit)

    def _divergences(self, number: int) -> list[Divergence]:
        recording = self.recorded(number)
        if recording is None:
            return []
        ground = self.ground(number)
        executed = [rank[number].executed for rank in self.observed.ranks]
        slots = {str(action): slot for actions in executed for slot, action in enumerate(actions)}
        return divergences(recording, ground, Positions(self.observed.schedule.placement, slots))


def of_run(setup: Setup, observed: Observed, verdict: Verdict) -> Evidence:
    """All that is known of a run of our own: its ranks said what they did, and it can be played again."""
    number = failing(verdict)
    played = play(setup, observed, number)
    return Evidence(
        verdict,
        setup.placement,
        setup.microbatches,
        setup.ranks,
        gradients=observed.gradients(number),
        norms=[rank[number].norm for rank in observed.ranks],
        number=number,
        operation=setup.plan[number],
        playable=setup,
        played=played,
        beside=beside_of(setup, played[number]),
        seen=observed,
    )


def failing(verdict: Verdict) -> int:
    """The operation that disagrees."""
    return min(mismatch.operation for mismatch in verdict.mismatches) - 1

"""Evidence for an explanation: the broken laws, and the known facts about their run."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

from torch import Tensor

from pipeproof.core.limits import PRECISIONS
from pipeproof.core.observe.observed import Observed, Passed
from pipeproof.core.observe.recording import RECEIVED, Recording, Site
from pipeproof.core.old_weights import OldWeights, StaleCall, WithWeights, find_old_weights
from pipeproof.core.verdict import Verdict
from pipeproof.explain.atoms import Update
from pipeproof.explain.attribution import Attribution, attribute, update_of
from pipeproof.explain.divergence import Divergence, Ground, divergences
from pipeproof.explain.loss_scale import LossScale
from pipeproof.explain.members import Copy, Members, are_alike, makeups
from pipeproof.explain.played import ModelBeside, Played, Setup, model_beside, play
from pipeproof.reference.copies import copies_apart
from pipeproof.reference.step import Expected, Gradient

Found = TypeVar("Found")

_OF_GRADIENTS = ("gradient", "presence", "tied-copies")


class RightOperation(Protocol):
    """The right operation for a run that cannot be replayed; it begins with ``weights``."""

    @property
    def expected(self) -> Expected: ...

    @property
    def update(self) -> Update: ...

    @property
    def weights(self) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True)
class Line:
    """A line through ranks: observed actions, and tensors at watched boundaries."""

    observed: Observed
    passed: Mapping[int, Passed]


_MADE_RIGHT = "gradients are off by more than rounding explains, and are made of what they should be nevertheless"
_COARSE = "gradients differ by no more than rounding allows: it is so coarse here that it may hide a lost microbatch"


@dataclass(frozen=True)
class Evidence:
    """A failed verdict with the known facts about its run. A rule names the parts that it needs.

    Always present: ``placement``, the rank of every stage; ``number``, the operation that disagrees; ``gradients`` and
    ``norms``, observed in it. The parts: ``playable``: the setup to play the run again on one device; ``played``: the
    reference's operations up to this one; ``right``: the right operation from elsewhere; ``beside``: the model that
    gives it. ``run``: the ranks' actions. ``passed``: tensors at the boundaries of watched stages, of one line of
    ranks; ``others``: further lines with the same stages. ``earlier_weights``: initial weights of operations before it,
    latest first; ``with_weights``: the result with other weights; ``stale``: calls with inputs of earlier ones.
    ``members``: ranks with stages in common. ``clipped_to``: the declared norm for clipping. ``scale``: the loss scale,
    if any. ``left_out``: the number of wrong gradients too large to keep. ``alike``: all microbatches are equal, and
    only their sum is known. ``unseen``: unobserved stages; ``traced``: stages that the step itself describes;
    ``frozen``: stages without gradient flow. ``strange``: the reference lacks some parameters, and the option
    ``renamed_by`` maps them. ``lengths``: norms of gradients that stay with their ranks. Costly parts are computed on
    first use.
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
    right: RightOperation | None = None
    beside: ModelBeside | None = None
    run: Observed | None = None
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
    traced: frozenset[int] = frozenset()
    frozen: range = range(0)
    strange: bool = False
    renamed_by: str = ""
    lengths: Mapping[Site, float] = field(default_factory=dict)
    played: Sequence[Played] = ()
    _found: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, look: "Callable[[Evidence], Found]") -> Found:
        """Cache a costly result that several rules need."""
        if look not in self._found:
            self._found[look] = look(self)
        return self._found[look]  # type: ignore[no-any-return]

    @property
    def setup(self) -> Setup:
        assert self.playable is not None, "asked for by rules that need it"
        return self.playable

    @property
    def observed(self) -> Observed:
        assert self.run is not None, "asked for by rules that need it"
        return self.run

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def sizes(self) -> Mapping[Site, float]:
        """Gradient norms by site."""
        known = {site: float(one.double().norm()) for site, one in self.gradients.items() if one is not None}
        return known or self.lengths

    def holders(self, stage: int) -> list[int]:
        """Return the ranks that hold ``stage``."""
        return ([] if self.members is None else self.members.ranks(stage)) or [self.placement[stage]]

    @property
    def lines(self) -> "list[Evidence]":
        """This evidence, and a copy for each further line through ranks."""
        more = [
            replace(self, run=one.observed, passed=one.passed, placement=one.observed.schedule.placement, others=())
            for one in self.others
        ]
        return [self, *more]

    @property
    def used(self) -> Mapping[str, int]:
        """By parameter, when the reference's module with it ends, if known."""
        ended = {} if self.beside is None else self.beside.modules
        return {name: ended.get(name.rpartition(".")[0], 0) for _, name in self.expected.gradients if ended}

    @property
    def max_norm(self) -> float | None:
        """The declared clipping norm, if any."""
        return self.clipped_to if self.playable is None else self.playable.max_norm(self.number)

    @cached_property
    def concerned(self) -> range:
        """Operations whose gradients the failing operation uses; an error may lie in any."""
        updates = [k for k in range(self.number) if self.setup.plan[k] == "train"]
        return range(updates[-1] + 1 if updates else 0, self.number + 1)

    @property
    def expected(self) -> Expected:
        """Expected results for the failing operation."""
        return self.played[self.number].expected if self.right is None else self.right.expected

    @property
    def old_weights(self) -> OldWeights | None:
        """The old weights with which the reference reproduces the failing operation, or None."""
        if self.right is None or self.with_weights is None:
            return None
        summed = self.expected.gradients if self.operation == "train" else {}  # others belong to no expected sum
        facts = self.verdict, self.gradients, {name: one for (_, name), one in summed.items()}, self.placement
        known, earlier, play = self.right.weights, self.earlier_weights, self.with_weights
        return find_old_weights(*facts, known=known, earlier=earlier, play=play)

    @property
    def recording(self) -> Recording | None:
        """The failing operation's recording, if any."""
        return self.recording_of(self.number) if self.playable is not None and self.run is not None else None

    def recording_of(self, number: int) -> Recording | None:
        """Return the recording for operation ``number``, if concerned."""
        return self._recordings.get(number)

    @cached_property
    def _recordings(self) -> Mapping[int, Recording]:
        return {k: one for k in self.concerned if (one := self.observed.recording(k)) is not None}

    @property
    def limit(self) -> float:
        """The largest relative error within rounding, from the laws' measurements."""
        least = PRECISIONS[self.setup.dtype].least
        return max([least, *(m.limit for m in self.verdict.mismatches if m.limit is not None)])

    @property
    def divergences(self) -> list[Divergence]:
        """The first wrong tensors in the first operation concerned with any."""
        return self._divergences[1]

    @property
    def diverged(self) -> int:
        """The operation with the divergences."""
        return self._divergences[0]

    @cached_property
    def _divergences(self) -> tuple[int, list[Divergence]]:
        for number, recording in self._recordings.items():
            executed = [rank[number].executed for rank in self.observed.ranks]
            slots = {action: slot for actions in executed for slot, action in enumerate(actions)}
            if found := divergences(recording, self.ground(number), self.observed.schedule.placement, slots):
                return number, found
        return self.number, []

    @cached_property
    def shared(self) -> frozenset[Site]:
        """Sites that hold shared parameters."""
        copies = copies_apart(self.played[0].model, self.setup.owner)
        return frozenset(site for one in copies for site in one.items())

    @cached_property
    def attribution(self) -> Attribution | None:
        """Attribution for the update with the failing operation.

        None without one, if gradients are right and no other source exists, and if ranks have shards of sums that
        differ: together they belong to no common sum.
        """
        if not self.differs("replicas") and self.shards_apart:
            return None
        if self.right is not None:
            return attribute(self.right.update) if self.gradients and any(map(self.differs, _OF_GRADIENTS)) else None
        updates = [k for k in range(self.number, len(self.setup.plan)) if self.setup.plan[k] == "train"]
        if not updates:
            return None
        played = self.played if updates[0] == self.number else play(self.setup, self.observed, updates[0])
        return attribute(update_of(self.setup, self.observed.gradients(updates[0]), played))

    @cached_property
    def makeups(self) -> Mapping[str, Sequence[Copy]]:
        """By parameter, the gradients on all holding ranks, with their counts."""
        return {} if self.members is None else makeups(self.members, self.expected)

    @property
    def shards_apart(self) -> bool:
        """True if gradient shards differ in their counts."""
        return self.members is not None and self.members.in_shards and not all(map(are_alike, self.makeups.values()))

    @property
    def unexplained(self) -> tuple[str, ...]:
        """Unexplained gradients, and attempts left out."""
        found = self.attribution
        if found is None:
            return ()
        if self.alike:
            return ("all microbatches are the same: a multiple of their sum may be a sum of fewer, or more, of them",)
        if found.right and self.differs("gradient"):
            beyond = any(m.law == "gradient" and not m.within for m in self.verdict.mismatches)
            return (_MADE_RIGHT if beyond else _COARSE,)
        untried = self.right.update.now.unpaired if self.right is not None and found.unknown else ""
        return tuple(filter(None, (*found.unknown, untried)))

    def is_flow_right(self, stages: Collection[int], factor: float | None) -> bool:
        """True if every output gradient to these stages was compared, and differs from ``factor`` times the right
        value.

        With replicas they may pass as one replica's or as the sum of all.
        """
        replicas = 1 if self.members is None else self.members.replicas.count
        if self.run is None or factor in (float(replicas), 1 / replicas):
            return False
        crossings = [one for one in self.run.crossings(self.number) if one.where == RECEIVED]
        right = {(one.action.stage, one.action.microbatch) for one in crossings if one.judged and one.same}
        wrong = {one.action.stage for one in crossings if not one.same}
        every = {(stage, microbatch) for stage in stages for microbatch in range(self.microbatches)}
        return bool(every) and right >= every and wrong.isdisjoint(stages)

    def backwards(self, stage: int) -> Sequence[int]:
        """Microbatches whose backwards added to the gradients on ``stage``, in order; empty if unobserved."""
        if self.recording is not None:
            return self.recording.adders.get(stage, ())
        return () if self.run is None else self.run.backwards(self.number).get(stage, ())

    def differs(self, law: str) -> bool:
        """True if ``law`` failed anywhere."""
        return any(mismatch.law == law for mismatch in self.verdict.mismatches)

    def wrong(self, *laws: str) -> frozenset[Site]:
        """Sites where any law fails beyond rounding."""
        found = [m for m in self.verdict.mismatches if m.law in laws and not m.within]
        return frozenset((m.stage, m.parameter) for m in found if m.stage is not None and m.parameter is not None)

    def ground(self, number: int) -> Ground:
        """Reference tensors for a recording of operation ``number``."""
        earlier = [one.tensors for one in reversed(self.played[:number])]
        return Ground(self.played[number].tensors, earlier, self.limit)


def of_run(setup: Setup, observed: Observed, verdict: Verdict) -> Evidence:
    """Collect evidence from our own run: ranks report their actions, and it can be replayed."""
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
        beside=model_beside(setup, played[number]),
        run=observed,
    )


def failing(verdict: Verdict) -> int:
    """The first operation with a mismatch."""
    return min(mismatch.operation for mismatch in verdict.mismatches) - 1

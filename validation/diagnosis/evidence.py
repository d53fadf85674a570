"""What a diagnosis rests on: the broken laws, and of the run that they are about as much as is known."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from torch import Tensor

from pipeproof.core.limits import PRECISIONS
from pipeproof.core.old_weights import StaleCall, WithWeights
from pipeproof.core.verdict import Verdict
from pipeproof.diagnosis.atoms import Update
from pipeproof.diagnosis.attribution import Attribution, attribute, update_of
from pipeproof.diagnosis.copies import apart_by_rank
from pipeproof.diagnosis.divergence import Divergence, Ground, Positions, divergences
from pipeproof.diagnosis.interference import Broken, Sources, broken_between
from pipeproof.diagnosis.loss_scale import LossScale
from pipeproof.diagnosis.members import Members
from pipeproof.diagnosis.played import Played, Setup, parts_of, play
from pipeproof.diagnosis.record_sums import RecordSums
from pipeproof.diagnosis.sums import broken_additions
from pipeproof.diagnosis.unscaled import unscaled
from pipeproof.diagnosis.what_ifs import Tried
from pipeproof.observers.observed import Observed, Passed
from pipeproof.observers.recording import RECEIVED, Addition, Gradients, Recording, Site, of_stage
from pipeproof.observers.sketch import Sketch
from pipeproof.reference.copies import copies_apart
from pipeproof.reference.passage import Passage
from pipeproof.reference.step import Contribution, Expected, Gradient

_OF_GRADIENTS = ("gradient", "presence", "tied-copies")


class Due(Protocol):
    """What is known of the right operation, where the run cannot be played again; it begins with ``weights``."""

    @property
    def expected(self) -> Expected: ...

    @property
    def update(self) -> Update: ...

    @property
    def weights(self) -> Mapping[str, Tensor]: ...


class ModelBeside(Protocol):
    """The reference of a step that is not ours. ``divisor`` is that of a loss.

    ``ends`` are the places where a stage ends; none where that is not known. ``later`` are the modules that only stages
    after it hold. ``modules``: in which order they end, ``places``: where they put tensors out. ``plain``: it gives the
    same in evaluation. ``lacks``: whether it is known that a tensor of this form is no step of what a microbatch is
    computed by. ``played``: what a microbatch would give if something else passed, tied copies summed; None where it
    does not run so. ``loss_with``: the loss of a microbatch with the target of another, None where it has none such.
    """

    @property
    def divisor(self) -> float: ...

    def ends(self, stage: int) -> Collection[str]: ...

    def later(self, stage: int) -> Collection[str]: ...

    @property
    def modules(self) -> Mapping[str, int]: ...

    @property
    def places(self) -> Sequence[str]: ...

    @property
    def plain(self) -> bool: ...

    def lacks(self, microbatch: int, seen: Sketch) -> bool: ...

    def played(self, microbatch: int, passages: Sequence[Passage]) -> Contribution | None: ...

    def loss_with(self, microbatch: int, target_of: int) -> float | None: ...


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

    The parts: ``playable`` is what it takes to play the run again on one device, and ``due`` what is known of the right
    operation otherwise, ``beside`` the model that gives it. ``seen`` is what the ranks did. ``passed`` is what passed
    the boundaries of watched stages: of one line of ranks; ``others`` are further ones, which hold the same stages.
    ``earlier_weights``: those that operations before it began with, the latest first, ``with_weights`` what it gives
    with others than its own, and ``stale`` the calls that were given what those before had. ``members`` are ranks with
    stages in common. ``sums`` is there where all comes from a record. ``clipped_to`` is what a foreign step says of its
    clipping. ``scale``: how losses are scaled, where they are.

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
    due: Due | None = None
    beside: ModelBeside | None = None
    seen: Observed | None = None
    passed: Mapping[int, Passed] = field(default_factory=dict)
    others: tuple[Line, ...] = ()
    earlier_weights: Sequence[Mapping[str, Tensor]] = ()
    with_weights: WithWeights | None = None
    stale: tuple[StaleCall, ...] = ()
    members: Members | None = None
    sums: RecordSums | None = None
    clipped_to: float | None = None
    scale: LossScale | None = None
    unseen: frozenset[int] = frozenset()
    told: frozenset[int] = frozenset()
    frozen: range = range(0)
    strange: bool = False
    renamed_by: str = ""
    lengths: Mapping[Site, float] = field(default_factory=dict)

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
        found = set[int]()
        if self.members is not None:
            found = {rank for one in self.members.stages if one.index == stage for rank, _ in one.part.members}
        elif self.sums is not None:
            found = self.sums.holders(stage)
        return sorted(found) or [self.placement[stage]]

    def begun(self, name: str) -> frozenset[tuple[int, int]]:
        """The ranks and stages with something in a parameter's ``.grad`` before the step; none where nobody knows."""
        if self.sums is not None:
            return frozenset((self.sums.begun or {}).get(name, ()))
        stages = () if self.members is None else self.members.stages
        numbers = [(one, k) for one in stages for k, own in one.names.items() if own == name]
        return frozenset((rank, one.index) for one, k in numbers for rank, part in one.part.members if k in part.begun)

    def held(self, rank: int) -> frozenset[Site] | None:
        """Whose gradients ``rank`` has; None where it has parts of some, or where nobody knows."""
        if self.members is not None:
            own = [(one, part) for one in self.members.stages for at, part in one.part.members if at == rank]
            sites = ((one.index, name) for one, part in own for k, name in one.names.items() if k not in part.lacks)
            return None if any(part.shards for _, part in own) else frozenset(sites)
        if self.sums is None:
            return frozenset(site for site in self.gradients if self.placement[site[0]] == rank)
        return self.sums.held(rank, self.gradients)

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
        if self.playable is not None:
            return self.playable.max_norm(self.number)
        return self.clipped_to if self.sums is None else self.sums.max_norm

    @cached_property
    def concerned(self) -> range:
        """The operations whose gradients the failing one uses; an error may lie in any of them."""
        updates = [k for k in range(self.number) if self.setup.plan[k] == "train"]
        return range(updates[-1] + 1 if updates else 0, self.number + 1)

    @cached_property
    def played(self) -> list[Played]:
        """The reference's operations up to the failing one."""
        return play(self.setup, self.observed, self.number)

    @property
    def expected(self) -> Expected:
        """What the failing operation must give."""
        return self.played[self.number].expected if self.due is None else self.due.expected

    @cached_property
    def recording(self) -> Recording | None:
        """The failing operation's; None where the run was not recorded."""
        return self.recorded(self.number) if self.playable is not None and self.seen is not None else None

    def recorded(self, number: int) -> Recording | None:
        """That of an operation concerned, without its loss scale."""
        return self._recordings.get(number)

    @cached_property
    def _recordings(self) -> Mapping[int, Recording]:
        found = {k: one for k in self.concerned if (one := self.observed.recording(k)) is not None}
        return unscaled(found, self.played[self.number].tensors(), self.gradients) if self.number in found else found

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
    def broken_sums(self) -> list[Broken]:
        """What is wrong with sums of gradients, from the last stage down, as gradients flow."""
        found: list[Broken] = []
        start: dict[int, Gradients] = {}
        for number in self.concerned:
            recording = self.recorded(number)
            if recording is None or self.setup.plan[number] == "eval":
                continue
            for stage in reversed(range(self.setup.stages)):
                found += self._broken(number, stage, recording, start)
        return found

    @cached_property
    def tried(self) -> Tried:
        """What each stage may have computed in place of what it should, as far as that is still open."""
        return {}

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
        if self.members is not None and not self.differs("replicas") and apart_by_rank(self.members, self.expected):
            return None
        if self.due is not None:
            return attribute(self.due.update) if self.gradients and any(map(self.differs, _OF_GRADIENTS)) else None
        updates = [k for k in range(self.number, len(self.setup.plan)) if self.setup.plan[k] == "train"]
        if not updates:
            return None
        played = self.played if updates[0] == self.number else play(self.setup, self.observed, updates[0])
        return attribute(update_of(self.setup, self.observed.gradients(updates[0]), played))

    @property
    def unexplained(self) -> tuple[str, ...]:
        """What attribution says of gradients that it finds nothing for, and what it could not try."""
        found = self.attribution
        if found is None:
            return ()
        if self.sums is not None and self.sums.alike:
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

    def differs(self, law: str) -> bool:
        """Whether ``law`` has a mismatch."""
        return any(mismatch.law == law for mismatch in self.verdict.mismatches)

    def wrong(self, *laws: str) -> frozenset[Site]:
        """The parameters of which any of ``laws`` has a mismatch, and more than rounding alone may be."""
        found = [m for m in self.verdict.mismatches if m.law in laws and not m.within]
        return frozenset((m.stage, m.parameter) for m in found if m.stage is not None and m.parameter is not None)

    def earlier(self, stage: int) -> Gradients:
        """A stage's gradients in the training step before the failing one."""
        steps = [k for k in range(self.number) if self.setup.plan[k] == "train"]
        return of_stage(self.observed.gradients(steps[-1]), stage) if steps else {}

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

    def _broken(self, number: int, stage: int, recording: Recording, start: dict[int, Gradients]) -> list[Broken]:
        additions: Sequence[Addition] = recording.additions.get(stage, ())
        expected = self.played[number].expected
        again = [m for (s, m), ran in recording.graphs.items() if s == stage and len(ran) > 1]
        found = broken_additions(stage, additions, parts_of(expected), repeated=again)
        last: Gradients = additions[-1].after if additions else {}
        end = of_stage(recording.summed, stage) or last
        begun = start.get(stage, {})
        sources = Sources(earlier=self.earlier(stage), parameters=of_stage(recording.parameters, stage))
        found += broken_between(stage, additions, start=begun, end=end, sources=sources)
        start[stage] = last if self.setup.plan[number] == "accumulate" else {}
        return found


def of_run(setup: Setup, observed: Observed, verdict: Verdict) -> Evidence:
    """All that is known of a run of our own: its ranks said what they did, and it can be played again."""
    number = failing(verdict)
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
        seen=observed,
    )


def failing(verdict: Verdict) -> int:
    """The operation that disagrees."""
    return min(mismatch.operation for mismatch in verdict.mismatches) - 1

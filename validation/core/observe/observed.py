"""What a schedule produced: plain values, gathered from all ranks."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor

from pipeproof.core.observe.likeness import Likeness
from pipeproof.core.observe.posted_messages import Came
from pipeproof.core.observe.recording import Recording, Site, merged
from pipeproof.core.observe.routes import Route
from pipeproof.core.observe.sketch import Sketch
from pipeproof.core.observe.stack import Stack
from pipeproof.pipeline.action import GIVES_WEIGHT_GRADIENT, Action, Kind
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.trace import Profile

INPUT = "model input"  # as a place
UNKNOWN_MICROBATCH = -1  # the microbatch of a call of which nothing tells it
OF_ANOTHER_PLACE = ", of the same microbatch but of another place in the model"  # the end of what is said of a tensor


@dataclass(frozen=True)
class Crossing:
    """A tensor at the boundary of a stage: which (``output of the module``, say) in which action.

    ``same``: whether it is the reference's, up to rounding; ``exact``: bit for bit. ``really`` is what it is instead.
    ``where`` is its place in the flow, as recordings call it. What is not ``judged`` is a matter of diagnosis alone.
    ``call`` is the number of the call from 1 on, by which an action is located whose microbatch is not known. ``place``
    is where in the model an input should pass. ``rank`` is where it was, if several hold the stage. ``faint``: it is
    wrong by little more than what rounding may do. ``error`` is about its relative error, ``limit`` what is rounding.
    ``number`` is the tensor's among those that are there.
    """

    action: Action
    what: str
    same: bool
    exact: bool
    really: Likeness | None = None
    where: str = ""
    judged: bool = True
    call: int = 0
    place: str = ""
    rank: int | None = None
    faint: bool = False
    error: float | None = None
    limit: float | None = None
    number: int = 0

    @property
    def at(self) -> str:
        """The action in words, also where its microbatch is not known."""
        stage, kind, microbatch = self.action
        return f"{stage}{kind.value} of call {self.call}" if microbatch == UNKNOWN_MICROBATCH else str(self.action)

    @property
    def seen(self) -> str:
        """What it is instead, in words; empty where it is what it should be."""
        return "" if self.really is None else self.really.text


@dataclass(frozen=True)
class Passed:
    """A stage's actions in the order in which they ran, its module's calls, and what crossed its boundary.

    ``begins`` and ``ends`` are the places in the reference where its inputs and its outputs pass, by their numbers.
    ``lost`` are the microbatches that no call was known to be about; ``complete``: there is one call for each of them.
    ``unplaced`` are tensors of which nothing tells where they should pass: at which of the flow's points, and for which
    microbatch. Whether they are right nobody knows. ``uncompared`` is how many tensors no law could be held against.
    ``ranks``: which rank each microbatch was on, if several hold it. ``strange`` are outputs without a place, by
    microbatch. ``mixed``: parts of its module alone trained. ``stacks`` are where the user's code called for an action,
    ``came`` the messages that it was given, by its tensors' numbers, ``cleared`` where what a microbatch's backward had
    added to the gradients was cleared.
    ``cut`` are the microbatches whose backward ran through the end of the stage, and came to none of its inputs.
    ``detached`` are the inputs, by microbatch, that want no gradient although the stage before made them so that they
    do. ``times`` of actions, by their rank's count; empty where nobody knows.
    ``extra``: how many calls were beside those of microbatches, and how many of these may add to gradients.
    """

    actions: tuple[Action, ...]
    called: tuple[tuple[Action, bool], ...]
    crossings: tuple[Crossing, ...]
    begins: Mapping[int, str] = field(default_factory=dict)
    ends: Mapping[int, str] = field(default_factory=dict)
    lost: tuple[int, ...] = ()
    complete: bool = True
    unplaced: frozenset[tuple[str, int]] = frozenset()
    uncompared: int = 0
    ranks: Mapping[int, int | None] = field(default_factory=dict)
    strange: Mapping[int, Sequence[Sketch]] = field(default_factory=dict)
    mixed: bool = False
    stacks: Mapping[Action, Stack] = field(default_factory=dict)
    came: Mapping[Action, Mapping[int, Came]] = field(default_factory=dict)
    cleared: Mapping[int, Stack] = field(default_factory=dict)
    detached: Mapping[int, frozenset[int]] = field(default_factory=dict)
    cut: frozenset[int] = frozenset()
    times: tuple[int, ...] = ()
    extra: tuple[int, int] = (0, 0)

    @property
    def untold(self) -> bool:
        """Whether there is a call of which nothing tells the microbatch."""
        return any(action.microbatch == UNKNOWN_MICROBATCH for action in self.actions)

    @cached_property
    def unsure(self) -> frozenset[int]:
        """The microbatches of which nobody knows the one call: of none, or of several, it is known to be about them."""
        calls = Counter(action.microbatch for action, _ in self.called)
        return frozenset({*self.lost, *(microbatch for microbatch, count in calls.items() if count > 1)})


@dataclass(frozen=True)
class Claim:
    """Something that must hold of a parameter on a rank, by its law: whether it does, what was seen and expected.

    beside: the rank that it is held against, which may itself be wrong; None where that is the model.
    """

    law: str
    rank: int
    site: Site
    holds: bool
    seen: str
    expected: str
    beside: int | None = None


@dataclass(frozen=True)
class Routed:
    """What routes are of: a router, by its name in the model, in its stage, and a microbatch."""

    stage: int
    router: str
    microbatch: int


@dataclass(frozen=True)
class RankOperation:
    """One operation of the plan, as one rank saw it. Fields that the operation does not give are empty or None.

    ``losses``, ``loss`` and ``norm`` are what the step reported on this rank. ``called`` are the modules that really
    ran, as forwards of (stage, microbatch), and whether any part of them was in training mode. ``gradients`` are after
    tied copies were summed and before clipping; ``before`` are the parameters that the operation started from, as far
    as they were seen, ``parameters`` what the optimizer made of them. ``nonfinite`` are the actions whose output had a
    NaN or an infinity. ``crossings`` are tensors at the boundaries of stages, where they were watched, ``uncompared``
    how many tensors there have no place in the reference, ``extra``, by stage, how many calls were beside those of
    microbatches, and how many of these may add to gradients; ``recording`` is there where the run was recorded;
    ``started`` are the parameters before anything ran, in the first operation.
    ``outputs`` are those that the step handed back by name, for each microbatch. ``routes`` are what routers chose.
    ``share`` are the microbatches whose losses it reports (None: all), ``claims`` what must hold between it and other
    ranks. ``line``: which it is of the ranks that hold the same stages and work on the same data. ``unseen``: by law,
    why not all was seen that it needs.
    """

    operation: str
    losses: tuple[float, ...]
    executed: tuple[Action, ...]
    nonfinite: tuple[Action, ...] = ()
    called: tuple[tuple[Action, bool], ...] = ()
    loss: float | None = None
    gradients: Mapping[Site, Tensor | None] | None = None
    norm: float | None = None
    parameters: Mapping[Site, Tensor] | None = None
    before: Mapping[Site, Tensor] | None = None
    buffers: Mapping[Site, Tensor] | None = None
    profile: Profile | None = None
    crossings: tuple[Crossing, ...] = ()
    uncompared: int = 0
    extra: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    recording: Recording | None = None
    started: Mapping[Site, Tensor] | None = None
    share: tuple[int, ...] | None = None
    claims: tuple[Claim, ...] = ()
    line: int = 0
    outputs: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    routes: Mapping[Routed, Sequence[Route]] = field(default_factory=dict)
    unseen: Mapping[str, str] = field(default_factory=dict)

    def along(self, line: int) -> "RankOperation":
        """The same, where what was done counts only if it was done on ``line``."""
        if self.line == line:
            return replace(self, line=0)
        return replace(self, line=0, executed=(), called=(), crossings=(), uncompared=0)


@dataclass(frozen=True)
class Observed:
    """What every rank produced: ``ranks[r][k]`` is operation k of the plan on rank r.

    ``copies``: of stages that further lines of ranks hold as well, and what these did is known: by stage the first such
    rank, one mapping a line. ``counts``: how many microbatches each operation has, where that is not the schedule's.
    """

    schedule: Schedule
    ranks: tuple[tuple[RankOperation, ...], ...]
    copies: tuple[Mapping[int, int], ...] = ()
    counts: tuple[int, ...] = ()

    @property
    def watched(self) -> bool:
        """Whether it is known what ran: the ranks were our runtime's."""
        return any(one.executed for rank in self.ranks for one in rank)

    @property
    def unseen(self) -> dict[str, str]:
        """By law, the first rank on which not all was seen that it needs, and why."""
        every = [(rank, one.unseen) for rank, row in enumerate(self.ranks) for one in row]
        return {law: f"rank {rank}: {why}" for rank, unseen in reversed(every) for law, why in unseen.items()}

    def losses(self, operation: int) -> tuple[float, ...]:
        """The microbatches' losses, as the last stage's rank reported them."""
        return self.ranks[self.schedule.placement[-1]][operation].losses

    def gradients(self, operation: int) -> dict[Site, Tensor | None]:
        """Every rank's gradients together."""
        return {site: grad for rank in self.ranks for site, grad in (rank[operation].gradients or {}).items()}

    def parameters(self, operation: int) -> dict[Site, Tensor]:
        """Every rank's parameters together."""
        return {site: value for rank in self.ranks for site, value in (rank[operation].parameters or {}).items()}

    def before(self, operation: int) -> dict[Site, Tensor]:
        """The parameters that every rank started from, together, as far as they were seen."""
        return {site: value for rank in self.ranks for site, value in (rank[operation].before or {}).items()}

    def held(self, operation: int) -> list[Site]:
        """Every site that a rank has a gradient for, or at least a parameter, as often as ranks have one."""
        return [site for rank in self.ranks for site in (rank[operation].gradients or rank[operation].parameters or {})]

    def started(self) -> dict[Site, Tensor]:
        """Every rank's parameters before the first operation, together."""
        return {site: value for rank in self.ranks for site, value in (rank[0].started or {}).items()}

    def buffers(self, operation: int) -> dict[Site, Tensor]:
        """Every rank's buffers together."""
        return {site: value for rank in self.ranks for site, value in (rank[operation].buffers or {}).items()}

    def recording(self, operation: int) -> Recording | None:
        """Every rank's recording as one; None unless all were recorded."""
        found = [rank[operation].recording for rank in self.ranks]
        return merged([one for one in found if one is not None]) if None not in found else None

    def final(self) -> "Observed":
        """What a runtime hands back that nobody watched: losses, norms, final gradients, parameters, buffers."""
        ranks = tuple(
            tuple(replace(one, executed=(), called=(), nonfinite=(), recording=None) for one in rank)
            for rank in self.ranks
        )
        return replace(self, ranks=ranks)

    def along(self, line: int) -> "Observed":
        """What the ranks of ``line`` did, as if no others had done anything; what those handed back stays."""
        ranks = tuple(tuple(one.along(line) for one in rank) for rank in self.ranks)
        there = self.copies[line - 1] if line else {}
        placement = tuple(there.get(stage, rank) for stage, rank in enumerate(self.schedule.placement))
        return Observed(replace(self.schedule, placement=placement), ranks)

    def called(self, operation: int, line: int = 0) -> list[tuple[Action, bool]]:
        """Every call of a stage's module on any rank of ``line``, and whether it was in training mode."""
        return [call for one in self._of(operation, line) for call in one.called]

    def crossings(self, operation: int) -> list[Crossing]:
        """Every rank's crossings together."""
        return [crossing for rank in self.ranks for crossing in rank[operation].crossings]

    def uncompared(self, operation: int) -> int:
        """How many tensors at watched boundaries have no place in the reference, on all ranks."""
        return sum(rank[operation].uncompared for rank in self.ranks)

    def backwards(self, operation: int, line: int = 0) -> dict[int, list[int]]:
        """For each stage, the microbatches in the order in which ``line`` added their weight gradients."""
        return self._order(operation, GIVES_WEIGHT_GRADIENT, line)

    def forwards(self, operation: int, line: int = 0) -> dict[int, list[int]]:
        """For each stage, the microbatches in the order of their forwards on ``line``."""
        return self._order(operation, (Kind.FORWARD,), line)

    def executed(self, operation: int, line: int = 0) -> list[Action]:
        """Every action on any rank of ``line``."""
        return [action for one in self._of(operation, line) for action in one.executed]

    def _of(self, operation: int, line: int) -> list[RankOperation]:
        return [rank[operation] for rank in self.ranks if rank[operation].line == line]

    def _order(self, operation: int, kinds: Collection[Kind], line: int) -> dict[int, list[int]]:
        orders: dict[int, list[int]] = {stage: [] for stage in range(self.schedule.n_stages)}
        for stage, kind, microbatch in self.executed(operation, line):
            if kind in kinds:
                orders[stage].append(microbatch)
        return orders

    def first_nonfinite(self, operation: int) -> Action | None:
        """The earliest action, along the flow of data, whose output was not finite."""
        found = [action for rank in self.ranks for action in rank[operation].nonfinite]
        return min(found, default=None, key=lambda action: (action.stage, action.microbatch))

    @property
    def profiles(self) -> Sequence[Profile]:
        """Each rank's profile of the last training step."""
        last = [max(k for k, op in enumerate(rank) if op.profile is not None) for rank in self.ranks]
        found = [rank[k].profile for rank, k in zip(self.ranks, last, strict=True)]
        return [profile for profile in found if profile is not None]

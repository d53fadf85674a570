"""Observed results: plain values, gathered from all ranks."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor

from pipeproof.core.observe.likeness import Likeness
from pipeproof.core.observe.posted_messages import Came
from pipeproof.core.observe.recording import Recording, Site, merge
from pipeproof.core.observe.routes import Route
from pipeproof.core.observe.sketch import Sketch
from pipeproof.core.observe.stack import Stack
from pipeproof.pipeline.action import GIVES_WEIGHT_GRADIENT, Action, Kind
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.trace import Profile

INPUT = "model input"  # a place
UNKNOWN_MICROBATCH = -1  # a call's microbatch, if unknown
OF_ANOTHER_PLACE = ", of the same microbatch but of another place in the model"  # text ending


@dataclass(frozen=True)
class Crossing:
    """A tensor at a stage boundary, with its action; ``what`` names it, such as ``output of the module``.

    same: it equals the reference's, up to rounding; exact: bit for bit. really: actual origin. where: place in the
    flow, in recording terms. judged: if False, it serves diagnosis alone. call: call number from 1, if the microbatch
    is unknown. place: expected place in the model, for inputs. rank: its rank, where several hold the stage. faint:
    barely beyond rounding. error, limit: relative error and allowance. number: index among tensors there.
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
        """The action, or its call if the microbatch is unknown."""
        stage, kind, microbatch = self.action
        return f"{stage}{kind.value} of call {self.call}" if microbatch == UNKNOWN_MICROBATCH else str(self.action)

    @property
    def observed(self) -> str:
        """The actual origin in words; empty if right."""
        return "" if self.really is None else self.really.text


@dataclass(frozen=True)
class Passed:
    """A stage's actions in order, its module calls, and its boundary tensors.

    begins, ends: reference places for inputs and outputs, by number. lost: microbatches without a known call; complete:
    each has one call. unplaced: tensors without a known place, by flow point and microbatch; they stay uncompared.
    uncompared: number of tensors without a law. ranks: rank per microbatch, where several hold the stage. strange:
    outputs without a place, by microbatch. mixed: only parts of the module trained. stacks: user lines per action.
    came: messages behind an action's tensors. cleared: lines that cleared a microbatch's added gradients. cut:
    microbatches whose backward entered the stage and reached no input. detached: by microbatch, inputs without a
    gradient although the previous stage requires one. times: action times on the rank's counter; empty if unknown.
    extra: calls beyond the microbatches, and how many may add to gradients.
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
        """True after a call with an unknown microbatch."""
        return any(action.microbatch == UNKNOWN_MICROBATCH for action in self.actions)

    @cached_property
    def unsure(self) -> frozenset[int]:
        """Microbatches without exactly one known call."""
        calls = Counter(action.microbatch for action, _ in self.called)
        return frozenset({*self.lost, *(microbatch for microbatch, count in calls.items() if count > 1)})


@dataclass(frozen=True)
class Claim:
    """Claims about a rank's parameter, under their law: result, observed, expected.

    beside: the rank compared with, which may itself be wrong; None for the model.
    """

    law: str
    rank: int
    site: Site
    holds: bool
    observed: str
    expected: str
    beside: int | None = None


@dataclass(frozen=True)
class Routed:
    """A router's routes: its stage, model name and microbatch."""

    stage: int
    router: str
    microbatch: int


@dataclass(frozen=True)
class RankOperation:
    """An operation on a rank. Inapplicable fields are empty or None.

    losses, loss, norm: the rank's reports. called: module calls as forwards (stage, microbatch), with any training mode
    in their parts. gradients: after tied copies were summed, before clipping. before: observed starting parameters;
    parameters: after the optimizer. nonfinite: actions with NaN or infinity in their output. crossings: tensors at
    watched boundaries. uncompared: tensors there without a place in the reference. extra: by stage, calls beyond the
    microbatches, and how many may add to gradients. recording: present in recorded runs. started: parameters before the
    first operation. outputs: named outputs per microbatch. routes: router choices. share: microbatches with reported
    losses (None: all). claims: properties between ranks. line: index among ranks with the same stages and data. unseen:
    by law, why observation is incomplete.
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
        """Copy that keeps actions only if done on ``line``."""
        if self.line == line:
            return replace(self, line=0)
        return replace(self, line=0, executed=(), called=(), crossings=(), uncompared=0)


@dataclass(frozen=True)
class Observed:
    """All ranks' results: ``ranks[r][k]`` holds operation k on rank r.

    copies: per further line with observed actions, the first rank for each stage. counts: microbatches per operation,
    unless the schedule's.
    """

    schedule: Schedule
    ranks: tuple[tuple[RankOperation, ...], ...]
    copies: tuple[Mapping[int, int], ...] = ()
    counts: tuple[int, ...] = ()

    @property
    def watched(self) -> bool:
        """True with observed actions, as from our own runtime."""
        return any(one.executed for rank in self.ranks for one in rank)

    @property
    def unseen(self) -> dict[str, str]:
        """Laws with incomplete observation, each with its first rank and reason."""
        every = [(rank, one.unseen) for rank, row in enumerate(self.ranks) for one in row]
        return {law: f"rank {rank}: {why}" for rank, unseen in reversed(every) for law, why in unseen.items()}

    def losses(self, operation: int) -> tuple[float, ...]:
        """Microbatch losses, as the last stage's rank reports them."""
        return self.ranks[self.schedule.placement[-1]][operation].losses

    def gradients(self, operation: int) -> dict[Site, Tensor | None]:
        """All ranks' gradients."""
        return {site: grad for rank in self.ranks for site, grad in (rank[operation].gradients or {}).items()}

    def parameters(self, operation: int) -> dict[Site, Tensor]:
        """All ranks' parameters."""
        return {site: value for rank in self.ranks for site, value in (rank[operation].parameters or {}).items()}

    def before(self, operation: int) -> dict[Site, Tensor]:
        """All ranks' observed starting parameters."""
        return {site: value for rank in self.ranks for site, value in (rank[operation].before or {}).items()}

    def gradient_sites(self, operation: int) -> list[Site]:
        """Sites with a gradient or parameter, once per holding rank."""
        return [site for rank in self.ranks for site in (rank[operation].gradients or rank[operation].parameters or {})]

    def initial_parameters(self) -> dict[Site, Tensor]:
        """All ranks' parameters before the first operation."""
        return {site: value for rank in self.ranks for site, value in (rank[0].started or {}).items()}

    def buffers(self, operation: int) -> dict[Site, Tensor]:
        """All ranks' buffers."""
        return {site: value for rank in self.ranks for site, value in (rank[operation].buffers or {}).items()}

    def recording(self, operation: int) -> Recording | None:
        """Merge all recordings. None unless each rank has one."""
        found = [rank[operation].recording for rank in self.ranks]
        return merge([one for one in found if one is not None]) if None not in found else None

    def final(self) -> "Observed":
        """Keep final results alone, as from an unwatched runtime: losses, norms, gradients, parameters, buffers."""
        ranks = tuple(
            tuple(replace(one, executed=(), called=(), nonfinite=(), recording=None) for one in rank)
            for rank in self.ranks
        )
        return replace(self, ranks=ranks)

    def along(self, line: int) -> "Observed":
        """Return actions on ``line`` alone; results stay."""
        ranks = tuple(tuple(one.along(line) for one in rank) for rank in self.ranks)
        there = self.copies[line - 1] if line else {}
        placement = tuple(there.get(stage, rank) for stage, rank in enumerate(self.schedule.placement))
        return Observed(replace(self.schedule, placement=placement), ranks)

    def calls(self, operation: int, line: int = 0) -> list[tuple[Action, bool]]:
        """Return module calls on ``line``, each with its training mode."""
        return [call for one in self._of(operation, line) for call in one.called]

    def crossings(self, operation: int) -> list[Crossing]:
        """All ranks' boundary tensors."""
        return [crossing for rank in self.ranks for crossing in rank[operation].crossings]

    def count_uncompared(self, operation: int) -> int:
        """Count boundary tensors without a place in the reference, on all ranks."""
        return sum(rank[operation].uncompared for rank in self.ranks)

    def backwards(self, operation: int, line: int = 0) -> dict[int, list[int]]:
        """Return microbatches per stage, in order of weight gradients on ``line``."""
        return self._order(operation, GIVES_WEIGHT_GRADIENT, line)

    def forwards(self, operation: int, line: int = 0) -> dict[int, list[int]]:
        """Return microbatches per stage, in forward order on ``line``."""
        return self._order(operation, (Kind.FORWARD,), line)

    def actions(self, operation: int, line: int = 0) -> list[Action]:
        """Return all actions on ``line``."""
        return [action for one in self._of(operation, line) for action in one.executed]

    def _of(self, operation: int, line: int) -> list[RankOperation]:
        return [rank[operation] for rank in self.ranks if rank[operation].line == line]

    def _order(self, operation: int, kinds: Collection[Kind], line: int) -> dict[int, list[int]]:
        orders: dict[int, list[int]] = {stage: [] for stage in range(self.schedule.n_stages)}
        for stage, kind, microbatch in self.actions(operation, line):
            if kind in kinds:
                orders[stage].append(microbatch)
        return orders

    def first_nonfinite(self, operation: int) -> Action | None:
        """Return the earliest action, along the data flow, with a non-finite output."""
        found = [action for rank in self.ranks for action in rank[operation].nonfinite]
        return min(found, default=None, key=lambda action: (action.stage, action.microbatch))

    @property
    def profiles(self) -> Sequence[Profile]:
        """Each rank's profile for the last training step."""
        last = [max(k for k, op in enumerate(rank) if op.profile is not None) for rank in self.ranks]
        found = [rank[k].profile for rank, k in zip(self.ranks, last, strict=True)]
        return [profile for profile in found if profile is not None]

"""A rank's part in a checked step: arrival, stages by the record's names, and notes for the end."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from torch import Tensor, nn

from pipeproof.core.ledger import Where
from pipeproof.core.observe.recording import Gradients
from pipeproof.core.observe.shards import Shard, is_plain, local_tensor, shard_of
from pipeproof.core.reason import Doubt, reasons_of
from pipeproof.core.replicas import Replicas
from pipeproof.core.tolerance import Floor, same_bits
from pipeproof.records.record import (
    RankStage,
    RecordError,
    numbers_in,
    other_microbatch,
)


@dataclass(frozen=True)
class Arrival:
    """A rank's arrival at a check: parameters by name with their stage, microbatches, and problems.

    ``shards``: places of partial weights in the whole.
    """

    held: Mapping[str, int]
    microbatches: tuple[str, ...] | None
    problem: str
    shards: Mapping[str, Shard] = field(default_factory=dict)


def places_of(arrivals: Sequence[Arrival]) -> dict[str, list[RankStage]]:
    """Return every parameter's ranks and stages, in rank order."""
    places: dict[str, list[RankStage]] = {}
    for rank, arrival in enumerate(arrivals):
        for name, stage in arrival.held.items():
            places.setdefault(name, []).append((rank, stage))
    return places


@dataclass(frozen=True)
class Run:
    """Each rank's replica of the model, and the step's microbatches by digest.

    ``shares``: microbatches of each rank's replica by number; None if unknown.
    """

    replicas: tuple[int, ...]
    microbatches: tuple[str, ...]
    shares: tuple[tuple[int, ...] | None, ...]

    @property
    def count(self) -> int:
        return max(self.replicas) + 1

    @property
    def apart(self) -> bool:
        """True if every replica gives its microbatches."""
        return self.count > 1 and None not in self.shares

    @property
    def members(self) -> Replicas:
        """Convert to ``Replicas``, for judging shared parameters."""
        shares = tuple(share or () for share in self.shares) if self.apart else ()
        return Replicas(self.replicas, len(self.microbatches), shares=shares)

    def as_in(self, expected: Sequence[str]) -> "Run":
        """Renumber microbatches as in ``expected``, if equal."""
        place = numbers_in(expected, self.microbatches) if self.apart else None
        if place is None:
            return self
        shares = tuple(tuple(place[number] for number in share or ()) for share in self.shares)
        return Run(self.replicas, tuple(expected), shares)

    def together(self, given: Sequence[Sequence[Any] | None]) -> list[Any]:
        """Join the microbatches ``given`` on all replicas."""
        by_replica = {replica: one for replica, one in zip(self.replicas, given, strict=True) if one is not None}
        return [pair for _, one in sorted(by_replica.items()) for pair in one]


def run_of(arrivals: Sequence[Arrival]) -> tuple[Run, dict[int, str]]:
    """Return the ranks' common run, and problems by rank: their own, or microbatches that do not fit."""
    replicas = _replicas(arrivals)
    problems = {rank: one.problem for rank, one in enumerate(arrivals) if one.problem}
    given: dict[int, tuple[str, ...]] = {}
    for replica in sorted(set(replicas)):
        known = [one.microbatches if of == replica else None for one, of in zip(arrivals, replicas, strict=True)]
        if any(one is not None for one in known):
            problems = problems or disagreement(known)
            given[replica] = next(one for one in known if one is not None)
    if problems := problems or ({} if given else disagreement([])):
        return Run(replicas, (), (None,) * len(replicas)), problems
    if len(set(given.values())) == 1:
        (every,) = set(given.values())
        whole = tuple(range(len(every))) if len(set(replicas)) == 1 else None
        return Run(replicas, every, (whole,) * len(replicas)), {}
    every = tuple(digest for _, one in sorted(given.items()) for digest in one)
    ends = {replica: sum(len(one) for other, one in given.items() if other <= replica) for replica in given}
    own = {replica: tuple(range(ends[replica] - len(one), ends[replica])) for replica, one in given.items()}
    return Run(replicas, every, tuple(own.get(replica) for replica in replicas)), {}


def _replicas(arrivals: Sequence[Arrival]) -> tuple[int, ...]:
    """Number ranks with equal stages as replicas in order, given equally many of each; else all share replica 0."""
    observed: Counter[frozenset[tuple[str, int]]] = Counter()
    found = []
    for arrival in arrivals:
        held = frozenset(arrival.held.items())
        found.append(observed[held])
        observed[held] += bool(held)
    alike = len({count for held, count in observed.items() if held}) == 1
    return tuple(found) if alike else (0,) * len(found)


def describe_problems(problems: Mapping[int, str]) -> str:
    """Join problems by rank into a line, equal problems once; empty without any."""
    ranks: dict[str, list[int]] = {}
    for rank, problem in problems.items():
        ranks.setdefault(problem, []).append(rank)
    found = [(problem, f"rank{'s' * (len(of) > 1)} {', '.join(map(str, of))}") for problem, of in ranks.items()]
    return Doubt("; ".join(f"{who}: {problem}" for problem, who in found if problem), reasons_of(*ranks))


def disagreement(digests: Sequence[tuple[str, ...] | None]) -> dict[int, str]:
    """Find a rank with different microbatches than another."""
    known = [(rank, found) for rank, found in enumerate(digests) if found is not None]
    if not known:
        return {0: "the step's microbatches are not known: pass them on one rank at least"}
    first, expected = known[0]
    for rank, observed in known:
        if found := other_microbatch(expected, observed):
            return {rank: f"other microbatches than those of rank {first}: {found}"}
    return {}


Rename = Callable[[int, str], str]


def own_name(stage: int, name: str) -> str:
    """Keep a parameter's name, for stages with the whole model's names."""
    return name


@dataclass(frozen=True)
class AdapterNames:
    """Names made by an adapter: users have no rename= to give; ``cure``: advice for them."""

    named: Rename
    cure: str = "the whole model has one, so cut it into stages that hold each layer once"

    def __call__(self, stage: int, name: str) -> str:
        return self.named(stage, name)


@dataclass(frozen=True)
class RankStages:
    """``modules`` by stage; ``rename`` maps a stage's number and a name in it to the record's name."""

    modules: Mapping[int, nn.Module]
    rename: Rename

    @cached_property
    def places(self) -> dict[str, int]:
        """Stages by parameter name."""
        return {name: stage for name, stage, _ in self._named}

    def where(self, name: str, rank: int) -> Where:
        """Locate a parameter on this rank."""
        stage = self.places.get(name)
        return Where(rank=rank) if stage is None else Where(rank=rank, stage=stage)

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """The rank's local parameter tensors, live."""
        return {name: local_tensor(parameter) for name, _, parameter in self._named}

    @cached_property
    def names(self) -> dict[int, str]:
        """Parameter names by ``id``."""
        return {id(parameter): name for name, _, parameter in self._named}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole parameters' shapes."""
        return {name: tuple(parameter.shape) for name, _, parameter in self._named}

    @cached_property
    def shards(self) -> dict[str, Shard]:
        """Places for the rank's partial parameters."""
        found = {name: shard_of(parameter) for name, _, parameter in self._named}
        return {name: shard for name, shard in found.items() if shard is not None and not shard.is_all}

    @property
    def gradients(self) -> dict[str, Tensor | None]:
        """The current ``.grad`` content."""
        return {name: parameter.grad for name, _, parameter in self._named}

    @property
    def buffers(self) -> dict[str, tuple[int, Tensor]]:
        """Stage and current value of each buffer."""
        return {
            self.rename(stage, name): (stage, buffer)
            for stage, module in self.modules.items()
            for name, buffer in module.named_buffers()
        }

    def check_names(self) -> None:
        """Raise ``RecordError`` for two parameters with one name."""
        twice = [name for name, count in Counter(name for name, *_ in self._named).items() if count > 1]
        if twice:
            those = [(stage, one) for name, stage, one in self._named if name == twice[0]]
            stages = " and ".join(str(stage) for stage, _ in those)
            cure = self.rename.cure if isinstance(self.rename, AdapterNames) else "give rename=, from stage and name"
            if len({id(one) for _, one in those}) == 1:
                cure = f"{cure}, that makes a name of each stage; that it is one weight is observed"
            raise RecordError(f"stages {stages} both have a parameter {twice[0]}: {cure}")

    @cached_property
    def _named(self) -> list[tuple[str, int, Tensor]]:
        return [
            (self.rename(stage, name), stage, parameter)
            for stage, module in self.modules.items()
            for name, parameter in module.named_parameters(remove_duplicate=False)
        ]


MOST = 1 << 30  # bytes that all ranks together keep
_SUM = Floor(0.0, 0.0, 0.0).limit  # how far another order of fp32 sums leads
# Near: it passes, beyond an fp32 sum's rounding. Left out: wrong, and too large to keep.
Kind = Literal["right", "near", "wrong", "left out"]


@dataclass(frozen=True)
class Notes:
    """A rank's notes by parameter name: information for all ranks without tensors, which have addresses.

    ``ends``: the kind of each gradient, and the address of a near or wrong one; None for a missing gradient. ``begun``:
    the address of nonzero initial ``.grad`` content; None if not kept.
    """

    ends: dict[str, tuple[Kind, str | None]] = field(default_factory=dict)
    begun: dict[str, str | None] = field(default_factory=dict)


class Kept:
    """Gradients on a rank: wrong ones, and initial ones; ``room`` is in bytes.

    ``tensors`` are by the addresses in its ``notes``, unique among ranks.
    """

    def __init__(self, rank: int, room: int) -> None:
        self.notes = Notes()
        self.tensors: dict[str, Tensor] = {}
        self._rank, self._room = rank, room

    def begin(self, gradients: Gradients) -> None:
        """Keep initial content, in place of earlier copies: it may be too much later."""
        for name, gradient in gradients.items():
            self._drop(self.notes.begun.pop(name, None))
            if gradient is not None and not (is_plain(gradient) and not gradient.any()):
                self.notes.begun[name] = self._keep("begun", name, gradient) if is_plain(gradient) else None

    def end(self, name: str, gradient: Tensor | None, *, wrong: bool, apart: float = 0.0) -> None:
        """Keep a gradient that is ``wrong``, or passes too far ``apart`` for another sum.

        Coarse types hide half a fault. Wrong gradients have priority.
        """
        ends, address = self.notes.ends, None
        kind: Kind = "wrong" if wrong else "near" if gradient is not None and apart > _SUM else "right"
        if gradient is not None and kind != "right":
            passing = {one: its for one, (its_kind, its) in ends.items() if its_kind == "near" and its and wrong}
            room = self._room + sum(self.tensors[its].nbytes for its in passing.values())
            while self._room < gradient.nbytes <= room:
                one, its = passing.popitem()
                self._drop(its)
                ends[one] = "right", None
            if (address := self._keep(kind, name, gradient)) is None:
                kind = "left out" if wrong else "right"
        if wrong or ends.get(name, (kind, None))[0] != "wrong":  # one that was shown twice stays wrong
            ends[name] = kind, address
        # Where nothing was added since, the backward was over before the check began: that tells nothing.
        begun = self.notes.begun.get(name)
        if begun is not None and gradient is not None and same_bits(self.tensors[begun], gradient.detach().cpu()):
            self._drop(begun)
            self.notes.begun[name] = None

    def _keep(self, what: str, name: str, gradient: Tensor) -> str | None:
        """Copy a gradient to the host and return its address; None without room."""
        if gradient.nbytes > self._room:
            return None
        self._room -= gradient.nbytes
        address = f"{what} gradient {name} of rank {self._rank}"
        self.tensors[address] = gradient.detach().to("cpu", copy=True)
        return address

    def _drop(self, address: str | None) -> None:
        if address is not None:
            self._room += self.tensors.pop(address).nbytes

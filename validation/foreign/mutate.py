"""Does a test test anything? Faults are planted in the step that it is about, and it should fail each time."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from pipeproof.foreign.mutants import MUTANTS
from pipeproof.foreign.reference_run import WhiteBoxError
from pipeproof.judging.cause import few
from pipeproof.observers.sketch import digest
from pipeproof.pipeline.schedules import nearest
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World

Test = Callable[[RankContext], object]
Outcome = Literal["caught", "let pass", "not planted"]


class LetPass(AssertionError):
    """A test that lets faults pass."""


@dataclass(frozen=True)
class Tried:
    """A fault that was planted: on which rank (None: on all), what became of it, and how the test failed."""

    name: str
    summary: str
    outcome: Outcome
    rank: int | None = None
    how: str = ""

    @property
    def told(self) -> str:
        """How the test failed, or what it did not see."""
        where = "" if self.rank is None or self.outcome == "not planted" else f", on rank {self.rank}"
        return self.how or f"{self.summary}{where}"


@dataclass(frozen=True)
class Mutated:
    """What became of all faults."""

    tried: tuple[Tried, ...]

    @property
    def let_pass(self) -> tuple[Tried, ...]:
        """Those that the test did not see."""
        return tuple(one for one in self.tried if one.outcome == "let pass")

    def raise_if_any_passed(self) -> None:
        """Raise ``LetPass`` where the test let any fault pass, or none could be planted."""
        if self.let_pass or all(one.outcome == "not planted" for one in self.tried):
            raise LetPass(str(self))

    def __str__(self) -> str:
        width = max(len(one.name) for one in self.tried)
        lines = [
            f"{one.outcome:11}  {one.name:{width}}  {one.told}"
            for one in sorted(self.tried, key=lambda one: _ORDER.index(one.outcome))
        ]
        counts = [(outcome, sum(one.outcome == outcome for one in self.tried)) for outcome in _ORDER]
        return "\n".join([*lines, ", ".join(f"{count} {outcome}" for outcome, count in counts if count)])


_ORDER: tuple[Outcome, ...] = ("let pass", "caught", "not planted")


@dataclass(frozen=True)
class _Went:
    """How a test that passed went on a rank: how often a fault changed anything, and what it gave to reductions.

    ``given``: by the ranks of a group and the number of its reduction, the digest of what this rank gave. ``marked``:
    the test said where its step runs.
    """

    hits: int = 0
    given: Mapping[tuple[tuple[int, ...], int], bytes] | None = None
    marked: bool = False


def mutated(test: Test, world: World, *, ranks: int, only: Collection[str] = (), timeout_s: float | None) -> Mutated:
    """What ``test`` makes of each fault of ``MUTANTS``, or of ``only`` some; it runs on every rank.

    Raises ``WhiteBoxError`` for a test that fails without any fault, or whose replicas all have the same data.
    """
    names = _chosen(only)
    try:
        plain = world.run(_go, test, "", ranks=ranks, timeout_s=timeout_s)
    except RankFailed as failure:
        raise WhiteBoxError(f"the test fails as it is, with no fault planted: {_how(failure)}") from failure
    if same := _same_everywhere(plain):
        raise WhiteBoxError(same)
    go = partial(_go, marked=any(one.marked for one in plain))
    run = partial(world.run, go, test, ranks=ranks, timeout_s=timeout_s)
    return Mutated(tuple(_tried(name, run, ranks) for name in names))


def _chosen(only: Collection[str]) -> Sequence[str]:
    for name in only:
        if name not in MUTANTS:
            raise WhiteBoxError(f"unknown fault {name!r}: {nearest(name, list(MUTANTS))}")
    return [name for name in MUTANTS if not only or name in only]


def _tried(name: str, run: Callable[..., list[Any]], ranks: int) -> Tried:
    """What becomes of a fault on the first rank where it changes anything, from the last rank on; or on all."""
    one = Tried(name, MUTANTS[name].summary, "not planted")
    for rank in [None] if MUTANTS[name].everywhere else reversed(range(ranks)):
        try:
            went = run(name, rank)
        except RankFailed as failure:
            return replace(one, outcome="caught", rank=rank, how=_how(failure))
        if any(each.hits for each in went):
            return replace(one, outcome="let pass", rank=rank)
    return one


def _go(context: RankContext, test: Test, name: str, rank: int | None = None, *, marked: bool = False) -> _Went:
    """One rank's run of the test, with a fault if it is its turn; a job for ``World.run``.

    The fault is there where the test says that its step runs, or all the time where it does not say so.
    """
    __tracebackhide__ = True
    global _fault, _marked
    hits: list[None] = []
    planted = bool(name) and rank in (None, context.rank)
    _fault = (lambda: MUTANTS[name].plant(lambda: hits.append(None))) if planted else nullcontext
    _marked, _marks[:] = marked, []
    try:
        with nullcontext() if marked or not planted else _fault(), _noted_reductions(wanted=not name) as given:
            test(context)
    finally:
        _fault = nullcontext
    return _Went(len(hits), given, marked=bool(_marks))


_fault: Callable[[], Any] = nullcontext  # what makes the fault that is to be planted
_marked = False  # whether it is to be there only while the test says that its step runs
_marks: list[None] = []  # for each time that a test said that its step runs


@contextmanager
def under_test() -> Iterator[None]:
    """Around what your test is about. Faults are then planted nowhere else, such as in the test's own reference.

    Outside ``mutate`` this does nothing.
    """
    _marks.append(None)
    with _fault() if _marked else nullcontext():
        yield


@contextmanager
def _noted_reductions(*, wanted: bool) -> Iterator[dict[tuple[tuple[int, ...], int], bytes] | None]:
    """What this rank gives to sums over ranks, by group and number."""
    if not wanted:
        yield None
        return
    given: dict[tuple[tuple[int, ...], int], bytes] = {}
    kept = vars(dist.ProcessGroup)["allreduce"]
    reduce: Any = dist.ProcessGroup.allreduce

    def noted(group: Any, tensors: Any, *more: Any, **named: Any) -> Any:
        some = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if all(one.is_floating_point() and one.numel() > 1 and bool(one.any()) for one in some):
            ranks = tuple(dist.get_process_group_ranks(group))
            number = sum(of == ranks for of, _ in given)
            given[ranks, number] = b"".join(map(digest, some))
        return reduce(group, tensors, *more, **named)

    dist.ProcessGroup.allreduce = noted  # type: ignore[assignment,method-assign]
    try:
        yield given
    finally:
        dist.ProcessGroup.allreduce = kept  # type: ignore[method-assign]


def _same_everywhere(plain: Sequence[_Went]) -> str:
    """Why a reduction that is missing would not show: all give the same to it. Empty where none do."""
    found: dict[tuple[tuple[int, ...], int], list[bytes]] = {}
    for one in plain:
        for key, content in (one.given or {}).items():
            found.setdefault(key, []).append(content)
    same = [ranks for (ranks, _), given in found.items() if len(given) == len(ranks) > 1 and len(set(given)) == 1]
    if not same:
        return ""
    return (
        f"ranks {few(list(map(str, same[0])))} give the same to a sum over them, so that it would not show if it were "
        "left out: give each replica data of its own"
    )


def _how(failure: RankFailed) -> str:
    told = failure.reports[failure.culprit].sentence().partition("\n")[0]
    return f"rank {failure.culprit} {told}"

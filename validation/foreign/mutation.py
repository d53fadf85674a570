"""Does a test test anything? Faults are planted in the step that it is about, and it should fail each time."""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal
from unittest import SkipTest

from pipeproof.foreign.mutants import MUTANTS
from pipeproof.foreign.planted import Planted
from pipeproof.foreign.reductions import Given, Key, noted, same_ranks
from pipeproof.foreign.task import WhiteBoxError
from pipeproof.pipeline.schedules import nearest
from pipeproof.pipeline.sizes import first_few
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World

Test = Callable[[RankContext], object]
Outcome = Literal["caught", "let pass", "not judged", "not planted"]


class LetPass(AssertionError):
    """A test that lets faults pass."""


class UnchangedError(Exception):
    """A test failed on a rank on which a fault was to be, and had not changed anything yet."""


class SkippedError(Exception):
    """A test skipped under a fault: where all ranks do, whoever asked for this would be skipped, too."""


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
        """Raise ``LetPass`` where the test let any fault pass, gave no data to judge it by, or caught none."""
        outcomes = {one.outcome for one in self.tried}
        if outcomes & {"let pass", "not judged"} or "caught" not in outcomes:
            raise LetPass(str(self))

    def __str__(self) -> str:
        width = max(len(one.name) for one in self.tried)
        lines = [
            f"{one.outcome:11}  {one.name:{width}}  {one.told}"
            for one in sorted(self.tried, key=lambda one: _ORDER.index(one.outcome))
        ]
        counts = [(outcome, sum(one.outcome == outcome for one in self.tried)) for outcome in _ORDER]
        return "\n".join([*lines, ", ".join(f"{count} {outcome}" for outcome, count in counts if count)])


_ORDER: tuple[Outcome, ...] = ("let pass", "not judged", "caught", "not planted")


@dataclass(frozen=True)
class _Went:
    """How a test that passed went on a rank: how often a fault changed anything, and what it gave to reductions.

    ``given``: what this rank gave to sums, where that was looked at. ``marked``: the test said where its step runs.
    """

    hits: int = 0
    given: Mapping[Key, Given] = field(default_factory=dict)
    marked: bool = False


def mutated(test: Test, world: World, *, ranks: int, only: Collection[str] = (), timeout_s: float | None) -> Mutated:
    """What ``test`` makes of each fault of ``MUTANTS``, or of ``only`` some; it runs on every rank.

    Raises ``WhiteBoxError`` for a test that fails without any fault, and for what cannot be asked.
    """
    names = _chosen(only)
    _look_at(test, ranks)
    plain = []
    for again in ("as it is", "when it runs again, so that it begins with what it left behind"):
        try:
            plain = world.run(_go, test, "", ranks=ranks, timeout_s=timeout_s)
        except RankFailed as failure:
            raise WhiteBoxError(f"the test fails {again}, with no fault planted: {_how(failure)}") from failure
    marked = any(one.marked for one in plain)
    same = _same([one.given for one in plain], marked=marked)
    run = partial(world.run, partial(_go, marked=marked), test, ranks=ranks, timeout_s=timeout_s)
    return Mutated(
        tuple(
            Tried(name, MUTANTS[name].summary, "not judged", how=same)
            if same and MUTANTS[name].of_sums
            else _tried(name, run, ranks)
            for name in names
        )
    )


def _look_at(test: object, ranks: object) -> None:
    if not callable(test):
        raise WhiteBoxError(f"test is {test!r}: expected what can be called with a RankContext")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise WhiteBoxError(f"ranks is {ranks!r}: expected a number of ranks, at least 1")


def _chosen(only: Collection[str]) -> Sequence[str]:
    if not isinstance(only, Iterable):
        raise WhiteBoxError(f"only is {only!r}: expected names of faults, such as {next(iter(MUTANTS))!r}")
    wanted = [only] if isinstance(only, str) else list(only)
    for name in wanted:
        if not isinstance(name, str) or name not in MUTANTS:
            known = nearest(str(name), list(MUTANTS)) or f"expected a name such as {first_few(list(MUTANTS))}"
            raise WhiteBoxError(f"unknown fault {name!r}: {known}")
    return [name for name in MUTANTS if not wanted or name in wanted]


def _tried(name: str, run: Callable[..., list[Any]], ranks: int) -> Tried:
    """What becomes of a fault on the first rank where it changes anything, from the last rank on; or on all."""
    one = Tried(name, MUTANTS[name].summary, "not planted")
    for rank in [None] if MUTANTS[name].everywhere else reversed(range(ranks)):
        try:
            went = run(name, rank)
        except RankFailed as failure:
            told = [report.message.partition(": ") for report in failure.reports]
            before = [why for kind, _, why in told if kind.endswith(UnchangedError.__name__)]
            how = f"the test ended before this changed anything: {before[0]}" if before else _how(failure)
            kind, _, why = told[failure.culprit]
            skipped = kind.endswith(SkippedError.__name__)
            how = f"the test skips on rank {failure.culprit}: {why}" if skipped and not before else how
            return replace(one, outcome="not judged" if before or skipped else "caught", rank=rank, how=how)
        if any(each.hits for each in went):
            return replace(one, outcome="let pass", rank=rank)
    return one


def _go(context: RankContext, test: Test, name: str, rank: int | None = None, *, marked: bool = False) -> _Went:
    """One rank's run of the test, with a fault if it is its turn; a job for ``World.run``.

    The fault is there where the test says that its step runs, or all the time where it does not say so.
    """
    __tracebackhide__ = True
    global _fault, _marked, _open
    fault = Planted()
    planted = bool(name) and rank in (None, context.rank)
    _fault = (lambda: MUTANTS[name].plant(fault)) if planted else nullcontext
    _marked, _marks[:], _open = marked, [], []
    noting: AbstractContextManager[dict[Key, Given]] = nullcontext({}) if name else noted(_runs)
    try:
        with nullcontext() if marked or not planted else _fault(), noting as given:
            test(context)
    except _endings() as error:
        if planted and not fault.hits:
            raise UnchangedError(f"{type(error).__name__}: {error}") from error
        if name and isinstance(error, _skips()):
            raise SkippedError(str(error)) from error
        raise
    finally:
        _fault = nullcontext
        fault.end()
    return _Went(fault.hits, given, marked=bool(_marks))


def _endings() -> tuple[type[BaseException], ...]:
    """What a test raises that ends, also by ``fail`` and ``skip`` of pytest, where it may call them."""
    found: Any = sys.modules.get("pytest")
    of_pytest = () if found is None else (found.fail.Exception, found.skip.Exception)
    return (Exception, SystemExit, *of_pytest)


def _skips() -> tuple[type[BaseException], ...]:
    """What a test raises that skips, also by ``skip`` of pytest, where it may call that."""
    found: Any = sys.modules.get("pytest")
    return (SkipTest,) if found is None else (SkipTest, found.skip.Exception)


def _runs() -> bool:
    """Whether the test says that its step runs now."""
    return bool(_open)


_fault: Callable[[], Any] = nullcontext  # what makes the fault that is to be planted
_marked = False  # whether it is to be there only while the test says that its step runs
_marks: list[None] = []  # for each time that a test said that its step runs
_open: list[None] = []  # for each of these times that has not ended


@contextmanager
def under_test() -> Iterator[None]:
    """Around what your test is about. Faults are then planted nowhere else, such as in the test's own reference.

    Outside ``mutate`` this does nothing.
    """
    _marks.append(None)
    opened = _open  # simulated ranks share this module: another's run may have begun when this ends
    opened.append(None)
    try:
        with _fault() if _marked else nullcontext():
            yield
    finally:
        opened.pop()


def _same(given: Sequence[Mapping[Key, Given]], *, marked: bool) -> str:
    """Why a sum that is missing would not show: all give the same to it. Empty where they do not."""
    if not (ranks := same_ranks(given, marked=marked)):
        return ""
    return (
        f"ranks {first_few(ranks)} give the same to a sum over them, so that it would not show if it were "
        "left out: give each replica data of its own"
    )


def _how(failure: RankFailed) -> str:
    told = failure.reports[failure.culprit].sentence().partition("\n")[0]
    return f"rank {failure.culprit} {told}"

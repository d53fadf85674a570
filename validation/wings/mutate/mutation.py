"""Whether a test tests anything: faults are planted in the step that it is about, and it should fail each time."""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args
from unittest import SkipTest

import torch.distributed as dist

from pipeproof.core.verdict import Verdict
from pipeproof.pipeline.schedules import nearest
from pipeproof.pipeline.sizes import first_few
from pipeproof.whitebox.task import WhiteBoxError
from pipeproof.wings.mutate.mutants import MUTANTS
from pipeproof.wings.mutate.planting import Planting
from pipeproof.wings.mutate.sums import Group, Parts, parts_of_sums, same_ranks
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.timeout import seconds
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World

if TYPE_CHECKING:  # a rank needs no judge
    from pipeproof.whitebox.validator import WhiteBox

Test = Callable[[RankContext], object]
Outcome = Literal["let pass", "not judged", "caught", "not planted"]
_SAME = (
    "ranks {} give the same to a sum over them, so that it would not show if it were left out: give each replica data "
    "of its own"
)


class LetPass(AssertionError):
    """A test that lets faults pass."""


class UnchangedError(Exception):
    """A test failed on a rank whose fault had not changed anything yet."""


class SkippedError(Exception):
    """A test skipped under a fault: where all ranks do, whoever asked for this would be skipped, too."""


@dataclass(frozen=True)
class Tried:
    """A planted fault: its rank (None: all), its ending, and the test's failure."""

    name: str
    summary: str
    outcome: Outcome
    rank: int | None = None
    how: str = ""


@dataclass(frozen=True)
class Mutated:
    """Results of all faults."""

    tried: tuple[Tried, ...]

    @property
    def let_pass(self) -> tuple[Tried, ...]:
        """Faults that the test missed."""
        return tuple(one for one in self.tried if one.outcome == "let pass")

    def raise_if_any_passed(self) -> None:
        """Raise ``LetPass`` if the test missed a fault, gave no data to judge it by, or caught none."""
        outcomes = {one.outcome for one in self.tried}
        if outcomes & {"let pass", "not judged"} or "caught" not in outcomes:
            raise LetPass(str(self))

    def __str__(self) -> str:
        width, lines, counts = max(len(one.name) for one in self.tried), list[str](), list[str]()
        for outcome in get_args(Outcome):
            those = [one for one in self.tried if one.outcome == outcome]
            for one in those:
                where = "" if one.rank is None or outcome == "not planted" else f", on rank {one.rank}"
                lines.append(f"{outcome:11}  {one.name:{width}}  {one.how or one.summary + where}")
            counts += [f"{len(those)} {outcome}"] if those else []
        return "\n".join([*lines, ", ".join(counts)])


def mutate(
    test: Callable[[RankContext], object],
    *,
    ranks: int,
    only: Collection[str] = (),
    timeout_s: float | None = None,
    whitebox: "WhiteBox | None" = None,
) -> Mutated:
    """Test your own test: plant faults in its step, and report the ones missed.

    test: called on every rank with its ``RankContext``; raises on an error. Each fault is planted in torch's functions,
    on the last rank that it affects, or on all for sums over ranks. ranks: how many. only: names of some faults.
    timeout_s: bounds each run, in seconds; a hanging test has caught the fault. whitebox: whose ranks to use, as
    pytest's fixture; None: own ones.

    Raises ``WhiteBoxError`` for a test that fails without a fault. If replicas have equal data, faults in sums over
    them are not judged, because a missing sum does not show.
    """
    names = choose(only)
    if not callable(test):
        raise WhiteBoxError(f"test is {test!r}: expected what can be called with a RankContext")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise WhiteBoxError(f"ranks is {ranks!r}: expected a number of ranks, at least 1")
    usual_s = None if whitebox is None else whitebox.timeout_s
    bound_s = usual_s if timeout_s is None else seconds(timeout_s)
    with World(silent=True) if whitebox is None else nullcontext(whitebox.world) as world:
        run = partial(world.run, ranks=ranks, timeout_s=bound_s)
        for again in ("as it is", "when it runs again, so that it begins with what it left behind"):
            try:
                plain: list[_Passed] = run(_run, test, "")
            except RankFailed as failure:
                raise WhiteBoxError(f"the test fails {again}, with no fault planted: {_how(failure)}") from failure
        marked = any(one.marked for one in plain)
        same = same_ranks([one.parts for one in plain], marked=marked)
        faulty = partial(run, partial(_run, marked=marked), test)
        return Mutated(tuple(try_fault(name, ranks, partial(_attempt, faulty, name), same=same) for name in names))


def choose(only: Collection[str]) -> Sequence[str]:
    """The names of faults that are asked for, or all. Raises ``WhiteBoxError`` for an unknown one."""
    if not isinstance(only, Iterable):
        raise WhiteBoxError(f"only is {only!r}: expected names of faults, such as {next(iter(MUTANTS))!r}")
    wanted = [only] if isinstance(only, str) else list(only)
    for name in wanted:
        if not isinstance(name, str) or name not in MUTANTS:
            known = nearest(str(name), list(MUTANTS)) or f"expected a name such as {first_few(list(MUTANTS))}"
            raise WhiteBoxError(f"unknown fault {name!r}: {known}")
    return [name for name in MUTANTS if not wanted or name in wanted]


def try_fault(
    name: str, ranks: int, attempt: Callable[[int | None], tuple[Outcome, str]], *, same: Group = ()
) -> Tried:
    """Try a fault on the first rank that it affects, from the last rank on; or on all.

    ``attempt``: plants it on one rank (None: on all), and returns how that ended, "not planted" if nothing changed.
    ``same``: ranks with equal contributions to each sum over them.
    """
    mutant = MUTANTS[name]
    if same and mutant.of_sums:
        return Tried(name, mutant.summary, "not judged", how=_SAME.format(first_few(same)))
    for rank in [None] if mutant.everywhere else reversed(range(ranks)):
        outcome, how = attempt(rank)
        if outcome != "not planted":
            return Tried(name, mutant.summary, outcome, rank, how)
    return Tried(name, mutant.summary, "not planted")


def _attempt(run: Callable[..., list["_Passed"]], name: str, rank: int | None) -> tuple[Outcome, str]:
    """How the test ends with a fault on ``rank``."""
    try:
        return ("let pass" if any(each.hit for each in run(name, rank)) else "not planted"), ""
    except RankFailed as failure:
        errors = [report.message.partition(": ") for report in failure.reports]
        early = [why for kind, _, why in errors if kind.endswith(UnchangedError.__name__)]
        kind, _, why = errors[failure.culprit]
        if early:
            return "not judged", f"the test ended before this changed anything: {early[0]}"
        if kind.endswith(SkippedError.__name__):
            return "not judged", f"the test skips on rank {failure.culprit}: {why}"
        return "caught", _how(failure)


def _how(failure: RankFailed) -> str:
    return f"rank {failure.culprit} {failure.reports[failure.culprit].sentence().partition(chr(10))[0]}"


class _Passed(NamedTuple):
    """A test that passed on a rank. hit: a fault changed something. marked: the test marks its step."""

    hit: bool
    parts: Parts
    marked: bool


# What plants the fault where the test says that its step runs; and whether it runs still, for each time it said so.
_current: tuple[Callable[[], AbstractContextManager[object]], list[bool]] = nullcontext, []


def _run(context: RankContext, test: Test, name: str, rank: int | None = None, *, marked: bool = False) -> _Passed:
    """Run the test on one rank, with a fault at its turn; a job for ``World.run``.

    The fault lasts during the marked step, or the whole test without a mark.
    """
    __tracebackhide__ = True
    global _current
    planted = bool(name) and rank in (None, context.rank)
    faults, marks = list[Planting](), list[bool]()

    def plant() -> AbstractContextManager[object]:
        if not planted:
            return nullcontext()
        faults.append(Planting())
        return MUTANTS[name].plant(faults[-1])

    _current = plant if marked else nullcontext, marks
    noting = nullcontext(Parts()) if name else parts_of_sums(lambda: any(marks))
    try:
        with nullcontext() if marked else plant(), noting as parts:
            test(context)
    except _kinds((Exception, SystemExit), "fail", "skip") as error:
        if planted and not any(one.hits for one in faults):
            raise UnchangedError(f"{type(error).__name__}: {error}") from error
        if name and isinstance(error, _kinds((SkipTest,), "skip")):
            raise SkippedError(str(error)) from error
        raise
    finally:
        _current = nullcontext, []
        for one in reversed(faults):
            one.left.close()
    return _Passed(any(one.hits for one in faults), parts, bool(marks))


def _kinds(own: tuple[type[BaseException], ...], *names: str) -> tuple[type[BaseException], ...]:
    """Return error types: ``own``, and those raised by these pytest functions, which the test may call."""
    pytest: Any = sys.modules.get("pytest")
    return own if pytest is None else (*own, *(getattr(pytest, name).Exception for name in names))


@contextmanager
def under_test() -> Iterator[None]:
    """Mark the code under test. Faults are planted only inside, and not in the test's own reference, for example.

    Outside ``mutate`` this does nothing.
    """
    plant, marks = _current  # simulated ranks share this module: another's run may have begun when this ends
    number = len(marks)
    marks.append(True)
    try:
        with plant():
            yield
    finally:
        marks[number] = False


@dataclass(frozen=True)
class PlantedStep:
    """``step``, with a fault on one ``rank``, or on all (None). Ranks that it changed leave a file in ``folder``.

    Without a name it is what campaigns plant to show that they can fail: ``summary``.
    """

    summary: ClassVar[str] = "all gradients are doubled on their way"

    step: Callable[..., Any]
    name: str = "gradient-doubled"
    rank: int | None = None
    folder: str = ""

    def __call__(self, model: Any, microbatches: Any) -> Any:
        if self.rank not in (None, own := dist.get_rank()):
            return self.step(model, microbatches)
        fault = Planting()
        try:
            with MUTANTS[self.name].plant(fault):
                return self.step(model, microbatches)
        finally:
            if fault.hits and self.folder:
                Path(self.folder, str(own)).touch()


Judge = Callable[[Callable[..., Any]], Verdict]


def mutate_step(step: Callable[..., Any], judge: Judge, *, ranks: int, only: Collection[str] = ()) -> Iterator[Tried]:
    """What ``judge``, which gives the verdict on a step, makes of each fault in this one, one after the other.

    A fault is planted where ``mutate`` plants it, and is gone with the model of its run. Raises ``WhiteBoxError`` for
    an unknown name of a fault. Whoever calls this has seen that the step passes without one.
    """
    return (try_fault(name, ranks, partial(_attempt_judged, step, judge, name)) for name in choose(only))


def _attempt_judged(step: Callable[..., Any], judge: Judge, name: str, rank: int | None) -> tuple[Outcome, str]:
    """What the verdict says of a fault that changed something: a crash or a hang has caught it, a doubt has not."""
    with TemporaryDirectory() as folder:
        verdict = judge(PlantedStep(step, name, rank, folder))
        if not any(Path(folder).iterdir()):
            return "not planted", ""
    if verdict.outcome == "fail" or verdict.ended:
        return "caught", verdict.summary
    return ("let pass", "") if verdict.outcome == "pass" else ("not judged", verdict.summary)

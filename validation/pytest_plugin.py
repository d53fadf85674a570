"""pytest's side of a world: fixtures, markers, and tests that want more ranks than there are.

All that a test suite of yours could have a name for begins with ``pipeproof``. Annotations in quotes are types that
pytest 7.4 does not export.
"""

import argparse
import hashlib
import os
import sys
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from pipeproof.worlds.accelerator import CPU, refusal
from pipeproof.worlds.kinds import KINDS, MOST_RUNS, REAL, parse_interleaving
from pipeproof.worlds.launcher import under_torchrun
from pipeproof.worlds.rank_report import NeedsMoreRanks
from pipeproof.worlds.timeout import parse_seconds

if TYPE_CHECKING:
    import torch

    from pipeproof.core.verdict import Verdict
    from pipeproof.reports.session import VerdictReports
    from pipeproof.whitebox import Mutated, WhiteBox
    from pipeproof.whitebox.fixture import FixtureBox
    from pipeproof.worlds.worker import RankContext
    from pipeproof.worlds.world import World

_GLOO = "gloo"
_WORLD = pytest.StashKey["World"]()
_BOX = pytest.StashKey["FixtureBox"]()
_REPORTS: "pytest.StashKey[VerdictReports]" = pytest.StashKey()
_SEED, _OFF = "--pipeproof-seed", "off"
_MUST = "The test has to assert this verdict, or to call its raise_if_failed()"
_LEFT_OUT = "pipeproof_ranks"  # a property of a report: how many ranks there were when the test wanted more


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options that concern ranks."""
    group = parser.getgroup("pipeproof", "pipeline-parallel tests on several ranks")
    where = "where ranks compute: cpu, cuda, or another type of device that torch names (default: cpu)"
    group.addoption("--pipeproof-device", default=CPU, metavar="TYPE", help=where)
    group.addoption(
        "--pipeproof-rank-timeout",
        type=parse_seconds,
        default=300.0,
        metavar="SECONDS",
        help="under torchrun, how long ranks wait for one of them before the session ends (default: 300)",
    )
    drawn = f"seeds torch, random and numpy, with a test's name, where it uses ranks; or {_OFF} (default: 0)"
    group.addoption(_SEED, type=_parse_seed, default=0, metavar="N", help=drawn)
    group.addoption(
        "--pipeproof-world", choices=KINDS, default=REAL, help="real ranks, or simulated ones (default: real)"
    )
    rules = "what simulated ranks' messages may do: gloo, nccl, and others (default: gloo)"
    group.addoption("--pipeproof-transport", default=_GLOO, metavar="NAME", help=rules)
    kept = "how many bytes of what one simulated rank sends to another are kept until they are received (default: 0)"
    group.addoption("--pipeproof-room", type=int, default=0, metavar="BYTES", help=kept)
    order = "the seed of simulated ranks: who is next, and what moves; or as a replay line has it (default: 0)"
    group.addoption("--pipeproof-interleaving", type=parse_interleaving, default=0, metavar="N", help=order)
    every = f"run every interleaving of simulated ranks that differs, at most N of each step (default: {MOST_RUNS})"
    group.addoption("--pipeproof-exhaust", type=int, nargs="?", const=MOST_RUNS, metavar="N", help=every)
    one = "the one case that campaigns of whitebox.fuzz run, as a replay line has it, in place of what they would draw"
    group.addoption("--pipeproof-case", default="", metavar="CASE", help=one)

    pages = "write a page there for each verdict that fails a test"
    group.addoption("--pipeproof-html", metavar="DIR", help=pages)

    most = "processes in which tests have left more process groups than this are replaced (default: never)"
    parser.addini("pipeproof_most_groups", most, default="")


def _parse_seed(text: str) -> int | None:
    """None: random numbers are left alone."""
    if text != _OFF and not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, as 7, or {_OFF}")
    return None if text == _OFF else int(text)


def _most_groups(config: pytest.Config) -> int | None:
    text = str(config.getini("pipeproof_most_groups"))
    if text and not (text.isascii() and text.isdecimal()):
        raise pytest.UsageError(f"pipeproof_most_groups is {text!r}: expected a number of process groups, as 100")
    return int(text) if text else None


def _transport(config: pytest.Config) -> str:
    name: str = config.getoption("--pipeproof-transport")
    room = config.getoption("--pipeproof-room")
    if name != _GLOO or room:
        from pipeproof.pipeline.transports import TransportNameError, keeps_none, transport_of  # numpy comes with it

        try:
            transport = transport_of(name)
        except TransportNameError as error:
            raise pytest.UsageError(f"--pipeproof-transport: {error}") from None
        if room and (why := keeps_none(transport)):
            raise pytest.UsageError(f"--pipeproof-room={room}: {why}")
    return name


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known, count what is left out, and under torchrun make the ranks go together."""
    config.addinivalue_line(
        "markers", "pipeproof_one_rank: under torchrun run on rank 0 only; the other ranks take its verdict"
    )
    fresh = "pipeproof_fresh_ranks: runs on ranks that no test used before, and that none uses after it"
    config.addinivalue_line("markers", fresh)
    config.addinivalue_line("markers", "pipeproof(ranks, seed): how many ranks a step takes, and what seeds the test")
    config.addinivalue_line("markers", "pipeproof_ranks: starts ranks; every test that uses pipeproof_world has it")
    _most_groups(config)  # so that a wrong one is reported at once
    most, room = (config.getoption(f"--pipeproof-{name}") for name in ("exhaust", "room"))
    if most is not None and most < 1:
        raise pytest.UsageError(f"--pipeproof-exhaust is {most}: expected the most interleavings of a step, as 100")
    if room < 0:
        raise pytest.UsageError(f"--pipeproof-room is {room}: expected a number of bytes, as 4096")
    for name in ("exhaust",) * (most is not None) + ("room",) * (room > 0):
        if config.getoption("--pipeproof-world") == REAL:
            text = f"--pipeproof-{name} has no effect without --pipeproof-world=simulated: leave it out"
            raise pytest.UsageError(text)
    if why := refusal(config.getoption("--pipeproof-device")):
        raise pytest.UsageError(f"--pipeproof-device: {why}")
    _transport(config)
    config.pluginmanager.register(LeftOut(), "pipeproof-left-out")
    from pipeproof.reports.session import VerdictReports, make_folder

    config.stash[_REPORTS] = reports = VerdictReports(make_folder(config.getoption("--pipeproof-html")))
    config.pluginmanager.register(reports, "pipeproof-reports")
    if under_torchrun():
        if getattr(config.option, "numprocesses", None) or getattr(config.option, "dist", "no") != "no":
            raise pytest.UsageError(
                "-n does not go with torchrun: each of its workers would take itself for the same rank. "
                "Run either `torchrun --nproc-per-node N -m pytest` or `pytest -n N`"
            )
        from pipeproof.worlds.pytest_torchrun import RanksTogether  # torch comes with it, so only here

        config.pluginmanager.register(RanksTogether(config), "pipeproof-torchrun")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses ranks, so that ``-m "not pipeproof_ranks"`` leaves what needs none."""
    for item in items:
        _marked(item)  # so that a wrong marker is reported at once
        if _uses_ranks(item):
            item.add_marker("pipeproof_ranks")


def _marked(item: pytest.Item) -> dict[str, int]:
    """What the nearest marker ``pipeproof`` says, by name. Raises ``pytest.UsageError``."""
    if (mark := item.get_closest_marker("pipeproof")) is None:
        return {}
    least = {"ranks": 1, "seed": 0}
    for name, value in mark.kwargs.items():
        if name not in least:
            raise pytest.UsageError(f"{item.nodeid}: the marker pipeproof has no {name!r}: expected ranks= and seed=")
        if type(value) is not int or value < least[name]:
            raise pytest.UsageError(
                f"{item.nodeid}: the marker pipeproof has {name}={value!r}: expected a whole number from {least[name]}"
            )
    if mark.args:
        raise pytest.UsageError(
            f"{item.nodeid}: the marker pipeproof takes names: expected ranks= and seed=, as ranks=2"
        )
    return dict(mark.kwargs)


def _seed(item: pytest.Item) -> int | None:
    """What seeds a test: its marker, or else the option; None: nothing."""
    return _marked(item).get("seed", item.config.getoption(_SEED))  # type: ignore[no-any-return]


def _drawn(seed: int, name: str) -> int:
    return int(hashlib.sha256(f"{seed} {name}".encode()).hexdigest()[:8], 16)


def _uses_ranks(item: pytest.Item) -> bool:
    return "pipeproof_world" in getattr(item, "fixturenames", ())


def _drawing(item: pytest.Item, name: str) -> AbstractContextManager[None]:
    """While this is open, a test that uses ranks draws what follows from ``name``; then all is as it was."""
    seed = _seed(item)
    if seed is None or not _uses_ranks(item):
        return nullcontext()
    from pipeproof.worlds.settings import drawing_apart  # torch comes with it

    return drawing_apart(_drawn(seed, name))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """What a test draws follows from its name and the seed, in every process alike."""
    with _drawing(item, item.nodeid):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: "pytest.FixtureDef[Any]", request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """What several tests share is drawn alike, whichever of them comes first."""
    if fixturedef.scope == "function":
        return (yield)
    with _drawing(request._pyfuncitem, f"{fixturedef.baseid}::{fixturedef.argname}"):
        return (yield)


@pytest.fixture(scope="session")
def pipeproof_world(request: pytest.FixtureRequest) -> Iterator["World"]:
    """Ranks to run jobs on, kept for the whole session: ``pipeproof_world.run(job, ranks=4)``."""
    config = request.config
    bound_s = min(120.0, config.getoption("--pipeproof-rank-timeout"))
    with _world(config, device=config.getoption("--pipeproof-device"), timeout_s=bound_s) as world:
        if (drawn := config.getoption(_SEED)) != 0:
            world.seed_option = f"{_SEED}={_OFF if drawn is None else drawn}"
        config.stash[_WORLD] = world
        yield world


def _world(config: pytest.Config, **given: Any) -> "World":
    if config.getoption("--pipeproof-world") == REAL:
        from pipeproof.worlds.world import World  # torch comes with it, so only where a test wants ranks

        return World(most_groups=_most_groups(config), **given)
    from pipeproof.wings.simulated import SimulatedWorld

    names = ("exhaust", "room")
    world = SimulatedWorld(seed=config.getoption("--pipeproof-interleaving"), transport=_transport(config), **given)
    world.most, world.room = (config.getoption(f"--pipeproof-{name}") for name in names)
    return world


def pytest_terminal_summary(terminalreporter: "pytest.TerminalReporter", config: pytest.Config) -> None:
    """Say how many interleavings of simulated ranks there were."""
    if (world := config.stash.get(_WORLD, None)) is not None and world.searched:
        terminalreporter.write_line(f"pipeproof: {world.searched}")


@pytest.fixture(autouse=True)
def _pipeproof_fresh_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """For a test marked so: what a runtime keeps in its globals, such as its groups, is not there, nor stays."""
    if request.node.get_closest_marker("pipeproof_fresh_ranks") is None:
        yield
        return
    world: World = request.getfixturevalue("pipeproof_world")
    world.close()
    yield
    world.close()


@pytest.fixture
def whitebox(request: pytest.FixtureRequest, pipeproof_world: "World") -> Iterator["WhiteBox"]:
    """Judges a training step of one's own: ``whitebox.validate(step, reference=..., microbatches=..., ranks=4)``.

    A test fails that leaves a verdict unread which is no pass. Its ``mutate`` is
    ``pipeproof.whitebox.mutate`` on these ranks.
    """
    from pipeproof.whitebox.fixture import FixtureBox

    def mutate(test: Callable[["RankContext"], object], **asked: Any) -> "Mutated":
        from pipeproof.whitebox import mutate

        return mutate(test, whitebox=box, **asked)

    ranks = _marked(request.node).get("ranks")
    if ranks is not None and under_torchrun() and ranks > (available := int(os.environ["WORLD_SIZE"])):
        raise NeedsMoreRanks(ranks, available)
    case = request.config.getoption("--pipeproof-case")
    box = request.node.stash[_BOX] = FixtureBox(pipeproof_world, case=case, mutate=mutate, ranks=ranks)
    yield box
    _refuse_unread(box)


@pytest.fixture
def pipeproof_generator(request: pytest.FixtureRequest) -> "torch.Generator":
    """A generator for a test's data: what it draws follows from the test's name and its seed, on each rank alike."""
    import torch

    drawn, seed = torch.Generator(), _seed(request.node)
    return drawn if seed is None else drawn.manual_seed(_drawn(seed, request.node.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A test that did not look at a verdict fails here, unless it fails already."""
    try:
        result = yield
    except Exception:
        if _BOX in item.stash:
            item.stash[_BOX].unread()
        raise
    if _BOX in item.stash:
        _refuse_unread(item.stash[_BOX])
    return result


def _refuse_unread(box: "FixtureBox") -> None:
    for verdict in box.unread():
        pytest.fail(f"unread: {verdict.reason}. {_MUST}\n{verdict}", pytrace=False)


def _subjects(error: BaseException) -> list["Verdict"]:
    """The verdicts, no passes, that an error is about. Where an assertion failed, their text becomes its notes."""
    module = sys.modules.get("pipeproof.core.verdict")  # else there is none
    if module is None or not isinstance(error, AssertionError):
        return []
    if isinstance(error, module.ValidationFailed):
        return [error.verdict]
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    fuzzing = sys.modules.get("pipeproof.whitebox.fuzzing")  # what it makes has a verdict
    there = [
        one.verdict if fuzzing is not None and isinstance(one, fuzzing.FuzzResult) else one
        for one in frame.f_locals.values()
    ]
    found = {id(each): each for each in there if isinstance(each, module.Verdict) and not each}
    for verdict in found.values():
        if verdict.replay not in str(error):  # else the test itself has it said
            error.add_note(str(verdict))
    return [*found.values()]


class LeftOut:
    """Skips tests that want more ranks than there are, and counts them: a count must not shrink in silence."""

    def __init__(self) -> None:
        self._available: list[int] = []
        self._passed = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Report a want of ranks as a skip, and with an assertion the text of what it is about."""
        error = call.excinfo.value if call.excinfo is not None else None
        subjects = [] if error is None else _subjects(error)
        box = item.stash.get(_BOX, None)
        if box is not None and call.when == "call":
            from pipeproof.reports.session import properties

            item.user_properties += properties(box.verdicts)
        report = yield
        failing = [*subjects, *(box.take_told() if box is not None else ())]
        if failing and report.failed:
            vars(report)["pipeproof"] = item.config.stash[_REPORTS].of_test(item.nodeid, failing)
        crash = getattr(report.longrepr, "reprcrash", None)
        if subjects and crash is not None:  # pytest's summary begins with the type's whole name
            crash.message = f"{subjects[0].summary} ({type(error).__name__})"
        if subjects and item.config.getoption("verbose") > 0:
            report.sections += [("pipeproof", verdict.details) for verdict in subjects]
        if report.failed and _uses_ranks(item) and (seed := _seed(item)) is not None:
            said = f"{_SEED}={seed}" if "seed" not in _marked(item) else f"seed={seed} of its marker"
            seeded = f"torch, random and numpy: {said}, and the test's name"
            report.sections.append(("random numbers", seeded))
        if isinstance(error, NeedsMoreRanks):
            report.outcome = "skipped"
            report.longrepr = (str(item.path), (item.location[1] or 0) + 1, f"Skipped: {error}")
            report.user_properties.append((_LEFT_OUT, error.available))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count."""
        self._passed += report.when == "call" and report.passed
        if report.skipped:
            self._available += [
                ranks for name, ranks in report.user_properties if name == _LEFT_OUT and isinstance(ranks, int)
            ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A session in which nothing passed because ranks were wanting is no success."""
        if self._available and not self._passed and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: "pytest.TerminalReporter") -> None:
        """Say what was left out."""
        if self._available:
            count = len(self._available)
            tests, verb = ("test", "needs") if count == 1 else ("tests", "need")
            terminalreporter.write_line(
                f"pipeproof: {count} {tests} {verb} more ranks than the {self._available[0]} here and did not run"
            )
            if not self._passed:
                terminalreporter.write_line("pipeproof: nothing else passed, so this session is no success", red=True)

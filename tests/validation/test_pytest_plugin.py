"""Under torchrun all ranks share every verdict, rank 0 reports it, and no test is lost in silence."""

import json
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.golden import golden
from tests.support.warm_start import Ended

CONFTEST = """
import os, random
import pytest

RANK = int(os.environ.get("RANK", 0))

@pytest.fixture(scope="session")
def world(pipeproof_world):
    return pipeproof_world

def pytest_collection_modifyitems(items):
    random.Random(RANK).shuffle(items)  # as a plugin does that draws its own seed on every rank

def pytest_runtest_logreport(report):
    with open(f"rank-{RANK}.log", "a") as log:
        print(report.nodeid, report.when, report.outcome, file=log)
"""

TESTS = """
import os, time
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies

RANK = int(os.environ.get("RANK", 0))

def total(context, addend=0):
    mine = torch.tensor([float(context.rank + addend)])
    dist.all_reduce(mine, group=context.group)
    return mine.item()

def test_passes(world):
    assert world.run(total, ranks=2) == [1.0, 1.0]

def test_rank_1_leaves_early(world):
    print("noise of rank", RANK)
    assert RANK != 1, "rank 1 does not like it"
    world.run(total, ranks=2)

def test_rank_1_skips_alone(world):
    if RANK == 1:
        pytest.skip("not on mine")
    world.run(total, ranks=2)

def test_all_skip():
    pytest.skip("nobody likes it")

def test_the_job_fails_on_rank_1(world):
    def job(context):
        assert context.rank != 1, "in the job"
        dist.barrier()
    world.run(job, ranks=2)

def test_needs_more(world):
    world.run(total, ranks=3)

@pytest.mark.xfail(strict=True, reason="known")
def test_fails_on_rank_1_as_expected():
    assert RANK != 1

@pytest.fixture
def setup_fails_on_rank_1():
    assert RANK != 1, "no setup on rank 1"

def test_setup(setup_fails_on_rank_1):
    pass

@pytest.fixture
def teardown_fails_on_rank_1():
    yield
    assert RANK != 1, "no teardown on rank 1"

def test_teardown(teardown_fails_on_rank_1):
    pass

@pytest.mark.pipeproof_one_rank
def test_one_rank_passes(tmp_path, world_of_one):
    assert RANK == 0

@pytest.mark.pipeproof_one_rank
def test_one_rank_fails():
    assert RANK == 1, "rank 0 does not like it"

@pytest.fixture
def world_of_one():
    assert RANK == 0, "a fixture of a test for one rank is for one rank"

def test_subtests(subtests):
    for index in range(2):
        with subtests.test(index=index):
            assert (RANK, index) != (1, 1)

@settings(max_examples=5)
@given(strategies.integers(0, 10**9))
def test_ranks_draw_alike(world, number):
    assert world.run(total, number % 1000, ranks=2) == [1.0 + 2 * (number % 1000)] * 2

@given(strategies.integers(0, 10**9))
def test_ranks_shrink_alike(world, number):
    assert world.run(total, number % 1000, ranks=2)[0] < 43
"""


@dataclass(frozen=True)
class Session:
    """What one launch of pytest left: its output, the exit status of each rank that failed, and its files.

    A rank that torchrun ended because another had failed has no status of its own.
    """

    output: str
    statuses: frozenset[int]
    folder: Path

    def log(self, rank: int) -> list[str]:
        """The phases that a rank reported, in its order: node id, phase, outcome."""
        return (self.folder / f"rank-{rank}.log").read_text().splitlines()

    def outcomes(self) -> dict[str, set[str]]:
        """The outcomes of each test's phases by its name, as rank 0 reported them."""
        outcomes: dict[str, set[str]] = {}
        for line in self.log(0):
            nodeid, _, outcome = line.split()
            outcomes.setdefault(nodeid.partition("::")[2], set()).add(outcome)
        return outcomes

    def junit(self) -> dict[str, str]:
        """The text of everything that is wrong with a test, by its name, in the junit file."""
        cases = ElementTree.parse(self.folder / "junit.xml").iter("testcase")
        return {case.attrib["name"]: "\n".join(case.itertext()) for case in cases}


Run = Callable[..., Ended]
Launch = Callable[..., Session]


@pytest.fixture(scope="module")
def launch(torchrun: Run, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Run pytest under torchrun on one test file."""

    def launch(tests: str, *options: str) -> Session:
        folder = tmp_path_factory.mktemp("session")
        (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
        (folder / "conftest.py").write_text(CONFTEST)
        (folder / "test_it.py").write_text(tests)
        launched = torchrun(folder, "-m", "pytest", "--junitxml=junit.xml", *options, ranks=2)
        statuses = frozenset(launched.statuses) - {0, -signal.SIGTERM}
        return Session(launched.stdout, statuses, folder)

    return launch


@pytest.fixture(scope="module")
def session(launch: Launch) -> Session:
    """One session with all kinds of tests: one launch for them, as a launch takes seconds."""
    return launch(TESTS)


def test_ranks_go_through_the_same_phases_in_the_same_order(session: Session) -> None:
    assert session.log(0) == session.log(1)
    assert len(session.log(0)) > 30


STORIES = [
    ("test_rank_1_leaves_early", "rank 1 of 2 raised AssertionError: rank 1 does not like it\n"),
    ("test_rank_1_skips_alone", "rank 1 of 2 skipped alone: not on mine\n"),
    ("test_the_job_fails_on_rank_1", "rank 1 of 2 raised AssertionError: in the job\n"),
    ("test_setup", "rank 1 of 2 raised AssertionError: no setup on rank 1\n"),
    ("test_teardown", "rank 1 of 2 raised AssertionError: no teardown on rank 1\n"),
    ("test_one_rank_fails", "AssertionError: rank 0 does not like it\n"),
    ("test_subtests", "rank 1 of 2 raised AssertionError: assert (1, 1) != (1, 1)\n"),
    ("test_ranks_shrink_alike", "number=21"),
]


@pytest.mark.parametrize(("name", "story"), STORIES, ids=[name for name, _ in STORIES])
def test_a_failure_of_one_rank_is_told_by_rank_0(session: Session, name: str, story: str) -> None:
    if name == "test_subtests" and not hasattr(pytest, "Subtests"):
        pytest.skip("pytest has had subtests since 9")
    assert "failed" in session.outcomes()[name]
    assert story in session.output, session.output
    assert story in session.junit()[name]


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["test_passes", "test_ranks_draw_alike", "test_one_rank_passes"])
def test_a_failure_leaves_later_tests_alone(session: Session, name: str) -> None:
    assert session.outcomes()[name] == {"passed"}


@pytest.mark.parametrize("name", ["test_all_skip", "test_needs_more", "test_fails_on_rank_1_as_expected"])
def test_a_skip_or_expected_failure_stays_one(session: Session, name: str) -> None:
    assert session.outcomes()[name] == {"passed", "skipped"}


@pytest.mark.sweep
def test_what_the_culprit_printed_is_shown(session: Session) -> None:
    golden(session.output, lines="^noise of rank 1$")


def test_a_want_of_ranks_is_counted(session: Session) -> None:
    golden(session.output, lines="^pipeproof:")


@pytest.mark.sweep
def test_rank_0_alone_reports_and_all_end_alike(session: Session) -> None:
    assert session.output.count("test session starts") == 1
    assert session.statuses == {1}
    failed = json.loads((session.folder / ".pytest_cache/v/cache/lastfailed").read_text())
    assert {nodeid.partition("::")[2] for nodeid in failed} == {
        name for name, outcomes in session.outcomes().items() if "failed" in outcomes
    }


def test_ranks_that_collect_different_tests_end_with_the_difference(launch: Launch) -> None:
    session = launch(TESTS + "if RANK == 1:\n    del test_passes\n")
    golden("\n".join(re.findall(r"the ranks collected.*|rank 1 lacks \S+", session.output)))
    assert session.statuses == {2}


def test_the_first_failure_of_any_rank_is_the_last_test(launch: Launch) -> None:
    session = launch(
        "from conftest import RANK\n\ndef test_a(): assert RANK == 0\n\ndef test_b(): assert RANK == 0\n",
        *("-x", "-p", "no:cacheprovider"),
    )
    assert session.log(0) == session.log(1)
    assert len(session.log(0)) == 3
    assert "1 failed" in session.output


def test_a_rank_that_breaks_before_its_session_is_told_and_ends_the_others_soon(launch: Launch) -> None:
    session = launch(
        """
import os

def pytest_configure():
    assert os.environ["RANK"] == "0", "no configuration on rank 1"

def test_it(): pass
""",
        "-p",
        "test_it",
    )
    golden("\n".join(sorted({*re.findall("rank 1 did not come.*|AssertionError: .*", session.output)})))
    assert session.statuses == {3}


STUCK = """
import os, time
import pytest
from conftest import RANK

def test_stuck():
    while RANK == 1:
        time.sleep(0.1)
"""


def test_a_rank_that_is_stuck_is_named_and_the_session_ends(launch: Launch) -> None:
    session = launch(STUCK, "--pipeproof-rank-timeout=6")
    story = "rank 1 of 2 did not come to the end of call of test_it.py::test_stuck within 6 s\n"
    assert story in session.output
    assert story in session.junit()["test_stuck"]
    assert "time.sleep(0.1)" in session.junit()["test_stuck"]
    assert session.statuses == {3}


@pytest.mark.sweep
@pytest.mark.parametrize("option", ["--pipeproof-rank-timeout=1e9", "--override-ini=pipeproof_most_groups=-1"])
def test_a_bound_that_is_none_is_refused(option: str, python: Run, tmp_path: Path) -> None:
    run = python(tmp_path, "-m", "pytest", option)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    golden("\n".join(re.findall("(?:error|ERROR): (?!usage)(.*)", run.stdout)), exact=True)


@pytest.mark.sweep
def test_a_rank_whose_process_ends_is_named(launch: Launch) -> None:
    session = launch(STUCK.replace("time.sleep(0.1)", "os._exit(7)"))
    story = "rank 1 of 2 did not come to the end of call of test_it.py::test_stuck before torchrun ended the session"
    assert story in session.junit()["test_stuck"]
    assert session.statuses == {3, 7}


WANTING = """
from pipeproof.worlds.rank_report import NeedsMoreRanks

def test_it():
    raise NeedsMoreRanks(4, 2)

def test_it_too():
    raise NeedsMoreRanks(3, 2)
"""


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_session_that_only_leaves_out_is_no_success(python: Run, tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_it.py").write_text(WANTING)
    run = python(tmp_path, "-m", "pytest", "-rs", workers)
    golden("\n".join(sorted(run.stdout.splitlines())), lines="^SKIPPED|^pipeproof:", exact=True)
    assert run.returncode == 1


@pytest.mark.sweep
def test_a_session_in_which_something_passes_is_one(python: Run, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(WANTING + "\ndef test_passes(): pass\n")
    run = python(tmp_path, "-m", "pytest")
    golden(run.stdout, lines="^pipeproof:")
    assert "nothing else passed" not in run.stdout
    assert run.returncode == 0


@pytest.mark.parametrize("workers", [["-n2"], ["--dist=load", "--tx=popen"]])
def test_workers_are_refused_under_torchrun(python: Run, tmp_path: Path, workers: list[str]) -> None:
    (tmp_path / "test_it.py").write_text("open('ran', 'w')\n")
    run = python(tmp_path, "-m", "pytest", *workers, RANK="0", WORLD_SIZE="1", TORCHELASTIC_RUN_ID="x")
    golden(run.stdout, lines="^ERROR")
    assert run.returncode == 4
    assert not (tmp_path / "ran").exists()


def test_the_plugin_does_without_torch_until_ranks_are_wanted(new_python: Run, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import sys\n\ndef test_it(): assert 'torch' not in sys.modules\n")
    run = new_python(tmp_path, "-m", "pytest", "-p", "no:hypothesispytest")
    assert run.returncode == 0, run.stdout

"""Ranks must collect the same tests, in whatever order."""

import dataclasses

import pytest

from pipeproof.worlds.pytest_torchrun import Collected, Phase, difference, settle
from tests.support.golden import golden

COLLECTED: dict[str, tuple[list[Collected], bool]] = {
    "another order": ([Collected(["a", "b"], {}), Collected(["b", "a"], {})], False),
    "an error of all": ([Collected([], {"x.py": "on rank 0"}), Collected([], {"x.py": "on rank 1"})], False),
    "lacking": ([Collected(["a", "b"], {}), Collected(["b"], {}), Collected(["a", "b", *"cdefgh"], {})], True),
    "an error of one": ([Collected(["a"], {}), Collected([], {"x.py": "ImportError: no"})], True),
}


@pytest.mark.parametrize("name", COLLECTED)
def test_differences_in_what_ranks_collect_are_told(name: str) -> None:
    collected, differ = COLLECTED[name]
    told = difference(collected)
    assert bool(told) == differ
    golden(told or "none")


PASSED = Phase("passed", "", "", None, (), 1.0)
NOISE = ("Captured stdout call", "noise")
FAILED = Phase("failed", "ValueError: bad split", "the whole traceback", None, (NOISE,), 2.0)
SKIPPED = Phase("skipped", "not today", "", None, (), 2.0)
XFAILED = Phase("skipped", "", "", "known bug", (), 2.0)
XPASSED = Phase("passed", "", "", "known bug", (), 2.0)
STRICT = Phase("failed", "[XPASS(strict)] known bug", "[XPASS(strict)] known bug", None, (), 2.0)


def report_of(phase: Phase) -> pytest.TestReport:
    """pytest's report on the rank that saw this phase."""
    longrepr = {"failed": phase.text, "skipped": ("test_x.py", 3, f"Skipped: {phase.message}")}.get(phase.outcome)
    if phase is XFAILED:
        longrepr = "a failure"
    report = pytest.TestReport("test_x.py::t", ("test_x.py", 2, "t"), {}, phase.outcome, longrepr, "call")  # type: ignore[arg-type]
    report.sections.extend(phase.sections)
    if phase.expected is not None:
        report.wasxfail = phase.expected
    return report


def settled(phases: list[Phase], rank: int = 0) -> pytest.TestReport:
    """The report of one rank after the ranks have exchanged what they saw."""
    report = report_of(phases[rank])
    settle(report, phases, rank=rank)
    return report


@pytest.mark.parametrize("phase", [PASSED, FAILED, SKIPPED, XFAILED, XPASSED, STRICT])
def test_where_ranks_agree_a_report_stays_as_it_is(phase: Phase) -> None:
    before, after = report_of(phase), settled([phase, phase])
    assert (after.outcome, after.longrepr, after.sections) == (before.outcome, before.longrepr, before.sections)
    assert getattr(after, "wasxfail", None) == phase.expected


def test_a_report_tells_its_phase() -> None:
    for phase in (PASSED, SKIPPED, XPASSED, STRICT):
        assert dataclasses.replace(Phase.of(report_of(phase)), at_s=phase.at_s) == phase


@pytest.mark.parametrize(
    ("phases", "story"),
    [
        ([PASSED, FAILED], "rank 1 of 2 raised ValueError: bad split\n    the whole traceback\nrank 0: finished"),
        ([PASSED, SKIPPED], "rank 1 of 2 skipped alone: not today\nrank 0: finished"),
        ([PASSED, FAILED, SKIPPED], "rank 1 of 3 raised ValueError: bad split\n"),
        ([XFAILED, FAILED], "rank 1 of 2 raised ValueError: bad split\n"),
        (
            [dataclasses.replace(FAILED, message="another", at_s=9.0), FAILED],
            "rank 1 of 2 raised ValueError: bad split\n",
        ),
    ],
)
def test_where_one_fails_all_fail_with_its_text(phases: list[Phase], story: str) -> None:
    report = settled(phases)
    assert report.failed
    assert not hasattr(report, "wasxfail")
    assert report.longreprtext.startswith(story)
    assert settled(phases, rank=1).failed


def test_the_culprits_own_report_keeps_its_text_and_the_others_show_what_it_captured() -> None:
    own, other = settled([PASSED, FAILED], rank=1), settled([PASSED, FAILED], rank=0)
    assert own.longreprtext == FAILED.text
    assert own.sections == [NOISE, ("the other ranks", "rank 0: finished")]
    ((title, text),) = other.sections
    assert text == "noise"
    golden(title)


@pytest.mark.parametrize("others", [PASSED, XPASSED, STRICT])
def test_an_expected_failure_may_show_on_some_ranks_only(others: Phase) -> None:
    for rank in (0, 1):
        report = settled([others, XFAILED], rank=rank)
        assert (report.outcome, report.wasxfail) == ("skipped", "known bug")

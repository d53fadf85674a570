"""pytest's fixture ``whitebox``: a verdict that is no pass, and that a test does not look at, fails the test."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from pipeproof.foreign import WhiteBox
from pipeproof.foreign.fixture import FixtureBox, FixtureVerdict
from pipeproof.judging.cause import Cause
from pipeproof.judging.verdict import ValidationFailed, Verdict
from pipeproof.worlds.world import World
from tests.support.warm_start import Ended

Launch = Callable[..., Ended]
FAIL = Verdict("c", "fail", "none", (), cause=(Cause("scale", factor=4.0),), seconds=1.0)
UNKNOWN = Verdict("c", "unknown", "none", (), headline="too little was seen")
PASS = Verdict("c", "pass", "bitwise", ())


@pytest.mark.parametrize(("verdict", "holds"), [(PASS, True), (FAIL, False), (UNKNOWN, False)])
def test_a_pass_alone_is_true(verdict: Verdict, holds: bool) -> None:
    assert bool(verdict) is holds


def raised(verdict: Verdict) -> None:
    with pytest.raises(ValidationFailed):
        verdict.raise_if_failed()


# What a test may do with a verdict, and whether it then knows how it went.
USES: dict[str, tuple[Callable[[Verdict], object], bool]] = {
    "nothing": (lambda verdict: None, False),
    "how long it took": (lambda verdict: verdict.seconds, False),
    "what was run": (lambda verdict: (verdict.config, verdict.replay, verdict.measured), False),
    "truth": (bool, True),
    "raising": (raised, True),
    "the outcome": (lambda verdict: verdict.verdict, True),
    "text": (str, True),
    "repr": (repr, True),
    "status": (lambda verdict: verdict.exit_status, True),
    "a law": (lambda verdict: verdict.laws, True),
    "the cause": (lambda verdict: verdict.cause, True),
    "as data": (lambda verdict: verdict.as_dict(), True),
    "another": (lambda verdict: verdict == FAIL, True),
    "changed": (lambda verdict: replace(verdict, rerun="x"), True),
}


@pytest.mark.parametrize(("use", "looks"), USES.values(), ids=USES)
def test_what_counts_as_a_look(use: Callable[[Verdict], object], looks: bool) -> None:
    box = FixtureBox(cast(World, None))
    use(box.hand_out(FAIL))
    assert box.unread() == ([] if looks else [FAIL])
    assert box.unread() == [], "it is told once"


def test_a_pass_need_not_be_looked_at_and_unknown_has_to() -> None:
    box = FixtureBox(cast(World, None))
    for verdict in (PASS, UNKNOWN, PASS):
        box.hand_out(verdict)
    assert box.unread() == [UNKNOWN]


def test_a_verdict_stays_the_value_that_it_is() -> None:
    handed = FixtureBox(cast(World, None)).hand_out(FAIL)
    assert isinstance(handed, FixtureVerdict)
    assert handed == FAIL
    assert FAIL == handed
    assert handed != UNKNOWN
    assert hash(handed) == hash(FAIL)
    assert str(handed) == str(FAIL)
    assert handed.as_dict() == FAIL.as_dict()
    assert repr(handed) == "<Verdict FAIL >"
    assert WhiteBox(cast(World, None)).hand_out(FAIL) is FAIL


TESTS = """
import pytest
from tests.validation.foreign.test_fixture import FAIL, PASS, UNKNOWN

def test_bare_fail(whitebox): whitebox.hand_out(FAIL)
def test_bare_unknown(whitebox): whitebox.hand_out(UNKNOWN)
def test_assert_fail(whitebox): assert whitebox.hand_out(FAIL)
def test_assert_another():
    verdict = UNKNOWN
    assert verdict
def test_assert_outcome(whitebox):
    verdict = whitebox.hand_out(FAIL)
    assert verdict.verdict == "pass"
def test_assert_with_text(whitebox):
    verdict = whitebox.hand_out(FAIL)
    assert verdict, str(verdict)
def test_raise(whitebox): whitebox.hand_out(FAIL).raise_if_failed()
def test_two(whitebox):
    whitebox.hand_out(FAIL)
    assert 1 == 2

def test_pass_bare(whitebox): whitebox.hand_out(PASS)
def test_pass_asserted(whitebox): assert whitebox.hand_out(PASS)
def test_pass_as_meant(whitebox): assert not whitebox.hand_out(FAIL)
def test_pass_none(whitebox): pass

@pytest.mark.xfail(strict=True)
def test_xfail_bare(whitebox): whitebox.hand_out(FAIL)

@pytest.fixture
def late(whitebox):
    yield
    whitebox.hand_out(FAIL)

def test_error_late(late): pass
"""
REASONS = {
    "test_bare_fail": "Failed: unread: scale x4 everywhere. The test has to",
    "test_bare_unknown": "Failed: unread: UNKNOWN too little was seen. The test has to",
    "test_assert_fail": "scale x4 everywhere (AssertionError)",
    "test_assert_another": "UNKNOWN too little was seen (AssertionError)",
    "test_assert_outcome": "scale x4 everywhere (AssertionError)",
    "test_assert_with_text": "scale x4 everywhere (AssertionError)",
    "test_raise": "scale x4 everywhere (PipelineMismatch)",
    "test_two": "assert 1 == 2",
    "test_error_late": "Failed: unread: scale x4 everywhere. The test has to",
}


@pytest.mark.parametrize("way", ["plain", "workers", "torchrun"])
def test_a_test_that_does_not_look_fails(python: Launch, torchrun: Launch, tmp_path: Path, way: str) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "tests").symlink_to(Path(__file__).parents[2])
    pytests = ("-m", "pytest", "-p", "no:cacheprovider", *(["-n2"] if way == "workers" else []), "test_it.py")
    run = torchrun(tmp_path, *pytests, ranks=2) if way == "torchrun" else python(tmp_path, *pytests, COLUMNS="160")
    lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    said = dict(line.partition("::")[2].split(" - ") for line in lines)
    assert said.keys() == REASONS.keys(), run.stdout
    if way != "torchrun":  # where there is no room for it
        assert {name: said[name][: len(reason)] for name, reason in REASONS.items()} == REASONS
    assert "8 failed, 5 passed, 1 xfailed, 1 error" in run.stdout
    texts = re.split(r"(?m)^_{3,} .*?(test_\w+) _{3,}$", run.stdout)
    for name, text in zip(texts[1::2], texts[2::2], strict=True):
        assert text.count("replay    pipeproof replay") == (name != "test_two"), text
    assert "\nE   pipeproof.PipelineMismatch: FAIL " in run.stdout

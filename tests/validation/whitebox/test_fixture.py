"""pytest's fixture ``whitebox``: a verdict that is no pass has to be looked at, and what a test draws is seeded."""

import itertools
import random
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy
import pytest
import torch

from pipeproof.core.cause import Cause
from pipeproof.core.verdict import ValidationFailed, Verdict
from pipeproof.pytest_plugin import _drawing, _parse_seed
from pipeproof.whitebox import WhiteBox
from pipeproof.whitebox.fixture import FixtureBox, FixtureVerdict
from pipeproof.whitebox.validator import _rerun
from pipeproof.worlds.settings import drawing_apart
from pipeproof.worlds.world import World
from tests.support.warm_start import Ended

Launch = Callable[..., Ended]
FAIL = Verdict("c", "fail", "none", (), causes=(Cause("scale", factor=4.0),), seconds=1.0)
UNKNOWN = Verdict("c", "unknown", "none", (), headline="too little was observed")
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
    "the outcome": (lambda verdict: verdict.outcome, True),
    "text": (str, True),
    "repr": (repr, True),
    "status": (lambda verdict: verdict.exit_status, True),
    "a law": (lambda verdict: verdict.laws, True),
    "the cause": (lambda verdict: verdict.causes, True),
    "as data": (lambda verdict: verdict.as_dict(), True),
    "another": (lambda verdict: verdict == FAIL, True),
    "changed": (lambda verdict: replace(verdict, rerun="x"), True),
}


@pytest.mark.parametrize(("use", "looks"), USES.values(), ids=USES)
def test_what_counts_as_a_look(use: Callable[[Verdict], object], looks: bool) -> None:
    box = FixtureBox(cast(World, None), mutate=str)
    use(box.hand_out(FAIL))
    assert box.unread() == ([] if looks else [FAIL])
    assert box.unread() == [], "it is told once"


def test_a_pass_alone_need_not_be_read() -> None:
    box = FixtureBox(cast(World, None), mutate=str)
    for verdict in (PASS, UNKNOWN, PASS):
        box.hand_out(verdict)
    assert box.unread() == [UNKNOWN]


def test_a_verdict_stays_the_value_that_it_is() -> None:
    handed = FixtureBox(cast(World, None), mutate=str).hand_out(FAIL)
    assert isinstance(handed, FixtureVerdict)
    assert handed == FAIL
    assert FAIL == handed
    assert handed != UNKNOWN
    assert hash(handed) == hash(FAIL)
    assert str(handed) == str(FAIL)
    assert handed.as_dict() == FAIL.as_dict()
    assert repr(handed) == f"<Verdict {str(FAIL).splitlines()[0]}>"
    assert WhiteBox(cast(World, None)).hand_out(FAIL) is FAIL


TESTS = """
import os, random
import numpy, pytest, torch
from tests.validation.whitebox.test_fixture import FAIL, PASS, UNKNOWN

def test_bare_fail(whitebox): whitebox.hand_out(FAIL)
def test_bare_unknown(whitebox): whitebox.hand_out(UNKNOWN)
def test_assert_fail(whitebox): assert whitebox.hand_out(FAIL)
def test_assert_another():
    verdict = UNKNOWN
    assert verdict
def test_assert_outcome(whitebox):
    verdict = whitebox.hand_out(FAIL)
    assert verdict.outcome == "pass"
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

def drawn(name):
    numbers = random.random(), numpy.random.random_sample(), torch.rand(()).item()
    with open(f"{name}.{os.environ.get('RANK', 0)}", "w") as file:
        print(*numbers, file=file)

@pytest.fixture(scope="module")
def shared(): drawn("shared")
def test_draws(whitebox, shared): drawn("test_draws")
def test_draws_too(pipeproof_world, shared): drawn("test_draws_too")
def test_draws_without():
    assert random.random() == random.Random(5).random()
    assert torch.equal(torch.rand(()), torch.rand((), generator=torch.Generator().manual_seed(5)))

random.seed(5)
torch.manual_seed(5)

@pytest.fixture
def late(whitebox):
    yield
    whitebox.hand_out(FAIL)

def test_error_late(late): pass
"""
REASONS = {
    "test_bare_fail": "Failed: unread: scale x4 everywhere. The test has to",
    "test_bare_unknown": "Failed: unread: UNKNOWN too little was observed. The test has to",
    "test_assert_fail": "everywhere: gradients",
    "test_assert_another": "UNKNOWN too little was observed (AssertionError)",
    "test_assert_outcome": "everywhere: gradients",
    "test_assert_with_text": "everywhere: gradients",
    "test_raise": "everywhere: gradients",
    "test_two": "assert 1 == 2",
    "test_error_late": "Failed: unread: scale x4 everywhere. The test has to",
}


@pytest.mark.sampled(3)
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
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (failed|passed|xfailed|error)\b", run.stdout)}
    assert counts == {"failed": 8, "passed": 8, "xfailed": 1, "error": 1}
    failures, _, _ = run.stdout.partition("short test summary info")  # which has whole texts where $CI is set
    texts = re.split(r"(?m)^_{3,} .*?(test_\w+) _{3,}$", failures)
    for name, text in zip(texts[1::2], texts[2::2], strict=True):
        assert text.count("again         pipeproof replay") == (name != "test_two"), text
        assert ("torch, random and numpy: --pipeproof-seed=0," in text) == (name != "test_assert_another")
    assert "\nE   pipeproof.errors.PipelineMismatch: FAIL " in run.stdout
    for name, number in itertools.product(("shared", "test_draws", "test_draws_too"), range(1 + (way == "torchrun"))):
        assert (tmp_path / f"{name}.{number}").read_text() == drawn(f"test_it.py::{name}"), "whichever test comes first"


def drawn(name: str, seed: int | None = 0, fixtures: Sequence[str] = ("pipeproof_world",)) -> str:
    config = SimpleNamespace(getoption={"--pipeproof-seed": seed}.get)
    item = SimpleNamespace(config=config, fixturenames=fixtures, get_closest_marker=lambda _: None)
    with _drawing(cast(pytest.Item, item), name):
        return f"{random.random()} {numpy.random.random_sample()} {torch.rand(()).item()}\n"


def test_draws_follow_from_name_and_seed() -> None:
    assert drawn("a") == drawn("a")
    assert len({drawn("a"), drawn("b"), drawn("a", 1)}) == 3
    for left in ({"seed": None}, {"fixtures": ("tmp_path",)}):
        with drawing_apart(3):
            expected = drawn("a", None)
        with drawing_apart(3):
            assert drawn("a", **left) == expected  # type: ignore[arg-type]


def test_a_replay_says_a_seed_other_than_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "test_it.py::test_a (call)")
    with World() as world:
        assert _rerun(world) == 'pytest "test_it.py::test_a"'
        world.seed_option = "--pipeproof-seed=7"
        assert _rerun(world) == 'pytest "test_it.py::test_a" --pipeproof-seed=7'


@pytest.mark.parametrize("text", ["-1", "x", "", "²"])
def test_a_seed_that_is_none_is_refused(text: str) -> None:
    assert [_parse_seed("off"), _parse_seed("7")] == [None, 7]
    with pytest.raises(ArgumentTypeError, match="expected a whole number, as 7, or off"):
        _parse_seed(text)


def test_draws_change_nothing_later() -> None:
    def numbers() -> tuple[float, ...]:
        return random.random(), numpy.random.random_sample(), torch.rand(()).item()

    with drawing_apart(0):
        with drawing_apart(3):
            first = numbers()
        expected = numbers()
    with drawing_apart(0):
        with drawing_apart(3):
            again = [numbers(), numbers()]
        with drawing_apart(4):
            other = numbers()
        assert numbers() == expected
    assert again[0] == first
    assert len({*first, *other}) == 6

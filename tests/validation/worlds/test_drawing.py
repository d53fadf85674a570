"""Random numbers of tests that use ranks: they follow from the test's name and the seed."""

import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

from pipeproof.worlds.drawing import drawing_apart
from tests.support.warm_start import Ended

Launch = Callable[..., Ended]


def drawn() -> tuple[float, float, float]:
    return random.random(), numpy.random.random_sample(), torch.rand(()).item()


def test_what_is_drawn_follows_from_the_seed_and_changes_nothing_later() -> None:
    with drawing_apart(0):
        with drawing_apart(3):
            first = drawn()
        due = drawn()
    with drawing_apart(0):
        with drawing_apart(3):
            again = [drawn(), drawn()]
        with drawing_apart(4):
            other = drawn()
        assert drawn() == due
    assert again[0] == first
    assert len({*first, *other}) == 6


TESTS = """
import os, random, numpy, pytest, torch

def drawn(name):
    numbers = random.random(), numpy.random.random_sample(), torch.rand(()).item()
    with open(f"{name}.{os.environ.get('RANK', 0)}", "a") as file:
        print(numbers, file=file)
    return numbers

@pytest.fixture(scope="module")
def shared(): return drawn("shared")

def test_a(whitebox, shared): drawn("a")
def test_b(pipeproof_world, shared): drawn("b")
def test_without():
    assert drawn("without")[2] == torch.rand((), generator=torch.Generator().manual_seed(5)).item()
def test_fails(whitebox): assert 0

torch.manual_seed(5)
"""


def numbers(folder: Path, rank: int = 0) -> dict[str, str]:
    return {
        name: (folder / f"{name}.{rank}").read_text()
        for name in ("shared", "a", "b")
        if (folder / f"{name}.{rank}").exists()
    }


def test_a_test_draws_by_its_name_and_the_seed_in_every_way(python: Launch, torchrun: Launch, tmp_path: Path) -> None:
    found, printed = {}, {}
    ways = {
        "plain": [],
        "alone": ["test_it.py::test_b", "test_it.py::test_fails"],
        "seed": ["--pipeproof-seed=7"],
        "off": ["--pipeproof-seed=off"],
        "ranks": [],
    }
    for way, options in ways.items():
        folder = tmp_path / way
        folder.mkdir()
        (folder / "test_it.py").write_text(TESTS)
        words = ["-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", *options]
        printed[way] = (torchrun(folder, *words, ranks=2) if way == "ranks" else python(folder, *words)).stdout
        found[way] = numbers(folder)
    plain = found["plain"]
    assert "1 failed, 3 passed" in printed["plain"], "what draws without ranks is left alone"
    assert len(set(plain.values())) == 3
    assert found["alone"] == {name: plain[name] for name in ("shared", "b")}
    assert found["ranks"] == plain == numbers(tmp_path / "ranks", 1)
    assert not {*plain.values()} & {*found["seed"].values()}
    assert not {*plain.values()} & {*found["off"].values()}
    said = {way: re.findall(r"--pipeproof-seed=\w+, and the test's name", text) for way, text in printed.items()}
    assert said == {
        way: [f"--pipeproof-seed={7 if way == 'seed' else 0}, and the test's name"] for way in ways if way != "off"
    } | {"off": []}


@pytest.mark.parametrize("text", ["-1", "x", ""])
def test_a_seed_that_is_none_is_refused(python: Launch, tmp_path: Path, text: str) -> None:
    run = python(tmp_path, "-m", "pytest", f"--pipeproof-seed={text}")
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"--pipeproof-seed: {text!r}: expected a whole number, as 7, or off\n" in run.stdout

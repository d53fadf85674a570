"""A step's config: what is written is read again, and what none has is refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from pipeproof.commands.cli import main
from pipeproof.commands.work import notes_of, work_of
from pipeproof.own.case import Case
from pipeproof.own.config import LAYOUT, Config, read_config
from pipeproof.own.fuzz import cases
from tests.support.golden import golden
from tests.support.typed import Typed

CASE = Case.parse("1f1b r2 s2 m4 split=1,1 model=mlp plan=train seed=0")


def written(path: Path, **more: Any) -> str:
    """A config of ``CASE`` with more in it; what is None there is left out."""
    words = {**json.loads(Config(CASE.config).text()), **more}
    path.write_text(json.dumps({name: value for name, value in words.items() if value is not None}))
    return str(path)


@given(cases())
@settings(deadline=None, max_examples=50)
def test_a_case_is_its_config(case: Case) -> None:
    assert Case.of_config(json.loads(json.dumps(case.config))) == case


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    file.write_bytes(Config({**CASE.config, **LAYOUT}).text())
    config = read_config(str(file))
    assert work_of(config) == CASE
    assert notes_of(config, CASE) == []


def test_what_it_does_not_say_has_the_defaults_of_a_case(tmp_path: Path) -> None:
    least = {"schedule": "gpipe", "pp": 1, "virtual": 1, "microbatches": 2, "split": [2]}
    file = tmp_path / "least.json"
    file.write_bytes(Config(least).text())
    assert work_of(read_config(str(file))) == Case("gpipe", 1, 1, 2, (2,))


BAD: tuple[dict[str, Any], ...] = (
    {"version": 2},
    {"version": None},
    {"version": True},
    {"format": "pipeproof/record"},
    {"shedule": "gpipe"},
    {"pp": "2"},
    {"pp": True},
    {"pp": 2.0},
    {"ragged": 1},
    {"split": [1, "1"]},
    {"split": "1,1"},
    {"plan": "train"},
    {"model": []},
    {"schedule": None},
    {"pp": 0},
    {"tp": 0},
    {"zero": -1},
    {"zero": 4},
    {"seed": -1},
    {"recompute": "ful"},
    {"tp": 2},
    {"tp": 8, "sp": 4},
    {"ep": 4, "model": "decoder"},
    {"dp": 3, "ep": 2, "model": "llama-3-8b"},
    {"device": "gpu"},
    {"pp": 4},
    {"dtype": "fp8"},
    {"dp": 2},
    {"model": "llama-3-8b", "virtual": 1 << 20},
)


@pytest.mark.parametrize("more", BAD, ids=lambda more: next(iter(more)))
def test_what_is_no_config_is_refused_in_a_sentence(more: dict[str, Any], tmp_path: Path, typed: Typed) -> None:
    file = written(tmp_path / "step.json", **more)
    for command in ("validate", f"record --record {tmp_path}/out"):
        typed.refused(f"{command} --config {file}")
    assert list(tmp_path.iterdir()) == [tmp_path / "step.json"]


@pytest.mark.parametrize(
    "content",
    [b"{", b"\xff", b"\xff\x00", b"[" * 100_000, b'{"pp": 1, "pp": 2}', b"[1]", b""],
    ids=lambda one: repr(one[:9]),
)
def test_what_is_no_json_is_refused(content: bytes, tmp_path: Path, typed: Typed) -> None:
    (tmp_path / "step.json").write_bytes(content)
    typed.refused(f"validate --config {tmp_path}/step.json", "is no JSON" if len(content) > 99 else "")


def test_a_pipe_or_nothing_is_refused_and_not_waited_for(tmp_path: Path, typed: Typed) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in (f"{tmp_path}/pipe", f"{tmp_path}/none", "''"):
        typed.refused(f"validate --config {file}")


def test_a_config_alone_says_which_case(tmp_path: Path, typed: Typed) -> None:
    config = f"--config {written(tmp_path / 'step.json')}"
    typed.refused(f"validate {config} --seed 1")
    typed.refused(f"record --record {tmp_path}/out")
    typed.refused(f"record 1f1b r1 s1 m1 {config} --record {tmp_path}/out")


@pytest.mark.pipeproof_ranks
def test_a_config_is_validated_and_recorded(tmp_path: Path, typed: Typed) -> None:
    file, expected, observed = written(tmp_path / "step.json"), tmp_path / "expected", tmp_path / "observed"
    assert "1 pass" in typed.only(f"validate --config {file} --record {observed}")[0]
    typed(f"record --config {file} --record {expected}")
    golden(typed.only(f"compare {expected} {observed} --why")[0].splitlines()[0])


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
def test_a_planted_fault_in_a_config_fails(tmp_path: Path) -> None:
    assert main(["validate", "--config", written(tmp_path / "step.json", specimen="layernorm-zero")]) == 1

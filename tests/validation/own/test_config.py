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


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"version": 2}, "is a config of version 2: this pipeproof reads version 1; write it again"),
        ({"version": None}, "is a config of version null"),
        ({"version": True}, "is a config of version true"),
        ({"format": "pipeproof/record"}, 'is no config: expected "format": "pipeproof/config"'),
        ({"shedule": "gpipe"}, "has 'shedule', which no config has: did you mean 'schedule'?"),
        ({"pp": "2"}, 'pp is "2": expected a whole number'),
        ({"pp": True}, "pp is true: expected a whole number"),
        ({"pp": 2.0}, "pp is 2.0: expected a whole number"),
        ({"ragged": 1}, "ragged is 1: expected true or false"),
        ({"split": [1, "1"]}, 'split is [1, "1"]: expected a list of whole numbers'),
        ({"split": "1,1"}, 'split is "1,1": expected a list of whole numbers'),
        ({"plan": "train"}, 'plan is "train": expected a list of texts'),
        ({"model": []}, "model is []: expected text"),
        (
            {"schedule": None},
            "has no schedule: a config has schedule, pp, virtual, microbatches, split at least; add it",
        ),
        ({"pp": 0}, "pp is 0: expected at least 1"),
        ({"tp": 0}, "tp is 0: expected at least 1"),
        ({"zero": -1}, "zero is -1: expected at least 0"),
        ({"zero": 4}, "zero is 4: expected at most 3"),
        ({"seed": -1}, "seed is -1: expected at least 0"),
        ({"recompute": "ful"}, "unknown recompute 'ful': did you mean 'full'?"),
        (
            {"tp": 2},
            'tp 2: a case has pp and dp alone; leave it out, or say "model": "decoder", which is run with more',
        ),
        ({"tp": 8, "sp": 4}, "tp 8 and sp 4 do the same work: sp cuts layers as tp does, and sequences too; leave one"),
        ({"ep": 4, "model": "decoder"}, "ep 4 does not divide dp * cp 1: experts are spread over these ranks; use a"),
        ({"dp": 3, "ep": 2, "model": "llama-3-8b"}, "ep 2 does not divide dp * cp 3: experts are spread over these"),
        ({"device": "gpu"}, "unknown device 'gpu': torch names cpu, cuda, xpu"),
        ({"pp": 4}, "split 1,1 has 2 sizes: expected 4"),
        ({"dtype": "fp8"}, "unknown dtype 'fp8'"),
        ({"dp": 2}, "replicas=2 are for torch: expected runtime=torch or torch-csv"),
        ({"model": "llama-3-8b", "virtual": 1 << 20}, "layers is 2097152: expected at most 4096"),
    ],
)
def test_what_is_no_config_is_refused_in_a_sentence(
    more: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "step.json", **more)
    for command in (["validate"], ["record", "--record", str(tmp_path / "out")]):
        assert main([*command, "--config", file]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert words in err
        assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "step.json"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is no JSON"),
        (b"\xff\x00", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b'{"pp": 1, "pp": 2}', "is no JSON ('pp' is said twice)"),
        (b"[1]", "holds no object: expected the config of a step"),
        (b"", "is no JSON"),
    ],
)
def test_what_is_no_json_is_refused(
    content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "step.json"
    file.write_bytes(content)
    assert main(["validate", "--config", str(file)]) == 2
    assert words in capsys.readouterr().err


def test_a_pipe_or_nothing_is_refused_and_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("pipe", "it is no regular file"), ("none", "no such file"), ("", "whose name is empty")):
        assert main(["validate", "--config", name and str(tmp_path / name)]) == 2
        assert words in capsys.readouterr().err


def test_a_config_alone_says_which_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = written(tmp_path / "step.json"), str(tmp_path / "out")
    assert main(["validate", "--config", file, "--seed", "1"]) == 2
    golden(capsys.readouterr().err)
    for line in ([], ["1f1b", "r1", "s1", "m1"]):
        config = ["--config", file] if line else []
        assert main(["record", *line, *config, "--record", out]) == 2
        golden(capsys.readouterr().err)


@pytest.mark.pipeproof_ranks
def test_a_config_is_validated_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, expected, observed = written(tmp_path / "step.json"), str(tmp_path / "expected"), str(tmp_path / "observed")
    assert main(["validate", "--config", file, "--record", observed]) == 0
    assert "1 pass" in capsys.readouterr().out
    assert main(["record", "--config", file, "--record", expected]) == 0
    golden(capsys.readouterr().out)
    assert main(["compare", expected, observed, "--why"]) == 0
    golden(capsys.readouterr().out.splitlines()[0])


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
def test_a_planted_fault_in_a_config_fails(tmp_path: Path) -> None:
    assert main(["validate", "--config", written(tmp_path / "step.json", specimen="layernorm-zero")]) == 1

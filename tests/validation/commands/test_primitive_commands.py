"""``primitives``, and ``validate --primitive`` and ``--stack``, as a user types them."""

import shlex
from pathlib import Path

import pytest

from pipeproof.commands.cli import main
from pipeproof.own.config import Config
from pipeproof.wings.primitives.primitive import PRIMITIVES
from tests.support.golden import golden
from tests.support.json_schema import documented
from tests.support.typed import Typed

LARGE = {
    **{"schedule": "interleaved", "pp": 16, "virtual": 2, "microbatches": 32, "split": [2] * 32, "dtype": "bf16"},
    **{"model": "llama-3-405b", "dp": 512, "zero": 2},
}


def test_the_table_is_printed_and_written(tmp_path: Path, typed: Typed) -> None:
    file = tmp_path / "table.json"
    typed(["advise", "--primitive", "all", "--json", str(file)], lines=r"^\S|^  (saves|costs|by|source)|^$")
    data = documented(file.read_text())
    validated = [one["validated"] for one in data["primitives"]]
    assert all(one["passed"] == one["seeds"] > 0 for one in validated if one)
    assert [one["name"] for one in data["primitives"]] == list(PRIMITIVES)
    typed(["advise", "--primitive", "TP,dp", "-q"], lines=r"^\S")
    typed.refused(["advise", "--primitive", "tpp"])


@pytest.mark.pipeproof_ranks
@pytest.mark.usefixtures("kept_ranks")
def test_primitives_are_validated_one_by_one(tmp_path: Path, typed: Typed) -> None:
    file = tmp_path / "x.json"
    assert main(["validate", "--primitive", "dp,pp", "--schedule", "gpipe,1f1b", "--json", str(file)]) == 0
    lines = typed.said().splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["ddp=2", "pp=2", "pp=2"]
    golden(lines[-1])
    data = documented(file.read_text())
    assert [verdict["outcome"] for verdict in data["verdicts"]] == ["pass"] * 3
    assert {law["name"] for law in data["verdicts"][0]["laws"] if law["checked"]} >= {"replicas", "grad-norm", "loss"}


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
@pytest.mark.usefixtures("kept_ranks")
def test_a_verdict_says_how_to_run_it_again(typed: Typed) -> None:
    assert main(["validate", "--stack", "pp=2,dp=2", "--seed", "2", "-v"]) == 0
    (line,) = (line for line in typed.said().splitlines() if line.startswith("  replay"))
    golden(line)
    assert main(shlex.split(line)[2:]) == 0


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
@pytest.mark.usefixtures("kept_ranks")
def test_many_ranks_are_said_before_they_start(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeproof.worlds.launcher._CROWD", 0)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert main(["validate", "--stack", "dp=2"]) == 0
    note, head, *_ = typed.said().splitlines()
    golden(f"{note}\n{head}")


@pytest.mark.parametrize(
    "line",
    [
        "--stack tp=3",
        "--primitive tpp",
        "--primitive tp,,cp",
        "--primitive ''",
        "--primitive zero",
        "--primitive tp --stack pp=2",
        "--stack tp=2 --schedule gpipe",
        "--stack pp=2 --model mlp",
        "--stack pp=2 --record x",
        "--stack pp=2 --world simulated",
        "--stack pp=2 --config x",
        "--stack pp=2 --microbatches 0",
        "--stack pp=2 --seed -1",
        "--stack pp=2 --schedule x.csv",
        "--stack pp=2,fsdp=2 --microbatches 3",
    ],
)
def test_what_cannot_be_asked_is_a_sentence(line: str, typed: Typed) -> None:
    typed.refused(["validate", *shlex.split(line)])


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
@pytest.mark.usefixtures("kept_ranks")
def test_a_config_is_run_as_a_stack(tmp_path: Path, typed: Typed) -> None:
    file = tmp_path / "large.json"
    file.write_bytes(Config(LARGE).text())
    assert main(["validate", "--config", str(file)]) == 0
    first, *lines = typed.said().splitlines()
    golden(f"{first}\n{lines[-1]}")
    assert main(["validate", "--config", str(file), "--profile"]) == 2


def test_a_stack_has_no_such_fault(tmp_path: Path, typed: Typed) -> None:
    file = tmp_path / "planted.json"
    planted = {"schedule": "1f1b", "pp": 2, "virtual": 1, "microbatches": 4, "split": [2, 2], "model": "decoder"}
    file.write_bytes(Config({**planted, "specimen": "layernorm-zero"}).text())
    typed.refused(["validate", "--config", str(file)])

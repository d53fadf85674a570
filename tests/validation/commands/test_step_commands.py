"""Verbs that take a step of the user's own by its name: what they print, and their exit statuses."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeproof.commands.cli import main
from pipeproof.records.record_file import read
from tests.support.golden import golden
from tests.support.json_schema import documented
from tests.support.typed import Typed

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = """
import torch
from pipeline_of_mine import OneFOneB, build_model, loss_fn

from pipeproof import watch


def data():
    return [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(4)]


def right(model, microbatches):
    stage = watch(model[2 * torch.distributed.get_rank() :][:2])
    return stage, OneFOneB(stage, microbatches).step()


class LastIn(list):
    def pop(self, _):
        return super().pop()


def wrong(model, microbatches):
    stage = watch(model[2 * torch.distributed.get_rank() :][:2])
    made = OneFOneB(stage, microbatches)
    made.live = LastIn()
    return stage, made.step()


def draw(number, rows, generator):
    return torch.randn(rows, 16, generator=generator), torch.randn(rows, 16, generator=generator)
"""
TABLES = """
[tool.pipeproof.steps.{name}]
step = "steps_of_mine.py:{name}"
reference = "pipeline_of_mine:build_model"
microbatches = "steps_of_mine.py:data"
loss_fn = "torch.nn.functional:mse_loss"
ranks = 2
"""
WRONG = (
    "validate steps_of_mine.py:wrong --reference pipeline_of_mine:build_model --microbatches steps_of_mine:data "
    "--ranks 2 --loss-fn torch.nn.functional:mse_loss"
)


NAMES = ("steps_of_mine", "pipeline_of_mine")  # ranks that are kept know modules of other tests by their names


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("steps")
    (made / "pipeline_of_mine.py").write_text((EXAMPLES / "my_pipeline.py").read_text())
    (made / "steps_of_mine.py").write_text(STEPS)
    return made


@pytest.fixture(autouse=True)
def in_folder(folder: Path, kept_ranks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (folder / "pyproject.toml").write_text(TABLES.format(name="right"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in NAMES:
        sys.modules.pop(name, None)


def test_a_step_is_validated_and_replayed_by_its_name(typed: Typed) -> None:
    out = typed.only("validate right --json out.json --html out.html")[0]
    assert out.splitlines()[1].split()[:5] == ["right", "2", "4", "8", "bitwise"]
    data = documented(Path("out.json").read_text())
    assert [(one["outcome"], one["replay"]) for one in data["verdicts"]] == [("pass", "pipeproof replay right")]
    assert "<html" in Path("out.html").read_text()
    assert "gradient           pass" in typed.only("replay right --world simulated --interleaving 3")[0]


def test_a_step_that_no_table_names_says_the_whole_line_again(typed: Typed) -> None:
    out = typed.only(WRONG, 1)[0]
    golden(out, lines="^FAIL|^  (at|again) ")
    again = next(line for line in out.splitlines() if line.startswith("  again"))
    assert again.split(maxsplit=1)[1] == WRONG.replace("validate", "pipeproof replay")
    assert main(WRONG.replace("validate", "replay").split()) == 1


def test_faults_are_planted_in_a_step(typed: Typed) -> None:
    typed("mutate right --only gradient-doubled,message-zero,clipping-left-out --json out.json")
    tried = {one["name"]: one["outcome"] for one in documented(Path("out.json").read_text())["tried"]}
    assert tried == {"message-zero": "caught", "gradient-doubled": "caught", "clipping-left-out": "not planted"}
    typed("mutate right --only gradient-doubled --list")
    assert "not planted" in typed.only("mutate right --only clipping-left-out", 3)[0], "no verdict"


def test_a_step_that_is_wrong_is_given_no_fault(typed: Typed) -> None:
    out = typed.only(WRONG.replace("validate", "mutate") + " --json out.json", 1)[0]
    assert out.startswith("no fault is planted, for the step is no pass without one:\nFAIL ")
    assert documented(Path("out.json").read_text())["tried"] == []


def test_a_step_is_recorded_for_a_running_job(typed: Typed) -> None:
    golden(typed.only("record right --record kept")[0])
    (operation,) = read("kept").operations
    assert (len(operation.losses), len(operation.gradients)) == (4, 8)


def test_a_gate_runs_the_steps_and_a_fault_in_each(typed: Typed) -> None:
    out = typed.only("gate --junit g.xml --summary g.md --html g.html --json g.json --annotations github")[0]
    golden(out, lines="^the|^gate")
    groups = [(one["group"], one["gate_outcome"]) for one in documented(Path("g.json").read_text())["verdicts"]]
    assert groups == [("step", "pass"), ("planted", "pass")]
    assert "::error" not in out
    golden(Path("g.md").read_text(), lines="^###|^The whole")


def test_a_gate_points_at_the_line_of_a_wrong_step(typed: Typed) -> None:
    Path("pyproject.toml").write_text(TABLES.format(name="right") + TABLES.format(name="wrong"))
    out = typed.only("gate --annotations github --summary g.md", 1)[0]
    golden(out, lines="^::error|^gate")
    assert "FAIL stage 0 (rank 0)" in Path("g.md").read_text()
    assert "wrong" not in typed.only("gate right")[0], "one alone"


def test_a_gate_takes_schedules_as_well(typed: Typed) -> None:
    small = "--schedule 1f1b --ranks 1 --microbatches 2 --layers 1 --model mlp --cases 0"
    out = typed.only(f"gate right {small} --json g.json")[0]
    groups = [one["group"] for one in documented(Path("g.json").read_text())["verdicts"]]
    assert groups == ["step", "planted", "table", "planted"]
    golden(out, lines="^the|^gate")


def test_fuzz_draws_for_a_step(typed: Typed) -> None:
    typed.refused("fuzz right", "[tool.pipeproof.steps.right] has no fuzz.data, which makes a microbatch of its number")
    fuzz = 'fuzz = {data = "steps_of_mine:draw", microbatches = [2, 3], splits = false}\n'
    Path("pyproject.toml").write_text(TABLES.format(name="right") + fuzz + TABLES.format(name="wrong") + fuzz)
    assert "2 cases" in typed.only("fuzz right --cases 2 --seed 5")[0]
    assert "another microbatch" in typed.only("fuzz wrong --cases 2 --seed 5 --json out.json", 1)[0]
    ((outcome, line),) = [
        (one["outcome"], one["replay"]) for one in documented(Path("out.json").read_text())["verdicts"]
    ]
    smallest = "pipeproof replay wrong ranks=2 microbatches=2 rows=1 seed=0"
    assert (outcome, line) == ("fail", smallest)
    assert f"  again         {line}\n" in typed.only(line.removeprefix("pipeproof "), 1)[0]
    simulated = line.replace("wrong", "right") + " --world simulated --interleaving 3"
    typed.only(simulated.removeprefix("pipeproof "))
    typed.refused(line.removeprefix("pipeproof ").replace("seed", "sed"), "case has ranks, microbatches, rows, sed")

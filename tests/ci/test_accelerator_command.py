"""ci/accelerator: what it makes of what its parts find, that parts end, and that it runs on the processor."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import accelerator_jobs
import accelerator_main
import accelerator_parts
import pytest
from accelerator_main import carried_out, raised, rows_in
from accelerator_parts import PARTS, NotRun, Wanted, row_of
from accelerator_result import PartResult, Result, Row, failing, merged, section

from pipeproof.core.verdict import Verdict
from pipeproof.own.case import Case
from pipeproof.wings.specimens import SPECIMENS
from pipeproof.worlds.accelerator import Arithmetic
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.sources import ROOT
from tests.support.sweeps import SWEEP

CASE = Case.parse("1f1b r2 s2 m4 model=mlp")
RIGHT = Row("1f1b", "pass", {"tier": "bitwise"})
FAILED = Row("zb-h1", "fail", {"why": "scale x4 everywhere"}, wrong=True)


def part(*rows: Row, ended: str = "done", reason: str = "") -> PartResult:
    return PartResult("host", "every schedule", ended, reason, 3.4, rows)


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([], 0),
        ([part(RIGHT)], 0),
        ([part(RIGHT), part(RIGHT, FAILED)], 1),
        ([part(RIGHT, ended="cut off", reason="after 75 s")], 0),
        ([part(FAILED, ended="cut off")], 1),
        ([part(ended="not run", reason="one device")], 0),
        ([part(ended="broken", reason="ImportError")], 1),
    ],
)
def test_what_is_wrong_decides_the_exit_status(parts: list[PartResult], status: int) -> None:
    assert Result({}, parts).status == status


def test_a_table_has_each_row_and_each_column_that_some_row_has() -> None:
    result = Result({"device": "cpu", "torch": "2"}, [part(RIGHT, FAILED), part(ended="not run", reason="one device")])
    golden(result.markdown(), exact=True)
    assert [*failing(result.parts[0])] == ["host: zb-h1: fail"]


def test_a_long_table_shows_what_is_not_as_it_should_be() -> None:
    many = [Row(f"fault {number}", "caught") for number in range(60)]
    text = section(part(*many, Row("fault 60", "NOT caught", wrong=True)))
    golden(text)
    assert "fault 59" not in text


def test_json_has_all_rows_and_the_status() -> None:
    data = json.loads(json.dumps(Result({"device": "cpu"}, [part(RIGHT, FAILED)]).as_json()))
    assert (data["format"], data["version"], data["status"]) == ("pipeproof/accelerator", 1, 1)
    assert (data["parts"][0]["wrong"], data["parts"][0]["ended"]) == (1, "done")
    assert data["parts"][0]["rows"][1]["cells"] == {"why": "scale x4 everywhere"}


@pytest.mark.parametrize(
    ("verdict", "word", "wrong"),
    [
        (Verdict("c", "pass", "bitwise", ()), "pass", False),
        (Verdict("c", "fail", "none", ()), "fail", True),
        (Verdict("c", "unknown", "none", ()), "unknown", False),
        (replace(Verdict(str(CASE), "unknown", "none", ()), ended="hang"), "hang", True),
        (replace(Verdict(str(CASE), "unknown", "none", ()), ended="error"), "error", True),
    ],
)
def test_a_right_case_may_be_undecided_and_may_not_fail(verdict: Verdict, word: str, wrong: bool) -> None:
    row = row_of(CASE, verdict)
    assert (row.outcome, row.wrong) == (word, wrong)
    golden(row.what)


def test_every_fault_that_a_schedule_can_show_is_planted_on_as_few_ranks_as_show_it() -> None:
    planted = [accelerator_parts._planted("1f1b", name) for name in SPECIMENS]
    assert sum(case is not None for case in planted) > 100
    assert {case.ranks for case in planted if case is not None} == {2, 4}


def test_the_bounds_of_all_parts_leave_some_of_the_eight_minutes() -> None:
    assert 460 <= sum(part.bound_s for part in PARTS.values()) < accelerator_main._WHOLE_S
    with pytest.raises(NotRun, match="one device"):
        accelerator_parts.a_device_each(Wanted("cpu"), lambda row: None)


def test_a_line_that_is_not_whole_yet_is_no_row(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    file.write_text('{"what": "a", "outcome": "pass", "cells": {}, "wrong": false}\n{"what": "b"')
    assert rows_in(file) == ([Row("a", "pass")], None)
    file.write_text('{"ended": "done", "reason": ""}\n')
    assert rows_in(file) == ([], {"ended": "done", "reason": ""})
    assert merged([Row("a", "1"), Row("b", "2"), Row("a", "3")]) == [Row("a", "3"), Row("b", "2")], "each once"


def test_what_was_raised_is_told_on_one_line() -> None:
    text = 'Traceback (most recent call last):\n  File "x"\n    f()\nPipelineMismatch: FAIL\n  cause  no\nreplay x\n'
    assert raised("before\n" + text) == "PipelineMismatch: FAIL"
    assert raised("nothing\n") == ""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that is run for a part, in place of ours."""
    monkeypatch.setattr(accelerator_main, "__file__", str(tmp_path / "accelerator_main.py"))
    return tmp_path / "accelerator_child.py"


ONE = """
import sys, time
print('{"what": "a", "outcome": "pass", "cells": {}, "wrong": false}', file=open(sys.argv[2], "a"), flush=True)
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("more", "ended", "reason"),
    [
        ("time.sleep(600)", "cut off", r"after \d+ s"),
        ("raise OSError('no more room')", "broken", "OSError: no more room"),
        ("sys.exit(7)", "broken", "status 7"),
        ('open(sys.argv[2], \'a\').write(\'{"ended": "done", "reason": ""}\\\\n\')', "done", ""),
    ],
)
def test_a_part_ends_and_what_it_found_counts(child: Path, more: str, ended: str, reason: str) -> None:
    child.write_text(ONE + more.replace("\\\\", "\\"))
    began = time.monotonic()
    shown: list[PartResult] = []
    found = carried_out(PartResult("host", "it"), Wanted("cpu"), began + 8.0, shown.append)
    assert time.monotonic() - began < 60
    assert found.ended == ended
    assert re.fullmatch(reason, found.reason)
    assert [row.what for row in found.rows] == ["a"]
    assert all(one.ended == "running" for one in shown)


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    told = {**os.environ, "PYTHON": sys.executable, **(environment or {})}
    return subprocess.run([ROOT / "ci" / "accelerator", *arguments], capture_output=True, text=True, env=told)


SHORT: Sequence[str] = ("--device", "cpu", "--schedules", "1f1b", "--bound", "4000")


@SWEEP
def test_it_runs_on_the_processor_beside_torch_and_numpy_alone(tmp_path: Path) -> None:
    """Packages that cannot be imported stand for those that a machine lacks."""
    lacking = tmp_path / "lacking"
    for name in ("cloudpickle", "safetensors", "rich", "pytest", "_pytest"):
        (lacking / name).mkdir(parents=True)
        (lacking / name / "__init__.py").write_text(f"raise ModuleNotFoundError({name!r})\n")
    out = tmp_path / "out"
    ran = run(*SHORT, "--parts", "host,each", "--out", str(out), environment={"PYTHONPATH": str(lacking)})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    data = json.loads((out / "accelerator.json").read_text())
    host, each = data["parts"]
    assert [(row["what"].split()[1], row["outcome"], row["cells"]["tier"]) for row in host["rows"]] == [
        ("gpt", "pass", "bitwise"),
        ("gpt-tied", "pass", "bitwise"),
    ]
    assert (each["ended"], each["reason"]) == ("not run", "one device")
    golden(re.sub(r"cores \d+", "cores #", (out / "accelerator.md").read_text()), lines="^# ")
    golden(ran.stdout.splitlines()[-1])


@pytest.mark.sampled(2)
@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize(
    ("job", "word"),
    [
        (accelerator_jobs.RIGHT["fp32, dropout by a generator of its own"], "pass"),
        pytest.param(accelerator_jobs.RIGHT["bf16 under autocast, dropout"], "pass", marks=SWEEP),
        (accelerator_jobs.FAULTY["a message is used twice"], "fail"),
    ],
)
def test_jobs_are_judged_and_go_on_with_their_bits(job: accelerator_jobs.Job, word: str, world: World) -> None:
    for found, _, goes_on, steady in world.run(accelerator_jobs.judged, job, ranks=2):
        assert (found, goes_on, steady) == (word, True, True)


BAD = """
--device gpu
--device mtia
--parts hosts
--schedules 1f2b
--device cpu --out /dev/null/x
--cases 0
"""


@pytest.mark.parametrize("line", BAD.strip().splitlines())
def test_bad_input_is_a_sentence(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ci/accelerator", *line.split()])
    with pytest.raises(SystemExit) as ended:
        accelerator_main.main()
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    golden(said.err, lines="error: ")


@pytest.mark.long
def test_the_status_of_bad_input_is_that_of_the_command() -> None:
    ran = run("--parts", "hosts")
    assert (ran.returncode, ran.stdout) == (2, "")


def test_what_ranks_compute_with_is_set_there_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    observed: list[object] = []
    monkeypatch.setattr(accelerator_parts.World, "run", lambda self, *job, **options: observed.append(job[1:]))
    world = accelerator_parts._world("cpu")
    with accelerator_parts._set(world, Arithmetic(tf32=True)):
        world.run(len, ranks=1)
    world.run(len, ranks=1)
    assert observed == [(Arithmetic(tf32=True), len), ()], "by themselves they compute as everywhere else"

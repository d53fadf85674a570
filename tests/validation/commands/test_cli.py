"""The command line as a user types it: results, exit statuses, and input that is refused in one sentence."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeproof.commands.cli import main
from pipeproof.pipeline.lower import lower
from pipeproof.pipeline.schedules import build
from tests.support.golden import golden
from tests.support.warm_start import Ended

Launch = Callable[..., Ended]
ROOT = Path(__file__).parents[3]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence that ``arguments`` are refused with; exit status 2, nothing on standard output."""
    try:
        status = main(arguments)
    except SystemExit as error:  # argparse's own
        status = int(error.code or 0)
    out, err = capsys.readouterr()
    assert status == 2, (out, err)
    assert out == ""
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    "line",
    [
        "validate --schedule 1f2b",
        "validate --schedule gpipe,oneb",
        "validate --microbatches 0",
        "validate --ranks 0",
        "validate --ranks four",
        "validate --schedule 1f1b --split 3,1,2",
        "validate --schedule 1f1b --split 3,1,2,1",
        "validate --schedule 1f1b --split 4,0,2,2",
        "validate --schedule 1f1b --split uneven",
        "validate --schedule 1f1b --layers 3",
        "validate --schedule 1f1b --virtual 2",
        "validate --schedule interleaved --virtual 0",
        "validate --model lstm",
        "validate --model mpl",
        "validate --model GPT-tied",
        "validate --dtype fp32,pf32",
        "fuzz --dtype half",
        "validate --loss max",
        "validate --device cuda",
        "validate --json /no/such/folder/x.json",
        "validate --html /no/such/folder/x.html",
        "fuzz --html /no/such/folder/x.html",
        "replay '1f1b r1 s1 m1' --html /",
        "validate --timeout 0",
        "replay --timeout 0 '1f1b r1 s1 m1'",
        "fuzz --cases 0",
        "fuzz --max-ranks 0",
        "fuzz --schedule nope",
        "replay gibberish",
        "replay '1f1b r2 s2 m2 sede=3'",
        "replay '1f1b r2 s2 m2 plan=trian'",
        "replay '1f1b r2 s2 m2 loss=meen'",
        "replay '1f1b r2 s2 m2 runtime=toch'",
        "replay '1f1b r2 s2 m2 specimen=gremlin'",
        "validate --device cdua",
        "fuzz --device cuda:1",
        "replay '1f1b r2 s2 m2 device=tpu'",
        "show zigzag",
        "show gpipe --virtual 3",
        "check /no/such/file.csv",
        "show /no/such/file.csv",
        "show dualpipev --ranks 4 --microbatches 5",
        "show zb-v --virtual 3",
        "show 1f1b --times 1,0,1",
        "show 1f1b --times 1,2",
        "show 1f1b --svg x.pdf",
        "show 1f1b --trace /no/such/folder/x.json",
        "show 1f1b --layers 4",
        "show 1f1b --run --times 1,1,1",
        "show 1f1b --run --steps 0",
        "show 1f1b --run --model lstm",
        "show 1f1b --run --layers 3",
        "specimens --only gremlin",
        "specimens --only layernorm-zer",
        "specimens --only LOSS",
        "specimens --seed 1",
        "specimens --list --json x",
        "fuzz --runtime torch --dtype=fp32",
        "fuzz --runtime megatron",
        "replay '1f1b r1 s1 m1' --plugin x.py",
        "gate --cases 0 --max-ranks 2",
        "validate --schedule 1f1b --virtual 3",
        "show mine.json",
        "check 1f1b",
        "specimens --only ,",
        "specimens --only send-let-go",
        "specimens --transport nccl",
        "specimens --world simulated --interleavings 0",
        "specimens --world simulated --device cuda",
        "specimens --shrink --world simulated",
        "advise --list --model x",
        "compare /no/such/x x",
        "validat",
        "show 1f1b --rank 3",
        "show 1f1b --zzz=3",
        "show 1f1b gpipe",
        "fuzz --runtime toch",
        "specimens --schedule 1f2b",
        "specimens --shrink --schedule 1f1b",
        "specimens --shrink --seed -1",
        "plan --ranks 0",
        "plan --times 1,2",
        "plan --times 1,a,2",
        "plan --layers 1,-1",
        "plan --activations 1,1 --weights 1",
        "validate --schedule dualpipev --microbatches 3",
        "validate --schedule dualpipe --ranks 3",
        "plan --layers 8",
        "plan --memory nan",
        "plan --memory -1",
        "plan --layers inf,1",
        "plan --layers 1e308,1e308",
        "plan --activations nan",
        "plan --weights -inf",
        "plan --weight-memory nan",
        "plan --weight-memory -1",
        "validate --timeout inf",
        "validate --timeout 1e9",
        "show 1f1b --times 1e308,1,1",
        "show 1f1b --times -1,1,1",
        "validate --schedule 1f1b --split -1,9",
        "validate --seed 4294967296",
        "validate --seed -1",
        "fuzz --seed 99999999999999999999999",
        "replay '1f1b r2 s2 m2 seed=99999999999999999999999'",
        "replay '1f1b r2 s2 m2 seed=1 seed=2'",
        "replay '1f1b r2 s2 m1000000'",
        "replay '1f1b r2 s2 m2 split=1,1000000000'",
        "replay '1f1b r2000 s2000 m2'",
        "replay '1f1b r1 s99999999999999999999 m2'",
        "validate --ranks 99999999999999999999",
        "validate --ranks 4096 --microbatches 9000",
        "validate --layers 1000000000",
        "validate --layers 0",
        "validate --microbatches 1000000",
        "show 1f1b --run --layers 1000000000",
        "show 1f1b --ranks 100000 --microbatches 2",
        "show 1f1b --ranks 4096 --microbatches 65536",
        "plan --ranks 100000",
        "plan --microbatches 1000000",
        "fuzz --max-ranks 257",
        "show nope",
        "validate --json ''",
        "",
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda *_, **__: None)
    golden(refused(shlex.split(line), capsys))


def helped(arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "90")
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--help"])
    return capsys.readouterr().out


def test_help_lists_commands_as_a_user_comes_to_need_them_and_each_says_what_it_does_and_how_it_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = helped([], capsys, monkeypatch)
    names = re.findall(r"(?m)^    (\w+)( |$)", root.partition("COMMAND\n")[2])
    assert [name for name, _ in names][:3] == ["init", "validate", "replay"]
    assert len(names) == 15
    assert "$(register-python-argcomplete pipeproof)" in root, "what is to be typed is in one piece"
    for name, _ in names:
        text = helped([name], capsys, monkeypatch)
        usage, about, *_ = text.split("\n\n")
        assert usage.startswith(f"usage: pipeproof {name} ")
        assert re.match(r"[A-Z].*[.]$", about, re.DOTALL), "what it does"
        golden(text, lines="Exit status")
        bare = [line for line in text.splitlines() if re.match(r"  -\S+( [A-Z{]\S*)?$", line)]
        explained = re.findall(r"(?m)^  (-\S+(?: [A-Z{]\S*)?)\n {20,}\S", text)
        assert [line.strip() for line in bare] == explained, "every option"
    fuzz, advise = (" ".join(helped([name], capsys, monkeypatch).split()) for name in ("fuzz", "advise"))
    assert "in place of" not in advise
    golden("\n".join(re.findall(r"--(?:seed N|device TYPE|layers N) .*?(?= --\S+ [A-Z])", f"{fuzz} {advise}")))


def test_an_option_that_disagrees_with_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "ok.csv")
    Path(path).write_text(build("1f1b", ranks=2, microbatches=2).to_csv())
    for command in (["show", path], ["validate", "--schedule", path]):
        for option in ("ranks", "microbatches", "virtual"):
            said = refused([*command, f"--{option}", "5"], capsys)
            golden(said)
    assert main(["show", path, "--ranks", "2"]) == 0


def test_a_validation_prints_a_line_per_schedule_and_writes_json(python: Launch, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = python(
        tmp_path, "-m", "pipeproof", "validate", "--ranks", "2", "--layers", "4", "--microbatches", "3",
        "--model", "mlp", "--schedule", "naive,1f1b,interleaved", "--dtype", "fp32,bf16",
        "--json", str(path), "--profile",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    names = [row[0] for row in rows if row and row[-1] == "s"]
    assert names == ["naive", "1f1b", "interleaved"] * 2
    assert [row[2] for row in rows if row and row[-1] == "s"] == ["fp32"] * 3 + ["bf16"] * 3
    golden(done.stdout, lines="bit for bit")
    assert sum(row[:2] == ["rank", "step"] for row in rows) == 6
    data = json.loads(path.read_text())
    assert [verdict["verdict"] for verdict in data["verdicts"]] == ["pass"] * 6
    assert all(verdict["floor"] > 0 for verdict in data["verdicts"])


def test_a_wrong_answer_exits_1_with_a_screen_and_a_line_that_replays_it(python: Launch, tmp_path: Path) -> None:
    line = "gpipe r2 s2 m2 split=1,1 model=mlp plan=train seed=4 specimen=layernorm-zero"
    done = python(tmp_path, "-m", "pipeproof", "replay", line)
    assert done.returncode == 1, done.stdout
    golden(done.stdout, lines="^FAIL|^  where|^  replay")


def test_fuzz_says_how_many_and_how_fast(python: Launch, tmp_path: Path) -> None:
    done = python(tmp_path, "-m", "pipeproof", "fuzz", "--cases", "6", "--seed", "5", "--max-ranks", "2")
    assert done.returncode == 0, done.stdout
    golden(done.stdout, lines="^seed 5", numbers=False)


def test_a_picture_without_the_library_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for more in ([], ["--run"]):
        message = refused(["show", "1f1b", "--png", str(tmp_path / "x.png"), *more], capsys)
        golden(message)
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_timed_beside_its_simulation_and_both_are_written(python: Launch, tmp_path: Path) -> None:
    done = python(
        tmp_path, "-m", "pipeproof", "show", "1f1b", "--ranks", "2", "--microbatches", "4", "--layers", "2", "--run",
        "--steps", "1", "--trace", "x.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    first, head, *rows = done.stdout.splitlines()
    golden(first)
    assert head.split() == ["rank", "makespan", "compute", "communication", "idle"]
    assert [row.split()[0] for row in rows[:4]] == ["0", "simulated", "1", "simulated"]
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    golden("\n".join(processes))


def test_show_draws_without_torch(tmp_path: Path, new_python: Launch) -> None:
    code = (
        "import sys; from pipeproof.commands.cli import main; status = main(['show', '1f1b', '--ranks', '3', "
        "'--microbatches', '4']); assert 'torch' not in sys.modules, 'torch was imported'; sys.exit(status)"
    )
    done = new_python(tmp_path, "-c", code)
    assert done.returncode == 0, done.stdout
    golden(done.stdout)


def test_check_accepts_a_good_schedule_and_lists_what_a_bad_one_breaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = tmp_path / "mine.csv"
    good.write_text(build("interleaved", ranks=2, virtual=2, microbatches=4).to_csv())
    assert main(["check", str(good)]) == 0
    out = capsys.readouterr().out
    golden(out)
    assert out.count("no deadlock") == 6
    bad = tmp_path / "bad.csv"
    bad.write_text("0F0,0B0,0B0\n1B0,1F0\n")
    assert main(["check", str(bad)]) == 1
    out = capsys.readouterr().out
    assert "completeness" in out
    assert "local-order" in out


def test_check_takes_programs_and_prints_who_waits_for_whom(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "program.csv"
    path.write_text(lower(build("zb-v", ranks=2, microbatches=4)).with_waits.to_csv())
    assert main(["check", str(path)]) == 0
    golden(capsys.readouterr().out)
    path.write_text("0RECV_B0,0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert main(["check", str(path)]) == 1
    out = capsys.readouterr().out
    golden(out)
    path.write_text("0F0,0B0,0RECV_B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert main(["check", str(path)]) == 1
    golden(capsys.readouterr().out)


def test_show_draws_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(build("dualpipev", ranks=2, microbatches=4).to_csv())
    assert main(["show", str(path)]) == 0
    golden(capsys.readouterr().out)


def test_plan_lists_what_fits_and_names_the_trade(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--ranks", "8", "--microbatches", "32", "--memory", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("v-half")
    golden(next(line for line in lines if line.startswith("gpipe")))
    golden(lines[-1])
    assert main(["plan", "--ranks", "2", "--layers", "4,1,1,1,1,4", "--times", "1,2,1"]) == 0
    assert "1,2,2,1" in capsys.readouterr().out
    assert main(["plan", "--memory", "0.5"]) == 1
    golden(capsys.readouterr().out)
    assert main(["plan", "--layers", "1,1,1"]) == 1
    golden(capsys.readouterr().out)


def test_check_names_row_and_column_of_a_wrong_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "typo.csv"
    path.write_text("0F0,0B0\n1F0,1X0\n")
    err = refused(["check", str(path)], capsys)
    golden(err)


@pytest.mark.pipeproof_ranks
def test_replay_of_a_fault_is_wrong_and_of_a_sound_case_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    line = "naive r1 s1 m2 split=1 model=mlp plan=train seed=0"
    assert main(["replay", *line.split()]) == 0
    assert "PASS" in capsys.readouterr().out


def test_too_few_ranks_under_torchrun_are_said_once_with_the_cure(torchrun: Launch, tmp_path: Path) -> None:
    done = torchrun(tmp_path, "-m", "pipeproof", "validate", "--ranks", "4", "--model", "mlp", ranks=2)
    assert done.returncode != 0
    said = [line for line in done.stdout.splitlines() if line.startswith("pipeproof:")]
    assert len(said) == 1, done.stdout
    assert "4 ranks" in said[0]
    assert "--ranks" in said[0]


@pytest.mark.pipeproof_ranks  # it starts processes
def test_the_command_is_installed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipeproof", "--help"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "validate" in done.stdout

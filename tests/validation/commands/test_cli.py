"""The command line as a user types it: results, exit statuses, and input that is refused in one sentence."""

import json
import re
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
    ("arguments", "words"),
    [
        (["validate", "--schedule", "1f2b"], "unknown schedule '1f2b': did you mean '1f1b'?"),
        (["validate", "--schedule", "gpipe,oneb"], "unknown schedule 'oneb'"),
        (["validate", "--microbatches", "0"], "microbatches is 0: expected at least 1"),
        (["validate", "--ranks", "0"], "ranks is 0: expected at least 1"),
        (
            ["validate", "--ranks", "four"],
            "argument --ranks: 'four': expected a whole number; see pipeproof validate --help",
        ),
        (["validate", "--schedule", "1f1b", "--split", "3,1,2"], "split 3,1,2 has 3 sizes: expected 4"),
        (["validate", "--schedule", "1f1b", "--split", "3,1,2,1"], "split 3,1,2,1 sums to 7: the model has 8 layers"),
        (["validate", "--schedule", "1f1b", "--split", "4,0,2,2"], "leaves stage 1 with 0 layers"),
        (["validate", "--schedule", "1f1b", "--split", "uneven"], "split 'uneven' is neither 'even' nor sizes"),
        (["validate", "--schedule", "1f1b", "--layers", "3"], "3 layers cannot fill 4 stages"),
        (["validate", "--schedule", "1f1b", "--virtual", "2"], "virtual is 2, but 1f1b has one stage per rank"),
        (["validate", "--schedule", "interleaved", "--virtual", "0"], "virtual is 0: expected at least 1"),
        (["validate", "--model", "lstm"], "unknown model 'lstm': known are gpt"),
        (["validate", "--model", "mpl"], "unknown model 'mpl': did you mean 'mlp'? known are gpt"),
        (["validate", "--model", "GPT-tied"], "unknown model 'GPT-tied': did you mean 'gpt-tied'? known are gpt"),
        (
            ["validate", "--dtype", "fp32,pf32"],
            "--dtype fp32,pf32: unknown dtype 'pf32': did you mean 'fp32'? known are",
        ),
        (["fuzz", "--dtype", "half"], "--dtype half: unknown dtype 'half'"),
        (["validate", "--loss", "max"], "unknown 'max'"),
        (
            ["validate", "--device", "cuda"],
            "--device cuda, but torch finds no cuda device here: use --device cpu, or torch built for cuda",
        ),
        (["validate", "--json", "/no/such/folder/x.json"], "cannot write /no/such/folder/x.json"),
        (["validate", "--html", "/no/such/folder/x.html"], "cannot write /no/such/folder/x.html"),
        (["fuzz", "--html", "/no/such/folder/x.html"], "cannot write /no/such/folder/x.html"),
        (["replay", "1f1b r1 s1 m1", "--html", "/"], "cannot write /"),
        (["validate", "--timeout", "0"], "0"),
        (["replay", "--timeout", "0", "1f1b r1 s1 m1"], "argument --timeout: '0': expected seconds above 0"),
        (["fuzz", "--cases", "0"], "--cases is 0: expected at least 1"),
        (["fuzz", "--max-ranks", "0"], "--max-ranks is 0"),
        (["fuzz", "--schedule", "nope"], "unknown schedule 'nope'"),
        (["replay", "gibberish"], "'gibberish' is no case: expected a schedule, ranks, stages and microbatches first"),
        (["replay", "1f1b r2 s2 m2 sede=3"], "'sede=3' is no option: did you mean 'seed'? known are split, model"),
        (["replay", "1f1b r2 s2 m2 plan=trian"], "unknown operation 'trian' in the plan: did you mean 'train'? known"),
        (["replay", "1f1b r2 s2 m2 loss=meen"], "unknown loss 'meen': did you mean 'mean'? known are mean, tokens"),
        (["replay", "1f1b r2 s2 m2 runtime=toch"], "unknown runtime 'toch': did you mean 'torch'? known are pipeproof"),
        (["replay", "1f1b r2 s2 m2 specimen=gremlin"], "unknown specimen 'gremlin'"),
        (["validate", "--device", "cdua"], "unknown device 'cdua': torch names cpu, cuda, xpu, mps, mtia, hpu, and"),
        (["fuzz", "--device", "cuda:1"], "device 'cuda:1' has a number: expected a type alone, such as cuda"),
        (["replay", "1f1b r2 s2 m2 device=tpu"], "unknown device 'tpu'"),
        (["show", "zigzag"], "unknown schedule 'zigzag'"),
        (["show", "gpipe", "--virtual", "3"], "virtual is 3, but gpipe has one stage per rank"),
        (["check", "/no/such/file.csv"], "cannot read /no/such/file.csv"),
        (["show", "/no/such/file.csv"], "cannot read /no/such/file.csv"),
        (["show", "dualpipev", "--ranks", "4", "--microbatches", "5"], "needs at least 8"),
        (["show", "zb-v", "--virtual", "3"], "virtual is 3, but zb-v has two stages per rank: use virtual=2"),
        (["show", "1f1b", "--times", "1,0,1"], "argument --times: '0' in '1,0,1': expected a number above 0"),
        (["show", "1f1b", "--times", "1,2"], "argument --times: '1,2' has 2 numbers: expected three"),
        (["show", "1f1b", "--svg", "x.pdf"], "--svg x.pdf: expected a file that ends in .svg"),
        (["show", "1f1b", "--trace", "/no/such/folder/x.json"], "cannot write /no/such/folder/x.json"),
        (["show", "1f1b", "--layers", "4"], "--layers has no effect without --run: leave it out"),
        (
            ["show", "1f1b", "--run", "--times", "1,1,1"],
            "--times has no effect with --run, which measures times",
        ),
        (["show", "1f1b", "--run", "--steps", "0"], "--steps is 0: expected at least 1"),
        (["show", "1f1b", "--run", "--model", "lstm"], "unknown model 'lstm'"),
        (["show", "1f1b", "--run", "--layers", "3"], "3 layers cannot fill 4 stages"),
        (["specimens", "--only", "gremlin"], "unknown specimen 'gremlin': pipeproof specimens --list prints all"),
        (["specimens", "--only", "layernorm-zer"], "unknown specimen 'layernorm-zer': did you mean 'layernorm-zero'? "),
        (["specimens", "--only", "LOSS"], "unknown specimen 'LOSS': did you mean 'loss-summed'? pipeproof"),
        (
            ["specimens", "--seed", "1"],
            "--seed has no effect without --shrink: leave it out; see pipeproof specimens --help",
        ),
        (["specimens", "--list", "--json", "x"], "--json has no effect with --list, which runs nothing: leave it out"),
        (["fuzz", "--runtime", "torch", "--dtype=fp32"], "--dtype has no effect with --runtime torch"),
        (["fuzz", "--runtime", "megatron"], "unknown 'megatron': known are pipeproof, torch"),
        (["replay", "1f1b r1 s1 m1", "--plugin", "x.py"], "--plugin has no effect on a line without specimen="),
        (["gate", "--cases", "0", "--max-ranks", "2"], "--max-ranks has no effect with --cases 0: leave it out"),
        (["validate", "--schedule", "1f1b", "--virtual", "3"], "virtual is 3, but 1f1b has one stage per rank: use"),
        (["show", "mine.json"], "dualpipev; a file of your own must end in .csv"),
        (["check", "1f1b"], "1f1b is no file: pipeproof show 1f1b builds that family and draws it"),
        (["specimens", "--only", ","], "unknown specimen ''"),
        (["specimens", "--only", "send-let-go"], "specimen 'send-let-go' needs simulated ranks: say --world simulated"),
        (["specimens", "--transport", "nccl"], "--transport has no effect without --world simulated: leave it out"),
        (["specimens", "--world", "simulated", "--interleavings", "0"], "--interleavings"),
        (["specimens", "--world", "simulated", "--device", "cuda"], "simulated ranks compute on cpu alone"),
        (["specimens", "--shrink", "--world", "simulated"], "--world has no effect with --shrink"),
        (["advise", "--list", "--model", "x"], "--model has no effect with --list: leave it out"),
        (["compare", "/no/such/x", "x"], "cannot read /no/such/x: No such file or directory; give a file that is"),
        (["validat"], "unknown 'validat': did you mean 'validate'? known are init, validate"),
        (["show", "1f1b", "--rank", "3"], "unknown option --rank: did you mean '--ranks'?; see pipeproof show --help"),
        (["show", "1f1b", "--zzz=3"], "unknown option --zzz; see pipeproof show --help"),
        (["show", "1f1b", "gpipe"], "unexpected argument 'gpipe'; see pipeproof show --help"),
        (["fuzz", "--runtime", "toch"], "unknown 'toch': did you mean 'torch'? known are pipeproof, torch"),
        (["specimens", "--schedule", "1f2b"], "unknown schedule '1f2b'"),
        (
            ["specimens", "--shrink", "--schedule", "1f1b"],
            "--schedule has no effect with --shrink, which draws",
        ),
        (["specimens", "--shrink", "--seed", "-1"], "--seed"),
        (["plan", "--ranks", "0"], "ranks is 0"),
        (["plan", "--times", "1,2"], "argument --times: '1,2' has 2 numbers: expected three"),
        (["plan", "--times", "1,a,2"], "argument --times: 'a' in '1,a,2': expected a number above 0"),
        (["plan", "--layers", "1,-1"], "argument --layers: '-1' in '1,-1': expected a number above 0"),
        (["plan", "--activations", "1,1", "--weights", "1"], "weights has 1 numbers: expected 2, one for every layer"),
        (["validate", "--schedule", "dualpipev", "--microbatches", "3"], "dualpipev on 4 ranks needs at least 8"),
        (["validate", "--schedule", "dualpipe", "--ranks", "3"], "'dualpipe' holds every stage on two ranks"),
        (["plan", "--layers", "8"], "--layers 8: expected the costs of all layers"),
        (["plan", "--memory", "nan"], "argument --memory: 'nan': expected a number above 0"),
        (["plan", "--memory", "-1"], "argument --memory: '-1': expected a number above 0"),
        (["plan", "--layers", "inf,1"], "argument --layers: 'inf' in 'inf,1'"),
        (["plan", "--layers", "1e308,1e308"], "argument --layers: '1e308' in '1e308,1e308'"),
        (["plan", "--activations", "nan"], "argument --activations: 'nan': expected a number above 0"),
        (["plan", "--weights", "-inf"], "argument --weights: '-inf': expected a number of at least 0"),
        (["plan", "--weight-memory", "nan"], "argument --weight-memory: 'nan': expected a number of at least 0"),
        (["plan", "--weight-memory", "-1"], "argument --weight-memory: '-1'"),
        (["validate", "--timeout", "inf"], "argument --timeout: 'inf': expected seconds above 0, and at most 1e+06"),
        (["validate", "--timeout", "1e9"], "argument --timeout: '1e9': expected seconds above 0, and at most 1e+06"),
        (["show", "1f1b", "--times", "1e308,1,1"], "argument --times: '1e308' in '1e308,1,1'"),
        (["show", "1f1b", "--times", "-1,1,1"], "argument --times: '-1' in '-1,1,1': expected a number above 0"),
        (["validate", "--schedule", "1f1b", "--split", "-1,9"], "split -1,9 has 2 sizes"),
        (["validate", "--seed", "4294967296"], "seed is 4294967296: expected at most 4294967295"),
        (["validate", "--seed", "-1"], "seed is -1: expected at least 0"),
        (["fuzz", "--seed", "9" * 23], f"--seed is {'9' * 23}: expected at most 4294967295"),
        (["replay", f"1f1b r2 s2 m2 seed={'9' * 23}"], f"seed is {'9' * 23}: expected at most 4294967295"),
        (["replay", "1f1b r2 s2 m2 seed=1 seed=2"], "seed is said twice"),
        (["replay", "1f1b r2 s2 m1000000"], "microbatches is 1000000: expected at most 65536"),
        (["replay", "1f1b r2 s2 m2 split=1,1000000000"], "layers is 1000000001: expected at most 4096"),
        (["replay", "1f1b r2000 s2000 m2"], "ranks is 2000: expected at most 256"),
        (["replay", f"1f1b r1 s{'9' * 20} m2"], f"stages is {'9' * 20}: expected at most 4096"),
        (["validate", "--ranks", "9" * 20], f"ranks is {'9' * 20}: expected at most 4096"),
        (["validate", "--ranks", "4096", "--microbatches", "9000"], "8 layers cannot fill 4096 stages"),
        (["validate", "--layers", "1000000000"], "layers is 1000000000: expected at most 4096"),
        (["validate", "--layers", "0"], "layers is 0: expected at least 1"),
        (["validate", "--microbatches", "1000000"], "microbatches is 1000000: expected at most 65536"),
        (["show", "1f1b", "--run", "--layers", "1000000000"], "layers is 1000000000"),
        (["show", "1f1b", "--ranks", "100000", "--microbatches", "2"], "ranks is 100000: expected at most 4096"),
        (["show", "1f1b", "--ranks", "4096", "--microbatches", "65536"], "1f1b has 536870912 actions"),
        (["plan", "--ranks", "100000"], "ranks is 100000: expected at most 4096"),
        (["plan", "--microbatches", "1000000"], "microbatches is 1000000: expected at most 65536"),
        (["fuzz", "--max-ranks", "257"], "--max-ranks is 257: expected at most 256"),
        (["show", "nope"], "unknown schedule 'nope': known are naive"),
        (["validate", "--json", ""], "cannot write a file whose name is empty"),
        ([], "COMMAND"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_refused_in_a_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda *_, **__: None)
    assert words in refused(arguments, capsys)


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
    fuzz = " ".join(helped(["fuzz"], capsys, monkeypatch).split())
    assert "--seed N one seed draws the same cases again (default 0)" in fuzz
    assert "--device TYPE where ranks compute: cpu, cuda, or what else torch names (default auto: " in fuzz
    advise = " ".join(helped(["advise"], capsys, monkeypatch).split())
    assert "in place of" not in advise
    assert "--layers N how many layers; with --hidden and --heads it describes a model of your own" in advise


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
    assert first == "1f1b r2 s2 m4 split=1,1 model=gpt seed=0"
    assert head.split() == ["rank", "makespan", "compute", "communication", "idle"]
    assert [row.split()[0] for row in rows[:4]] == ["0", "simulated", "1", "simulated"]
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == ["1f1b, simulated with the measured times", "1f1b, measured"]


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
    assert main(["replay", *"naive r1 s1 m2 split=1 model=mlp plan=train seed=0".split()]) == 0
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

"""The command line as a user types it: results, exit statuses, and input that is refused in one sentence."""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeproof.commands import cli
from pipeproof.commands.option_parser import UsageError
from pipeproof.pipeline.schedules import build
from tests.support.golden import golden
from tests.support.typed import Typed
from tests.support.warm_start import Ended

Launch = Callable[..., Ended]
ROOT = Path(__file__).parents[3]


BAD = """
validate --schedule 1f2b
validate --ranks 0
validate --schedule 1f1b --split 3,1,2
validate --schedule 1f1b --virtual 2
validate --schedule interleaved --virtual 0
validate --model mpl
validate --dtype fp32,pf32
validate --loss max
validate --device cuda
validate --json /no/such/folder/x.json
validate --html /no/such/folder/x.html
replay '1f1b r1 s1 m1' --html /
validate --timeout 0
replay --timeout 0 '1f1b r1 s1 m1'
fuzz --cases 0
fuzz --max-ranks 0
replay gibberish
replay '1f1b r2 s2 m2 sede=3'
replay '1f1b r2 s2 m2 specimen=gremlin'
validate --device cdua
fuzz --device cuda:1
replay '1f1b r2 s2 m2 device=tpu'
check /no/such/file.csv
show 1f1b --times 1,2
show 1f1b --trace /no/such/folder/x.json
show 1f1b --layers 4
show 1f1b --run --steps 0
show 1f1b --run --model lstm
show 1f1b --run --layers 3
mutate --only layernorm-zer
mutate --seed 1
mutate --list --json x
fuzz --runtime torch --dtype=fp32
replay '1f1b r1 s1 m1' --plugin x.py
gate --cases 0 --max-ranks 2
show mine.json
mutate --transport nccl
mutate --world simulated --device cuda
mutate --shrink --world simulated
validat
show 1f1b --rank 3
show 1f1b --zzz=3
show 1f1b gpipe
fuzz --runtime toch
mutate --shrink --schedule 1f1b
mutate --shrink --seed -1
plan --ranks 0
plan --times 1,2
plan --costs 1,-1
plan --activations 1,1 --weights 1
plan --costs 8
plan --memory -1
plan --costs 1e308,1e308
plan --activations nan
plan --weights -inf
fuzz --dtype half
fuzz --schedule nope
mutate --schedule 1f2b
mutate --world simulated --interleavings 0
plan --weight-memory -1
validate --timeout inf
show 1f1b --times 1e308,1,1
show 1f1b --times -1,1,1
validate --schedule 1f1b --split -1,9
validate --seed 4294967296
validate --seed -1
fuzz --seed 99999999999999999999999
validate --ranks 4096 --microbatches 9000
validate --layers 1000000000
show 1f1b --ranks 4096 --microbatches 65536
fuzz --max-ranks 257
validate --json ''
"""


@pytest.mark.parametrize("line", ["", *BAD.strip().splitlines()])
def test_bad_input(line: str, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda *_, **__: None)
    typed.refused(line)


GROUPS = {
    "check my step": "init validate replay fuzz gate record compare",
    "look at schedules": "show check plan",
    "choose a layout": "advise",
    "extend": "mutate",
}
VERBS = " ".join(GROUPS.values()).split()


def test_help_groups_twelve_verbs(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    root = typed.only("--help")[0]
    found = {
        title: re.findall(r"(?m)^  (\w+) ", part) for title, part in re.findall(r"(?sm)^(\w[\w ]+):\n(.*?)\n\n", root)
    }
    assert {title: found[title] for title in GROUPS} == {title: verbs.split() for title, verbs in GROUPS.items()}
    assert "$(register-python-argcomplete pipeproof)" in root, "what is to be typed is in one piece"


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_command(verb: str, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    text, every = typed.only([verb, "--help"])[0], typed.only([verb, "--help-all"])[0]
    usage, about, *_ = text.split("\n\n")
    assert usage.startswith(f"usage: pipeproof {verb}")
    assert re.match(r"[A-Z].*[.]$", about, re.DOTALL), "what it does"
    assert len(text.splitlines()) <= 40
    assert max(map(len, every.splitlines())) <= 100
    golden(text, lines="Exit status")
    bare = [line for line in every.splitlines() if re.match(r"  -\S+( [A-Z{]\S*)?$", line)]
    explained = re.findall(r"(?m)^  (-\S+(?: [A-Z{]\S*)?)\n {20,}\S", every)
    assert [line.strip() for line in bare] == explained, "every option"
    few, all_ = (set(re.findall(r"(?m)^  (?:-\w, )?(--[\w-]+)", one)) for one in (text, every))
    assert (f"--help-all: {len(all_ - few)} more options." in text) == (few < all_)


def test_help_is_as_wide_as_it_may_be(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    said = " ".join("".join(typed.only([verb, "--help-all"])[0] for verb in ("fuzz", "advise")).split())
    golden("\n".join(re.findall(r"--(?:seed N|device TYPE|layers N) .*?(?= --\S+ [A-Z])", said)))
    for wide in (60, 140):
        monkeypatch.setenv("COLUMNS", str(wide))
        assert wide - 25 < max(map(len, typed.only(["fuzz", "--help-all"])[0].splitlines())) <= wide


@pytest.mark.parametrize("wide", [100, 70, 180])
def test_what_is_piped_is_as_wide_as_it_may_be(wide: int, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "" if wide == 100 else str(wide))
    lines = typed.only("show zb-h1 --ranks 8 --microbatches 24")[0].splitlines()
    assert wide - 5 < max(len(line) for line in lines if line.startswith("rank ")) <= wide


def test_a_validation_prints_a_line_per_schedule(python: Launch, tmp_path: Path) -> None:
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
    assert [verdict["outcome"] for verdict in data["verdicts"]] == ["pass"] * 6
    assert all(verdict["floor"] > 0 for verdict in data["verdicts"])


def test_fuzz_says_how_many_and_how_fast(python: Launch, tmp_path: Path) -> None:
    done = python(tmp_path, "-m", "pipeproof", "fuzz", "--cases", "6", "--seed", "5", "--max-ranks", "2")
    assert done.returncode == 0, done.stdout
    golden(done.stdout, lines="^seed 5", numbers=False)


@pytest.mark.parametrize("more", ["", " --run"])
def test_a_picture_without_the_library(
    more: str, tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    typed.refused(f"show 1f1b --png {tmp_path}/x.png{more}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sweep
def test_a_run_is_timed_beside_its_simulation(python: Launch, tmp_path: Path) -> None:
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


WITHOUT_TORCH = (
    "show 1f1b --ranks 3 --microbatches 4 --json x.json",
    "check x.csv --symbolic",
    "plan --ranks 2",
    "advise --model gpt-1.7b --html page.html",
    "advise --primitive tp",
)


def test_verbs_that_never_import_torch(tmp_path: Path, new_python: Launch) -> None:
    (tmp_path / "x.csv").write_text(build("1f1b", ranks=2, microbatches=2).to_csv())
    code = f"""
import sys
from pipeproof.commands.cli import main
for line in {WITHOUT_TORCH}:
    assert main(line.split()) == 0, line
    assert "torch" not in sys.modules, line
assert main("validate --stack tp=2 --json nowhere/x.json".split()) == 2
assert "torch" not in sys.modules, "what cannot be written is said before"
"""
    done = new_python(tmp_path, "-c", code)
    assert done.returncode == 0, done.stdout
    assert "cannot write nowhere/x.json" in done.stdout


def test_too_few_ranks_under_torchrun(torchrun: Launch, tmp_path: Path) -> None:
    done = torchrun(tmp_path, "-m", "pipeproof", "validate", "--ranks", "4", "--model", "mlp", ranks=2)
    assert done.returncode != 0
    said = [line for line in done.stdout.splitlines() if line.startswith("pipeproof:")]
    assert len(said) == 1, done.stdout
    assert "4 ranks" in said[0]
    assert "--ranks" in said[0]


def test_a_shell_asks_what_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def autocomplete(parser: object) -> None:
        raise UsageError(f"asked for {parser.prog}")  # type: ignore[attr-defined]

    monkeypatch.setenv("_ARGCOMPLETE", "1")
    monkeypatch.setitem(sys.modules, "argcomplete", SimpleNamespace(autocomplete=autocomplete))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="asked for pipeproof"):
        cli._run(["show", "1f1b"])


@pytest.mark.parametrize(
    ("command", "argument", "prefix", "offered"),
    [
        ("fuzz", "schedule", "", "1f1b"),
        ("validate", "model", "mlp,gp", "mlp,gpt-tied"),
        ("fuzz", "dtype", "bf16,", "bf16,fp64"),
        ("mutate", "only", "", "layernorm-zero"),
        ("mutate", "schedule", "", "all"),
        ("show", "against", "", "zb-v"),
        ("show", "model", "", "mlp"),
        ("init", "kind", "", "torch"),
        ("advise", "accelerator", "", "h100"),
    ],
)
def test_what_comes_from_a_list_is_completed(command: str, argument: str, prefix: str, offered: str) -> None:
    commands = next(one for one in cli._parser()._actions if isinstance(one, argparse._SubParsersAction))
    (action,) = (one for one in commands.choices[command]._actions if one.dest == argument)
    assert offered in action.completer(prefix=prefix)

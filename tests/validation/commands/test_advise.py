"""``advise`` as a user types it."""

import json
import re
import time
from pathlib import Path

import pytest

from pipeproof.commands.advise import _config
from pipeproof.commands.work import case_of
from pipeproof.own.config import read_config
from pipeproof.reports.terminal import Terminal
from pipeproof.wings.advise.cluster import ACCELERATORS, Cluster
from pipeproof.wings.advise.layout import Job
from pipeproof.wings.advise.transformer import MODELS
from pipeproof.wings.primitives import stack_of
from tests.support.golden import golden
from tests.support.json_schema import documented
from tests.support.sweeps import SWEEP, sampled
from tests.support.typed import Typed
from tests.validation.wings.advise.every_layout import every_layout

SMALL = "advise --model llama-3-8b --devices 8 --sequence 8192"
AMONG_64 = "advise --model gpt-3-175b --devices 64"
LARGE = "advise --model llama-3-405b --devices 16384 --batch 2048 --sequence 8192"
LARGE_LINE = "--stack pp=2,ddp=2,tp=2,recompute-selective --schedule interleaved --virtual 4"


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.long
def test_steps_and_layouts_are_written(typed: Typed) -> None:
    out = typed(f"{SMALL} --json advice.json --html advice.html")
    data = documented(Path("advice.json").read_text())
    assert data["next"] == "pipeproof validate --stack zero-2=2 --microbatches 4 --seed 0"
    assert [step["outcome"] for step in data["steps"][:4]] == ["not enough", "not enough", "not enough", "taken"]
    assert len(data["layouts"]) == 3
    times = [layout["seconds"]["total"] for layout in data["layouts"]]
    assert times == sorted(times)
    for one in data["layouts"]:
        parts = one["bytes"]
        assert parts["total"] == sum(parts[name] for name in ("weights", "gradients", "optimizer", "activations"))
        assert parts["total"] <= 0.9 * 80 * 2**30
    shown, last = Path("advice.html").read_text(), out.splitlines()[-2]
    begin, ask, line = re.fullmatch(r"(.*?\.) (.*:) (.*)", last).groups()  # type: ignore[union-attr]
    for part in (f"{begin}</h1>", f"{ask}</p>", f">{line}</code>", f"<title>llama-3-8b: {begin[:-1]}</title>"):
        assert part in shown
    assert "http" not in shown.replace("http://www.w3.org", "")


@pytest.mark.parametrize("line", ["llama-3-405b --devices 8 --write a.json", "llama-3-8b --devices 127 --batch 1"])
def test_where_nothing_fits_or_no_layout_is_legal_it_ends_with_1(line: str, typed: Typed) -> None:
    typed(f"advise --model {line}", 1)
    assert not Path("a.json").exists()


@pytest.mark.long
def test_a_config_or_sizes_stand_for_a_name(typed: Typed) -> None:
    sizes = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    Path("config.json").write_text(json.dumps({**sizes, "vocab_size": 128256, "intermediate_size": 14336}))
    typed(f"advise --model {Path.cwd()}/config.json --devices 8 --sequence 8192 --write a.json")
    assert json.loads(Path("a.json").read_text())["model"] == "config.json", "no folder of this machine"
    typed("advise --layers 32 --hidden 4096 --heads 32 --experts 8 --devices 64")


def test_a_layout_is_written_as_a_config(typed: Typed) -> None:
    for more in ("", " --layout 2"):
        out, _ = typed.only(f"{AMONG_64} --write step.json{more}")
        begin = re.search(r"Begin with (.*?)\. ", out)
        second = out.partition("\nlayout  ")[2].splitlines()[2].partition("   ")[0]
        words = second if more else begin[1]  # type: ignore[index]
        config = read_config("step.json")
        typed_next = "pipeproof validate --config step.json"
        assert out.endswith(f"\nstep.json: {words}, {config['schedule']}; {typed_next} runs it small\n")
        assert (sum(config["split"]), config["model"]) == (96, "gpt-3-175b")
        assert case_of(config).schedule == config["schedule"]
        if not more:
            assert (config["tp"], config["pp"], config["dp"], config["cp"]) == (4, 8, 2, 1)
    assert "runs it small" not in typed.only(f"{AMONG_64} --write -")[1], "standard output is no file"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--layers 8 --hidden 64",
        "--model lama-3-8b",
        "--model llama-3-8b --layers 8",
        "--model nowhere.json",
        "--model .",
        "--model llama-3-8b --memory 80GB",
        "--layers 4097 --hidden 64 --heads 8",
        "--model llama-3-8b --accelerator h10",
        "--model llama-3-8b --devices 0",
        "--model llama-3-8b --batch 0",
        "--model llama-3-8b --sequence -1",
        "--model llama-3-8b --memory nan",
        "--model llama-3-8b --zero 4",
        "--model llama-3-8b --zero x",
        "--model llama-3-8b --memory inf",
        "--model llama-3-8b --memory -1",
        "--model llama-3-8b --per-node 0",
        "--model llama-3-8b --most 101",
        "--model llama-3-8b --layout 2",
        "--model llama-3-8b --layout 4 --write x.json",
        "--model gpt-1.7b --devices 1 --layout 2 --write x.json",
        "--list --html page.html",
        "--layers 8 --hidden 64 --heads 7",
        "--layers 8 --hidden 64 --heads 8 --experts 1",
        *(
            f"--model llama-3-8b {option} {to}"
            for option in ("--html", "--write", "--json")
            for to in (".", "a/b", "''")
        ),
    ],
)
def test_bad_input(line: str, typed: Typed) -> None:
    typed.refused(f"advise {line}")
    assert list(Path().iterdir()) == []


def test_a_config_that_is_none_is_refused(typed: Typed) -> None:
    Path("config.json").write_text("[1]")
    typed.refused("advise --model config.json")


@pytest.mark.long
@pytest.mark.pipeproof_ranks
@pytest.mark.usefixtures("kept_ranks")
@pytest.mark.parametrize(
    ("asked", "line", "runs"),
    [
        (LARGE, LARGE_LINE, False),
        pytest.param(LARGE, LARGE_LINE, True, marks=SWEEP),  # eight ranks: that such a line runs, a guide shows
        ("advise --model gpt-1.7b --sequence 2048 --zero 0", "--stack ddp=2", True),
        ("advise --model llama-3-8b --devices 7 --batch 3", "--schedule zb-h1 --ranks 4 --virtual 1 --layers 4", True),
    ],
)
def test_the_next_line_can_be_typed(asked: str, line: str, runs: bool, typed: Typed) -> None:
    found = typed.only(f"{asked} --most 1")[0].splitlines()[-1].partition("pipeproof ")[2]
    assert found.startswith(f"validate {line} ")
    if runs:
        typed.only(found)


@pytest.mark.parametrize("model", ["mixtral-8x7b", "llama-3-8b"])
def test_every_layout_has_a_line_to_type(model: str) -> None:
    job = Job(MODELS[model], 64, 32768)
    every = every_layout(job, Cluster(ACCELERATORS["h100"], 8))
    lines = {str(stack_of(_config(layout, job)) or "") for layout in every}
    assert {"pp=2,tp=2,recompute-selective", "zero-1=2", "cp=2", "", "pp=2,ddp=2,tp=2"} <= lines | {""}
    assert any("zero-3" in line for line in lines)


@pytest.mark.long
@pytest.mark.parametrize("sequence", [8192, 131072])
@pytest.mark.parametrize("model", sampled(["deepseek-v3", "llama-3-405b"], 2))
def test_the_largest_are_answered_at_once(model: str, sequence: int, typed: Typed) -> None:
    """Seconds of computing, for machines that do other things too; it took 1 to 4.5 where it was measured."""
    began = time.process_time()
    typed.only(f"advise --model {model} --devices 16384 --batch 2048 --sequence {sequence} --quiet")
    assert time.process_time() - began < 15


@pytest.mark.parametrize("width", [80, 120])
def test_tables_are_whole_in_a_terminal(width: int, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = typed.only(SMALL)
    monkeypatch.setattr(Terminal, "width", width)
    shown, _ = typed.only(SMALL)
    assert max(map(len, shown.splitlines()[:-1])) <= width
    assert sorted(shown.split()) == sorted(whole.split()), "only the places of words are others"
    _, steps, _, _, _ = shown.split("\n\n")
    rows = [line for line in steps.splitlines() if line.startswith(("data parallel", "ZeRO", "expert"))]
    golden(rows[-1])


def test_a_column_goes_before_any_is_cut(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    text, _ = typed.only("advise --list")
    assert "deepseek-v3" in text
    assert "h100" in text
    monkeypatch.setattr(Terminal, "width", 30)
    lines = typed.only("advise --list")[0].splitlines()
    assert max(map(len, lines)) <= 30
    assert not [line for line in lines if "\N{HORIZONTAL ELLIPSIS}" in line]

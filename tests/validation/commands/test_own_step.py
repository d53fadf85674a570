"""What pyproject.toml or a line says of a user's own step, and the defaults of a team: what is refused."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeproof.commands import cli
from pipeproof.commands.cli import main
from pipeproof.commands.own_step import steps_of
from tests.support.golden import golden
from tests.support.typed import Typed

MODULE = """
import torch
from torch import nn
from pipeproof import Contract

NUMBER = 3
LIST = [(torch.zeros(2, 4), torch.zeros(2, 4))]
contract = Contract(loss_divisor=2)
calls = []

def my_step(model, microbatches):
    raise AssertionError("nothing here is to run")

def build():
    return nn.Linear(4, 4)

def data():
    return [(torch.randn(2, 4), torch.randn(2, 4)) for _ in range(2)]

def claims():
    return contract

def broken():
    raise RuntimeError("no data today")

loss_fn = nn.functional.mse_loss
"""
TABLE = {
    "step": '"own_steps.py:my_step"',
    "reference": '"own_steps.py:build"',
    "microbatches": '"own_steps.py:data"',
    "loss_fn": '"own_steps.py:loss_fn"',
    "ranks": "2",
}


def entry(name: str = "mine", **changed: str) -> str:
    """The table of a step; an empty value leaves a key out."""
    lines = [f"{key} = {value}" for key, value in {**TABLE, **changed}.items() if value]
    return "\n".join([f"[tool.pipeproof.steps.{name}]", *lines, ""])


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_steps.py").write_text(MODULE)
    (tmp_path / "raises.py").write_text("raise ZeroDivisionError('at import')\n")
    (tmp_path / "ends.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "lacks.py").write_text("import no_such_package_at_all\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "json.py").write_text("def my_step(): ...\n")
    (tmp_path / "pyproject.toml").write_text(entry())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        if name in ("own_steps", "raises", "ends", "lacks"):
            del sys.modules[name]


def test_a_table_says_what_validate_is_given(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    more = {"contract": '"own_steps:claims"', "optimizer": '"torch.optim:SGD"', "timeout": "7"}
    (tmp_path / "pyproject.toml").write_text(
        entry(**more)
        + "fuzz = {splits = true, data = 'own_steps:data'}\n"
        + entry("other", microbatches="'own_steps:LIST'")
    )
    found = steps_of(tmp_path / "inner")
    given = found["mine"].load()
    assert sorted(given) == sorted((*TABLE, "contract", "optimizer", "timeout_s"))
    assert (given["step"].__name__, given["ranks"], given["timeout_s"]) == ("my_step", 2, 7)
    assert (given["contract"].loss_divisor, len(given["microbatches"])) == (2, 2)
    again = found["mine"].load()["microbatches"]
    assert all(bool((one[0] == two[0]).all()) for one, two in zip(given["microbatches"], again, strict=True)), "seeded"
    assert found["mine"].load_fuzz() == {"splits": True, "data": sys.modules["own_steps"].data}
    assert len(found["other"].load()["microbatches"]) == 1


@pytest.mark.parametrize(
    ("ranks", "processes"), [("3", 3), ("[0, 0, 1, 1]", 4), ("{pp = 2, dp = 3}", 6)], ids=["number", "replicas", "mesh"]
)
def test_ranks_may_be_said_in_three_ways(ranks: str, processes: int, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(entry(ranks=ranks))
    assert steps_of(tmp_path)["mine"].processes == processes


TABLES = {
    "no step": entry(step=""),
    "no reference": entry(reference=""),
    "no data": entry(microbatches=""),
    "no ranks": entry(ranks=""),
    "unknown key": entry() + "refrence = 'x:y'\n",
    "a number": entry(step="3"),
    "no function": entry(step='"own_steps.py"'),
    "no module": entry(step='"my steps:x"'),
    "two colons": entry(step='"a:b:c"'),
    "ranks text": entry(ranks="'two'"),
    "no rank": entry(ranks="0"),
    "less": entry(ranks="-1"),
    "many": entry(ranks="99999"),
    "true": entry(ranks="true"),
    "empty mesh": entry(ranks="{}"),
    "mesh of text": entry(ranks="{pp = 'a'}"),
    "timeout": entry(timeout="-1"),
    "fuzz": entry(fuzz="3"),
    "no table": "[tool.pipeproof.steps]\nmine = 3\n",
    "no tables": "[tool.pipeproof]\nsteps = 3\n",
    "a name": entry('"my step"'),
    "no file": entry(step='"nowhere.py:f"'),
    "not there": entry(step='"no_such_module:f"'),
    "no such": entry(step='"own_steps.py:my_stp"'),
    "a value": entry(step='"own_steps.py:NUMBER"'),
    "raises": entry(step='"raises.py:f"'),
    "ends": entry(step='"ends.py:f"'),
    "lacks": entry(step='"lacks.py:f"'),
    "taken": entry(step='"other/json.py:my_step"'),
    "no data today": entry(microbatches='"own_steps.py:broken"'),
    "an empty list": entry(microbatches='"own_steps.py:calls"'),
    "no optimizer": entry(optimizer='"own_steps.py:NUMBER"'),
    "no loss": entry(loss_fn='"own_steps.py:NUMBER"'),
    "no model": entry(reference='"own_steps.py:NUMBER"'),
    "no contract": entry(contract='"own_steps.py:NUMBER"'),
}


LINES = """
validate thine
validate own_steps.py
validate own_steps.py:my_step
validate a.py:b --ranks 2 --reference c.py:d --microbatches 8
validate mine --schedule 1f1b
validate mine --record x
validate mine --check composed
validate mine --bench x.json
validate mine --loss-fn 3
validate --loss-fn own_steps:loss_fn
validate --microbatches own_steps:data
replay mine --plugin x.py
replay 1f1b r1 s1 m1 --loss-fn own_steps:loss_fn
replay 1f1b r1 s1 m1 --device cpu
record mine
record mine --record /no/such/folder/x
record mine --record x --config y.json
mutate mine --plugin x.py
mutate mine --shrink
mutate mine --only gradient-lots
mutate mine --list --only gradient-lots
gate thine
gate mine --ranks 2
gate mine --json /no/such/folder/x
fuzz mine --schedule 1f1b
fuzz mine --cases 0
fuzz thine
"""


BAD = {name: (table, "validate mine --json out.json --html out.html") for name, table in TABLES.items()}
BAD |= {line: (entry(), line) for line in LINES.strip().splitlines()}


@pytest.mark.parametrize("name", BAD)
def test_a_table_or_a_line_that_cannot_be_is_a_sentence(name: str, typed: Typed, tmp_path: Path) -> None:
    table, line = BAD[name]
    (tmp_path / "pyproject.toml").write_text(table)
    before = sorted(tmp_path.iterdir())
    typed.refused(line)
    assert [one for one in sorted(tmp_path.iterdir()) if one.name != "__pycache__"] == before


def test_without_a_table_a_name_is_said_to_be_none(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").unlink()
    typed.refused("validate mine")
    typed.refused("gate mine")


SHARED = """
[tool.pipeproof]
ranks = 2
quiet = false
dtype = ["fp32", "bf16"]

[tool.pipeproof.show]
microbatches = 3
"""


def test_the_nearest_file_gives_defaults(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("pyproject.toml").write_text(SHARED)
    Path("inner").mkdir()
    monkeypatch.chdir("inner")
    typed(["show", "1f1b"])
    typed(["show", "1f1b", "--ranks", "3"])
    assert vars(cli._parser().parse_args(["fuzz"]))["dtype"] == "fp32,bf16"
    assert vars(cli._parser().parse_args(["validate"]))["microbatches"] is None, "that was for show"
    with pytest.raises(SystemExit):
        main(["validate", "--help"])
    said = " ".join(typed.said().split())
    golden(said)


@pytest.mark.parametrize(
    "table",
    [
        "timout = 3",
        "[tool.pipeproof.show]\ncases = 3",
        "[tool.pipeproof.sow]\ncases = 3",
        "help = true",
        "ranks = 'four'",
        "timeout = -1",
        "device = 'gpu'",
        "profile = 'yes'",
        "html = false",
        "json = 5",
        "schedule = {a = 1}",
    ],
)
def test_a_default_that_cannot_be_is_a_sentence(table: str, typed: Typed) -> None:
    Path("pyproject.toml").write_text(f"[tool.pipeproof]\n{table}\n")
    typed.refused("show 1f1b")


def test_a_file_without_our_table_changes_nothing(typed: Typed) -> None:
    Path("pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert main(["show", "1f1b"]) == 0
    Path("pyproject.toml").write_text("[tool]\npipeproof = 3\n")
    typed.refused("show 1f1b")
    Path("pyproject.toml").write_text("[")
    typed.refused("show 1f1b", "cannot read ")

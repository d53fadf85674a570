"""What pyproject.toml or a line says of a user's own step, and the defaults of a team: what is refused."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeproof.commands import cli
from pipeproof.commands.cli import main
from pipeproof.commands.own_step import OwnStep, StepError, steps_of
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
    "no step": (
        entry(step=""),
        "[tool.pipeproof.steps.mine] has no step, the function that every rank calls: add step =",
    ),
    "no reference": (
        entry(reference=""),
        "has no reference, what builds the whole model on one device: add reference =",
    ),
    "no data": (
        entry(microbatches=""),
        "has no microbatches, what makes the data, or a list of it: add microbatches =",
    ),
    "no ranks": (entry(ranks=""), "has no ranks, how many ranks the step takes: add ranks = 2"),
    "unknown key": (entry() + "refrence = 'x:y'\n", "'refrence', which is no key of a step: did you mean 'reference'?"),
    "a number": (entry(step="3"), 'step = 3: expected "module:function" or "path/to/file.py:function"'),
    "no function": (entry(step='"own_steps.py"'), "step = 'own_steps.py': expected \"module:function\""),
    "no module": (entry(step='"my steps:x"'), "step = 'my steps:x': expected \"module:function\""),
    "two colons": (entry(step='"a:b:c"'), "step = 'a:b:c': expected"),
    "ranks text": (entry(ranks="'two'"), "ranks = 'two': expected a number from 1 to"),
    "no rank": (entry(ranks="0"), "has no ranks, how many ranks"),
    "less": (entry(ranks="-1"), "ranks = -1: expected a number from 1 to"),
    "many": (entry(ranks="99999"), "ranks = 99999: expected a number from 1 to"),
    "true": (entry(ranks="true"), "ranks = True: expected a number from 1 to"),
    "empty mesh": (entry(ranks="{}"), "ranks = {}: expected a number from 1 to"),
    "mesh of text": (entry(ranks="{pp = 'a'}"), "ranks = {'pp': 'a'}: expected a number from 1 to"),
    "timeout": (entry(timeout="-1"), "timeout = -1: expected seconds above 0, as 60"),
    "fuzz": (entry(fuzz="3"), "fuzz = 3: expected a table, as {microbatches = [1, 2, 4]}"),
    "no table": ("[tool.pipeproof.steps]\nmine = 3\n", "[tool.pipeproof.steps.mine] is 3: expected a table with step,"),
    "no tables": ("[tool.pipeproof]\nsteps = 3\n", "[tool.pipeproof.steps] is 3: expected tables"),
    "a name": (entry('"my step"'), "'my step' is no name of a step: expected letters, digits, _ and -"),
    "no file": (entry(step='"nowhere.py:f"'), "step = 'nowhere.py:f': no such file: nowhere.py; paths are from"),
    "not there": (entry(step='"no_such_module:f"'), "there is no module no_such_module: install it, or give its file"),
    "no such": (entry(step='"own_steps.py:my_stp"'), "own_steps.py has no my_stp: did you mean 'my_step'?"),
    "a value": (entry(step='"own_steps.py:NUMBER"'), "step = 'own_steps.py:NUMBER' is 3: expected a function"),
    "raises": (
        entry(step='"raises.py:f"'),
        "importing raises.py raised ZeroDivisionError: at import (raises.py:1); mend",
    ),
    "ends": (entry(step='"ends.py:f"'), "importing ends.py raised SystemExit: 3 (ends.py:1); mend that first"),
    "lacks": (
        entry(step='"lacks.py:f"'),
        "lacks.py cannot be imported: No module named 'no_such_package_at_all'; install",
    ),
    "taken": (
        entry(step='"other/json.py:my_step"'),
        "another module is called json: rename the file, or give its module's",
    ),
    "no data today": (
        entry(microbatches='"own_steps.py:broken"'),
        "calling it without arguments raised RuntimeError: no data today (own_steps.py:",
    ),
    "an empty list": (entry(microbatches='"own_steps.py:calls"'), "microbatches is empty: expected at least one"),
    "no optimizer": (
        entry(optimizer='"own_steps.py:NUMBER"'),
        "optimizer = 'own_steps.py:NUMBER' is 3: expected a function",
    ),
    "no loss": (entry(loss_fn='"own_steps.py:NUMBER"'), "loss_fn = 'own_steps.py:NUMBER' is 3: expected a function"),
    "no model": (
        entry(reference='"own_steps.py:NUMBER"'),
        "is 3: expected a function that builds the model, or a StageByStage",
    ),
    "no contract": (entry(contract='"own_steps.py:NUMBER"'), "is 3: expected a pipeproof.Contract"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_cannot_be_is_a_sentence(name: str, typed: Typed, tmp_path: Path) -> None:
    text, words = TABLES[name]
    (tmp_path / "pyproject.toml").write_text(text)
    before = sorted(tmp_path.iterdir())
    typed.refused("validate mine --json out.json --html out.html", words)
    assert [one for one in sorted(tmp_path.iterdir()) if one.name != "__pycache__"] == before


LINES = {
    "validate thine": "unknown step 'thine': did you mean 'mine'? known are mine",
    "validate own_steps.py": "unknown step 'own_steps.py': known are mine",
    "validate own_steps.py:my_step": "validate has no reference, what builds the whole model on one device: add",
    "validate a.py:b --ranks 2 --reference c.py:d --microbatches 8": 'microbatches = 8: expected "module:function"',
    "validate mine --schedule 1f1b": "--schedule has no effect on a step of yours: leave it out",
    "validate mine --record x": "--record has no effect on a step of yours: leave it out",
    "validate mine --check composed": "--check has no effect on a step of yours: leave it out",
    "validate mine --bench x.json": "--bench has no effect on a step of yours: leave it out",
    "validate mine --loss-fn 3": "loss_fn = '3': expected",
    "validate --loss-fn own_steps:loss_fn": "--loss-fn is of a step of yours, and none is named: expected STEP",
    "validate --microbatches own_steps:data": "--microbatches is of a step of yours, and none is named",
    "replay mine --plugin x.py": "--plugin has no effect on a step of yours: leave it out",
    "replay 1f1b r1 s1 m1 --loss-fn own_steps:loss_fn": "--loss-fn is of a step of yours, and none is named",
    "replay 1f1b r1 s1 m1 --device cpu": "--device has no effect on a line, which says it: leave it out",
    "record mine": "the following arguments are required: --record",
    "record mine --record /no/such/folder/x": "cannot write /no/such/folder/x",
    "record mine --record x --config y.json": "expected either a case, or a step, or --config FILE; give one",
    "mutate mine --plugin x.py": "--plugin has no effect on a step of yours: leave it out",
    "mutate mine --shrink": "--shrink has no effect on a step of yours: leave it out",
    "mutate mine --only gradient-lots": "unknown fault 'gradient-lots': did you mean 'gradient-lost'?",
    "mutate mine --list --only gradient-lots": "unknown fault 'gradient-lots': did you mean 'gradient-lost'?",
    "gate thine": "unknown step 'thine': did you mean 'mine'? known are mine",
    "gate mine --ranks 2": "--ranks has no effect on steps of yours, unless --schedule names some, too: leave it out",
    "gate mine --json /no/such/folder/x": "cannot write /no/such/folder/x",
    "fuzz mine --schedule 1f1b": "--schedule has no effect on a step of yours: leave it out",
    "fuzz mine --cases 0": "--cases is 0: expected at least 1",
    "fuzz thine": "unknown step 'thine': did you mean 'mine'? known are mine",
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_that_cannot_be_is_a_sentence(line: str, typed: Typed, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    typed.refused(line, LINES[line])
    assert [one for one in sorted(tmp_path.iterdir()) if one.name != "__pycache__"] == before


def test_without_a_table_a_name_is_said_to_be_none(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").unlink()
    typed.refused("validate mine", "pyproject.toml names none, and 'mine' is no \"module:function\"")
    typed.refused("gate mine", "pyproject.toml has no table [tool.pipeproof.steps.mine]")


def test_a_step_is_made_of_places_alone(tmp_path: Path) -> None:
    with pytest.raises(StepError, match="has no reference"):
        OwnStep("x", "here", tmp_path, "x", {"step": "a:b", "ranks": 2})
    with pytest.raises(StepError, match="has no ranks"):
        OwnStep("x", "here", tmp_path, "x", {"step": "a:b", "reference": "a:c", "microbatches": "a:d"})


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
    ("table", "words"),
    [
        ("timout = 3", "[tool.pipeproof] has 'timout', which is no option: did you mean 'timeout'? known are "),
        ("[tool.pipeproof.show]\ncases = 3", "[tool.pipeproof.show] has 'cases', which is no option: "),
        ("[tool.pipeproof.sow]\ncases = 3", "[tool.pipeproof.sow] is of no command: did you mean 'show'? known are "),
        ("help = true", "has 'help', which is no option"),
        ("ranks = 'four'", "[tool.pipeproof] ranks = 'four': expected a whole number"),
        ("timeout = -1", "[tool.pipeproof] timeout = -1: expected seconds above 0"),
        ("device = 'gpu'", "[tool.pipeproof] device = 'gpu': unknown device 'gpu': torch names cpu, cuda"),
        ("profile = 'yes'", "[tool.pipeproof] profile = 'yes': expected true or false"),
        ("html = false", "[tool.pipeproof] html = False: expected the name of a file"),
        ("json = 5", "[tool.pipeproof] json = 5: expected the name of a file"),
        ("schedule = {a = 1}", "[tool.pipeproof] schedule = {'a': 1}: expected a number or text"),
        ("x = [", "cannot read "),
    ],
)
def test_a_default_that_cannot_be_is_a_sentence(table: str, words: str, typed: Typed) -> None:
    Path("pyproject.toml").write_text(f"[tool.pipeproof]\n{table}\n")
    typed.refused("show 1f1b", words)


def test_a_file_without_our_table_changes_nothing(typed: Typed) -> None:
    Path("pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert main(["show", "1f1b"]) == 0
    Path("pyproject.toml").write_text("[tool]\npipeproof = 3\n")
    typed.refused(["show", "1f1b"])

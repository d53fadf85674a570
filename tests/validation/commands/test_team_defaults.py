"""Defaults that a team shares: what they do, and what is refused in a sentence."""

import argparse
import os
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeproof.commands import cli
from pipeproof.commands.cli import main
from pipeproof.commands.option_parser import UsageError
from pipeproof.commands.outputs import OutPath, Outputs, takes_standard_output
from tests.support.golden import golden
from tests.support.typed import Typed

SHARED = """
[tool.pipeproof]
ranks = 2
quiet = false
dtype = ["fp32", "bf16"]

[tool.pipeproof.show]
microbatches = 3
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")


def test_the_nearest_file_gives_defaults(typed: Typed) -> None:
    Path("../pyproject.toml").write_text(SHARED)
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
def test_what_cannot_be_is_a_sentence(table: str, words: str, typed: Typed) -> None:
    Path("pyproject.toml").write_text(f"[tool.pipeproof]\n{table}\n")
    typed.refused("show 1f1b", words)


def test_a_file_without_our_table_changes_nothing(typed: Typed) -> None:
    Path("pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert main(["show", "1f1b"]) == 0
    Path("pyproject.toml").write_text("[tool]\npipeproof = 3\n")
    typed.refused(["show", "1f1b"])


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


@pytest.mark.parametrize("other", ["x", "./x", "link"])
def test_two_results_in_one_file_are_refused(other: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("link").symlink_to("x")
    assert main(["show", "1f1b", "--json", "x", "--svg", other]) == 2
    said = capsys.readouterr().err
    golden(said)
    assert not Path("x").exists()
    assert not takes_standard_output(Namespace(json=OutPath(os.devnull), html=OutPath(os.devnull)))


def test_a_page_may_say_what_no_encoding_has() -> None:
    with Outputs(html="x.html").open("validate") as files:
        assert files.finish(1, page=lambda: "a file named \udcff") == 1
    golden(Path("x.html").read_text())

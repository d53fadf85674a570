"""The gate as a user runs it: passing, failing and short, and what it leaves behind."""

import re
import shlex
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pipeproof.commands import gate
from pipeproof.core.verdict import LawResult, Verdict
from pipeproof.own.case import Case
from pipeproof.records.record_file import read
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.json_schema import documented
from tests.support.page_text import PageText
from tests.support.typed import Typed

SMALL = ["--schedule", "1f1b", "--ranks", "1", "--microbatches", "2", "--layers", "1", "--model", "mlp"]
PINNED = "naive r1 s1 m2 split=1 model=mlp plan=train seed=0"
WRONG = f"{PINNED} specimen=loss-undivided"


@pytest.fixture
def without_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases that are judged without being run: wrong where something is planted, right elsewhere."""

    def judged(case: Case, world: World, *, measure: bool = True) -> tuple[Verdict, None]:
        outcome = "fail" if case.specimen else "pass"
        laws = tuple(LawResult(name, outcome, 1) for name in ("loss", "gradient", "grad-norm"))  # type: ignore[arg-type]
        return Verdict(str(case), outcome, "none", laws), None  # type: ignore[arg-type]

    monkeypatch.setattr(gate, "validate_case", judged)


@pytest.mark.usefixtures("without_ranks")
def test_all_cases_of_a_gate_are_counted(tmp_path: Path, typed: Typed) -> None:
    path = tmp_path / "gate.json"
    typed(
        ["gate", *SMALL, "--cases", "20", "--seed", "3", "--case", PINNED, "--json", str(path)], lines="planted|^gate"
    )
    groups = [one["group"] for one in documented(path.read_text())["verdicts"]]
    assert groups == ["table", "pinned", *["fuzz"] * 20, "planted"]


@pytest.mark.usefixtures("without_ranks")
def test_a_gate_without_a_family_is_short(typed: Typed) -> None:
    arguments = ["gate", "--microbatches", "3", "--model", "mlp", "--cases", "0", "--annotations", "github"]
    typed(arguments, 3, lines="^gate|^::error")


@pytest.mark.usefixtures("without_ranks")
def test_fuzzing_that_ends_early_makes_the_gate_short(monkeypatch: pytest.MonkeyPatch, typed: Typed) -> None:
    monkeypatch.setattr(gate, "fuzz", lambda *_, **__: None)
    typed(["gate", *SMALL, "--cases", "5"], 3, lines="^gate")


@pytest.mark.usefixtures("without_ranks")
def test_a_gate_that_cannot_fail_proves_nothing(monkeypatch: pytest.MonkeyPatch, typed: Typed) -> None:
    blind = gate.validate_case
    monkeypatch.setattr(gate, "validate_case", lambda case, *_, **__: blind(replace(case, specimen=""), None))  # type: ignore[arg-type]
    typed(["gate", *SMALL, "--cases", "1"], 3, lines="planted|^gate")


@pytest.mark.usefixtures("without_ranks")
def test_a_drawn_case_that_fails_is_shrunk(monkeypatch: pytest.MonkeyPatch, typed: Typed) -> None:
    sound = gate.validate_case

    def wrong_with_three(case: Case, world: World, *, measure: bool = True) -> tuple[Verdict, None]:
        faulty = replace(case, specimen="layernorm-zero") if case.microbatches >= 3 else case
        return replace(sound(faulty, world)[0], config=str(case)), None

    monkeypatch.setattr(gate, "validate_case", wrong_with_three)
    out = typed(["gate", *SMALL, "--cases", "50"], 1, lines="^FAIL|^  again")
    ran, expected = map(int, re.findall(r"(\d+) of (\d+) cases ran", out)[0])
    assert ran < expected == 52


@pytest.mark.pipeproof_ranks
def test_a_failing_gate_leaves_records(tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = ["--junit", "kept/gate.xml", "--summary", "kept/gate.md", "--artifacts", "kept", "--annotations", "github"]
    files += ["--html", "gate.html", "--json", "kept/gate.json"]
    out = typed(["gate", *SMALL, "--cases", "1", "--case", WRONG, *files], 1, lines="^gate")
    assert out.count("::error ") == 1
    suite = ElementTree.parse("kept/gate.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("5", "1", "0")
    golden(Path("kept/gate.md").read_text(), lines="fail", numbers=False)
    assert documented(Path("kept/1-naive.json").read_text())["verdicts"][0]["outcome"] == "fail"
    shown = Path("gate.html").read_text()
    golden(PageText(shown).lines, lines="^Of ")
    assert all(group in shown for group in ("pinned", "fuzz", "planted"))
    assert read("kept/1-naive.observed").kind == "observed"
    typed(
        ["compare", "kept/1-naive.expected", "kept/1-naive.observed"],
        1,
        lines="^  (mismatch|again) ",
        numbers=False,
    )
    assert sorted(path.name for path in Path("kept").iterdir()) == [
        "1-naive.expected", "1-naive.json", "1-naive.observed", "1-naive.txt", "gate.json", "gate.md", "gate.xml",
    ]  # fmt: skip


BAD = f"""
--cases -1
--case gibberish
--case '{PINNED} specimen=gremlin'
--junit /no/such/folder/x.xml
--html /no/such/folder/x.html
--artifacts /dev/null/x
--artifacts kept --json kept/x.json --cases -1
--schedule mine.csv
--annotations gitlab
--max-ranks 0
"""


@pytest.mark.parametrize("line", BAD.strip().splitlines())
def test_bad_input_is_refused_before_anything_runs(
    line: str, tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gate, "validate_case", lambda *_, **__: pytest.fail("something ran"))
    typed.refused(["gate", *SMALL, *shlex.split(line)])
    assert [*tmp_path.iterdir()] == []

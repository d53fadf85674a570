"""The commands record and compare as a user types them: what they print, and their exit statuses."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from pipeproof.own.case import Case
from pipeproof.own.config import Config
from pipeproof.records.case_record import record_expected
from pipeproof.records.record_file import write
from pipeproof.worlds.output_file import OutputFile
from tests.support.golden import golden
from tests.support.json_schema import documented
from tests.support.long_runs import Loop, faster
from tests.support.page_text import PageText
from tests.support.typed import Typed

ONE = "1f1b r2 s2 m3 split=1,1 model=mlp plan=train seed=0"
OTHER = "gpipe r1 s1 m3 split=2 model=mlp plan=train seed=0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("records")
    for name, text in (("one", ONE), ("other", OTHER), ("seeded", ONE.replace("seed=0", "seed=1"))):
        with OutputFile(str(made / name)) as file:
            write(record_expected(Case.parse(text)), file)
    seeded = record_expected(Case.parse(ONE.replace("seed=0", "seed=1")))
    with OutputFile(str(made / "elsewhere")) as file:
        write(replace(seeded, config={**seeded.config, "torch": "1.0"}), file)
    (made / "text").write_text("no record")
    (made / "config.json").write_bytes(Config({"pp": 2, "tp": 2}).text())
    return made


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_what_is_recorded_agrees_under_another_schedule(typed: Typed) -> None:
    typed(f"record {ONE} --record again")
    typed.only("compare one again")
    typed("compare again other --json verdict.json", lines="^PASS")
    assert documented(Path("verdict.json").read_text())["verdicts"][0]["outcome"] == "pass"


def test_folders_of_runs_are_compared(typed: Typed) -> None:
    Loop().train(Path("runs/good"), range(4))
    Loop([3, 2, 1, 0], faster, 2).train(Path("runs/observed"), range(4))
    Loop([2, 0, 3, 1]).train(Path("runs/third"), range(3))
    compare = "compare runs/good runs/observed"
    typed.only(compare, 3)
    typed.only(f"{compare} --also runs/third --until 1")
    more = "--also runs/third --json run.json --html run.html"
    out = typed(f"{compare} {more}", 1, lines="^FAIL|^  (mismatch|again) ")
    assert documented(Path("run.json").read_text())["verdicts"][0]["mismatches"][0]["step"] == 2
    assert out.splitlines()[0].removeprefix("FAIL the ").partition(",")[0] in Path("run.html").read_text()


def test_diff_says_first_how_the_configs_differ(typed: Typed) -> None:
    out = typed.only("compare one other --why --html diff.html")[0]
    lines = [line.split() for line in out.splitlines()]
    assert lines[4][0] == "PASS", "one of the two is what was expected"
    assert [line[0] for line in lines[-5:]] == ["why", "most", "one", "other", "diff.html:"]
    golden(out, lines="^(config|schedule|pp|split) |^PASS|^  why")
    golden(PageText(Path("diff.html").read_text()).lines, lines="^schedule|Not recorded|differ")
    typed(["compare", "one", "one", "--why"])


def test_diff_says_which_field_asks_for_another_answer(typed: Typed) -> None:
    why = ["--why", "--json", "seeds.json", "--html", "seeds.html"]
    typed(["compare", "one", "seeded", *why], 1, lines="^DIFFERENT|^  why")
    assert "seed differs" in Path("seeds.html").read_text()
    told = documented(Path("seeds.json").read_text())["difference"]
    assert (told["reason"], told["fields"], told["next"]) == ("asked", ["seed"], [])
    assert [side["outcome"] for side in told["sides"]] == ["pass", "pass"]


def test_a_wrong_number_ends_with_1(typed: Typed) -> None:
    record = record_expected(Case.parse(ONE))
    doubled = {name: None if g is None else 2 * g for name, g in record.operations[0].gradients.items()}
    vars(record.operations[0])["gradients"] = doubled
    with OutputFile("wrong") as file:
        write(record, file)
    for why in ([], ["--why"]):
        typed(["compare", "one", "wrong", *why], 1, lines="^(FAIL|DIFFERENT)|^  (mismatch|why|try|one|other) ")


BAD = f"""
compare one seeded
compare one elsewhere --why
compare one nowhere --why
compare nowhere one
compare text one
compare one one --json /no/such/folder/x
compare '' one
compare config.json one
compare one one --html /no/such/folder/x
record gibberish --record x
record {ONE} specimen=layernorm-zero --record x
record {ONE} --record /no/such/folder/x
validate --record x
compare one run
compare run run
compare run run --until -1
compare one other --also run
"""


@pytest.mark.parametrize("line", BAD.strip().splitlines())
def test_bad_input_is_refused_and_nothing_is_written(line: str, folder: Path, typed: Typed) -> None:
    Path("run").mkdir(exist_ok=True)
    before = sorted(folder.iterdir())
    typed.refused(line)
    assert sorted(folder.iterdir()) == before


@pytest.mark.pipeproof_ranks
def test_what_a_run_gave_is_recorded_and_judged(typed: Typed) -> None:
    typed.only(f"replay {ONE} --record observed")
    typed.only(f"replay {ONE} specimen=layernorm-zero --record faulty", 1)
    out = typed.only("compare observed observed")[0]
    out += typed.only("compare observed faulty --json diff.json --html diff.html", 1)[0]
    assert re.findall(r"(?m)^[A-Z]+ ", out) == ["SAME ", "DIFFERENT "]
    numbers, _, why = out.rpartition("  why ")
    assert not re.search(r"expected|\bright|\bwrong|\bcause\b|\b(pass|fail)\b", numbers, re.IGNORECASE)
    golden(numbers, lines="^  (mismatch|again) ", numbers=False)
    golden(why, numbers=False)
    golden(PageText(Path("diff.html").read_text()).lines, lines="^(specimen|wrong by)")
    told = documented(Path("diff.json").read_text())
    assert told["verdicts"][0]["sides"] == ["other", "one"]
    assert (told["status"], told["difference"]["reason"]) == (1, "fault")
    typed("compare one observed", lines="^PASS")

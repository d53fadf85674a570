"""The commands record and compare as a user types them: what they print, and their exit statuses."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from pipeproof.commands.cli import main
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
    (made / "config.json").write_bytes(Config({"pp": 2, "tp": 2}).text())
    return made


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_record_writes_what_is_expected(typed: Typed) -> None:
    typed(["record", *ONE.split(), "--record", "again"])
    assert main(["compare", "one", "again"]) == 0


def test_records_of_two_schedules_agree(typed: Typed) -> None:
    typed(["compare", "one", "other", "--json", "verdict.json"], lines="^PASS")
    assert documented(Path("verdict.json").read_text())["verdicts"][0]["outcome"] == "pass"


def test_folders_of_runs_are_compared(typed: Typed) -> None:
    Loop().train(Path("runs/good"), range(4))
    Loop([3, 2, 1, 0], faster, 2).train(Path("runs/observed"), range(4))
    Loop([2, 0, 3, 1]).train(Path("runs/third"), range(3))
    compare = ["compare", "runs/good", "runs/observed"]
    assert main(compare) == 3
    assert main([*compare, "--also", "runs/third", "--until", "1"]) == 0
    typed.said()
    out = typed(
        [*compare, "--also", "runs/third", "--json", "run.json", "--html", "run.html"],
        1,
        lines="^FAIL|^  (mismatch|again) ",
    )
    assert documented(Path("run.json").read_text())["verdicts"][0]["mismatches"][0]["step"] == 2
    assert out.splitlines()[0].removeprefix("FAIL the ").partition(",")[0] in Path("run.html").read_text()


@pytest.mark.parametrize(
    "line",
    [
        "one run",
        "run run",
        "run run --until -1",
        "one other --also run",
    ],
)
def test_what_is_no_pair_of_runs_is_refused(line: str, typed: Typed) -> None:
    Path("run").mkdir(exist_ok=True)
    typed.refused(["compare", *shlex.split(line)])


def test_diff_says_first_how_the_configs_differ(typed: Typed) -> None:
    assert main(["compare", "one", "other", "--why", "--html", "diff.html"]) == 0
    out = typed.said()
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compare", "one", "seeded"], "microbatch 0 first; their configs differ in seed (0, 1); expected two records"),
        (["compare", "one", "elsewhere", "--why"], "microbatch 0 first; their configs differ in seed (0, 1), torch"),
        (["compare", "one", "nowhere", "--why"], "no such file: nowhere"),
        (["compare", "nowhere", "one"], "no such file: nowhere"),
        (["compare", __file__, "one"], "is no record: expected a file that `pipeproof record` or --record wrote"),
        (["compare", "one", "one", "--json", "/no/such/folder/x"], "cannot write /no/such/folder/x"),
        (["compare", "", "one"], "cannot read a file whose name is empty"),
        (
            ["compare", "config.json", "one"],
            "config.json is a config, and no record: `pipeproof record --config",
        ),
        (["compare", "one", "one", "--html", "/no/such/folder/x"], "cannot write /no/such/folder/x"),
        (["record", "gibberish", "--record", "x"], "not a case: 'gibberish'"),
        (
            ["record", f"{ONE} specimen=layernorm-zero", "--record", "x"],
            "what is expected has no specimen; leave it out",
        ),
        (["record", ONE, "--record", "/no/such/folder/x"], "cannot write /no/such/folder/x"),
        (["validate", "--record", "x"], "--record takes one case, and these are 22: choose one --schedule and one"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(
    arguments: list[str], words: str, folder: Path, typed: Typed
) -> None:
    before = sorted(folder.iterdir())
    typed.refused(arguments, words)
    assert sorted(folder.iterdir()) == before


@pytest.mark.pipeproof_ranks
def test_what_a_run_gave_is_recorded_and_judged(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", ONE, "--record", "observed"]) == 0
    assert main(["replay", f"{ONE} specimen=layernorm-zero", "--record", "faulty"]) == 1
    capsys.readouterr()
    assert main(["compare", "observed", "observed"]) == 0
    assert main(["compare", "observed", "faulty", "--json", "diff.json", "--html", "diff.html"]) == 1
    out, _ = capsys.readouterr()
    assert re.findall(r"(?m)^[A-Z]+ ", out) == ["SAME ", "DIFFERENT "]
    numbers, _, why = out.rpartition("  why ")
    assert not re.search(r"expected|\bright|\bwrong|\bcause\b|\b(pass|fail)\b", numbers, re.IGNORECASE)
    golden(numbers, lines="^  (mismatch|again) ", numbers=False)
    golden(why, numbers=False)
    golden(PageText(Path("diff.html").read_text()).lines, lines="^(specimen|wrong by)")
    told = documented(Path("diff.json").read_text())
    assert told["verdicts"][0]["sides"] == ["other", "one"]
    assert (told["status"], told["difference"]["reason"]) == (1, "fault")
    assert main(["compare", "one", "observed"]) == 0
    out, _ = capsys.readouterr()
    golden(out, lines="^PASS")

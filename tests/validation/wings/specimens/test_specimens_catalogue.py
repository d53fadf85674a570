"""The catalogue: its tables and its file have the same rows; a file of a user's own adds some, or is refused."""

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeproof.commands.cli import main
from pipeproof.own.case import Case
from pipeproof.own.validator import validate
from pipeproof.wings.specimens import CATALOGUE, SPECIMENS, Needs, Specimen, SpecimenError, catalogue
from pipeproof.wings.specimens.mixed import MIXED, RIGHT
from pipeproof.worlds.world import World
from tests.support.golden import golden

OWN = Path(__file__).parents[3] / "examples" / "my_specimens.py"
NAME = "last-stage-halved"


@pytest.fixture(autouse=True)
def unread() -> Iterator[None]:
    yield
    for file in CATALOGUE.files:
        CATALOGUE.unload(file)


def test_a_file_is_read_once_and_forgotten_again() -> None:
    assert CATALOGUE.load(OWN) == CATALOGUE.load(str(OWN)) == [NAME]
    assert isinstance(SPECIMENS[NAME], Specimen)
    assert [one.name for one in CATALOGUE.own] == [NAME]
    CATALOGUE.unload(OWN)
    assert NAME not in SPECIMENS


def test_the_command_lists_them_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mutate", "--plugin", str(OWN), "--list"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split()[:3] == [NAME, "own", "scale"]
    golden(line)


@pytest.mark.pipeproof_ranks
def test_the_command_plants_catches_and_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mutate", "--plugin", str(OWN)]) == 0
    out = capsys.readouterr().out
    golden(out, lines="tried")
    assert "no faults" not in out


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
def test_a_line_with_one_is_replayed_with_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"1f1b r2 s2 m2 split=1,1 model=mlp plan=train specimen={NAME}"
    assert main(["replay", line]) == 2
    golden(capsys.readouterr().err)
    assert main(["replay", line, "--plugin", str(OWN)]) == 1
    out = capsys.readouterr().out
    assert "cause     scale: " in out
    assert f'specimen={NAME}" --plugin {OWN}\n' in out, "what is typed next needs it too"


@pytest.mark.sweep
def test_ranks_read_the_file_too(world: World) -> None:
    CATALOGUE.load(OWN)
    verdict = validate(Case.parse(f"gpipe r2 s2 m2 split=1,1 model=mlp plan=train specimen={NAME}"), world)
    assert {mismatch.stage for mismatch in verdict.mismatches if mismatch.law == "gradient"} == {1}


GOOD = OWN.read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = (", "is no Python: '(' was never closed"),
        ("\0", "is no Python: "),
        ("1 / 0", "raised ZeroDivisionError: division by zero"),
        ("import nowhere_at_all", "raised ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("x = 1", "registers nothing; expected Python that calls register(Specimen(...))"),
        (GOOD.replace(NAME, "Halved it"), "the name 'Halved it': expected small letters, digits and hyphens"),
        (GOOD.replace(NAME, "clip-twice"), "there is a specimen 'clip-twice' already"),
        (GOOD.replace(NAME, "slow-messages"), "there is a specimen 'slow-messages' already"),
        (
            GOOD.replace('Fault("scale"', 'Fault("scael"'),
            f"specimen '{NAME}' has the fault 'scael': did you mean 'scale'? ",
        ),
        (GOOD.replace("fault=", 'classes=("zz",), fault='), f"specimen '{NAME}' has the classes zz: known are tA, "),
        (GOOD.replace('law="gradient"', 'law="gradeint"'), "breaks the law 'gradeint': did you mean 'gradient'? "),
        (
            GOOD.replace("fault=", 'schedule="gpipes", fault='),
            f"no smallest case has what specimen '{NAME}' needs: unk",
        ),
        (GOOD.replace("microbatches=2", "also=lambda case: 'needs luck'"), f"what specimen '{NAME}' needs: needs luck"),
        (GOOD.replace("register(", "register(7) or register("), "register was given a int: expected a Specimen"),
    ],
)
def test_a_file_that_will_not_do_is_refused_in_a_sentence_and_leaves_nothing(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.py"
    file.write_text(text)
    known = set(SPECIMENS)
    assert main(["mutate", "--plugin", str(file)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    CATALOGUE.unload(file)
    assert set(SPECIMENS) == known


@pytest.mark.parametrize(("path", "words"), [("nowhere.py", "no such file"), ("", "cannot read")])
def test_a_file_that_cannot_be_read_is_said(
    path: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mutate", "--plugin", path and str(tmp_path / path)]) == 2
    assert words in capsys.readouterr().err


def test_a_file_of_another_encoding_is_said(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(SpecimenError, match="is no Python: "):
        CATALOGUE.load(file)


TABLES = [one.PLANTS for one in catalogue._TABLES]


def test_each_name_is_in_one_table_and_once_in_the_file() -> None:
    rows = [name for table in (*TABLES, MIXED, RIGHT) for name in table]
    with Path(catalogue.__file__).with_name("catalogue.csv").open() as file:
        assert sorted(one["name"] for one in csv.DictReader(file)) == sorted(rows)
    assert len(set(rows)) == len(rows)


def test_a_word_of_the_file_that_is_none_is_refused() -> None:
    assert vars(Needs(**catalogue._fields("stages=2 ragged", catalogue._NEEDS))) == vars(Needs(stages=2, ragged=True))
    with pytest.raises(KeyError, match="nowhere"):
        catalogue._fields("stage=nowhere", catalogue._PLACE)
    with pytest.raises(TypeError, match="stags"):
        Needs(**catalogue._fields("stags=2", catalogue._NEEDS))
    with pytest.raises(ValueError, match="two"):
        catalogue._fields("stages=two", catalogue._NEEDS)

"""``init``: what it writes, and what it never touches. That each file passes is in tests/examples/test_starters.py."""

from pathlib import Path

import pytest

from pipeproof.commands.cli import main
from pipeproof.commands.init import STARTERS, summary, text, write_new
from pipeproof.foreign.frameworks.colossalai_whole import COLOSSALAI
from pipeproof.foreign.frameworks.deepspeed_whole import DEEPSPEED
from pipeproof.foreign.frameworks.framework import Framework
from pipeproof.foreign.frameworks.megatron_whole import MEGATRON
from pipeproof.foreign.frameworks.nanotron_whole import NANOTRON
from pipeproof.foreign.frameworks.torchtitan_whole import TORCHTITAN
from pipeproof.foreign.frameworks.transformers_whole import TRANSFORMERS
from pipeproof.worlds.output_file import OutputError
from tests.support.golden import golden

FRAMEWORKS = (MEGATRON, DEEPSPEED, TORCHTITAN, NANOTRON, COLOSSALAI, TRANSFORMERS)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", STARTERS)
def test_a_file_is_written_and_the_next_command_said(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", kind, "test_mine.py"]) == 0
    assert (folder / "test_mine.py").read_text() == text(kind)
    said = capsys.readouterr().out
    assert summary(kind) in said
    assert "pytest test_mine.py\n" in said


@pytest.mark.parametrize("one", FRAMEWORKS, ids=lambda one: one.adapter)
def test_what_a_framework_needs_is_said(one: Framework, capsys: pytest.CaptureFixture[str]) -> None:
    kind = one.adapter.rpartition(".")[2]
    assert main(["init", kind]) == 0
    assert f"It needs {kind}: {one.install}\n" in capsys.readouterr().out


@pytest.mark.parametrize("kind", STARTERS)
def test_every_file_has_three_marked_places(kind: str) -> None:
    for place in (1, 2, 3):
        assert text(kind).count(f'"""CHANGE {place}: ') == 1
    assert "CHANGE 4" not in text(kind)


def test_kind_and_file_may_be_left_out(folder: Path) -> None:
    assert main(["init"]) == 0
    assert main(["init", "test_other.py"]) == 0
    names = ("test_my_pipeline.py", "test_other.py")
    assert {(folder / name).read_text() for name in names} == {text("custom")}


def test_a_file_can_be_standard_output(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "torch", "-"]) == 0
    assert capsys.readouterr() == (text("torch"), "")
    assert main(["init", "-"]) == 0
    assert capsys.readouterr() == (text("custom"), "")
    assert list(folder.iterdir()) == []


def test_the_list_names_all_and_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(STARTERS)
    assert list(folder.iterdir()) == []


def test_nothing_is_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "test_mine.py").write_text("mine")
    assert main(["init", "own", "test_mine.py"]) == 2
    golden(capsys.readouterr().err)
    assert (folder / "test_mine.py").read_text() == "mine"


@pytest.mark.parametrize(
    "words", [("tprch",), ("own", "mine.py"), ("own", "no/test_mine.py")], ids=["kind", "name", "folder"]
)
def test_what_cannot_be_is_a_sentence_and_nothing_is_written(
    words: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", *words]) == 2
    golden(capsys.readouterr().err)
    assert list(folder.iterdir()) == []


def test_a_folder_of_that_name_and_a_link_are_left_alone(folder: Path) -> None:
    (folder / "test_folder.py").mkdir()
    (folder / "test_link.py").symlink_to(folder / "elsewhere.py")
    for name in ("test_folder.py", "test_link.py"):
        with pytest.raises(OutputError, match="is there already"):
            write_new(name, "x")
    assert not (folder / "elsewhere.py").exists()


def test_a_full_disk_leaves_nothing_half_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *_: object) -> None: ...

        def write(self, content: str) -> None:
            raise OSError(28, "No space left on device")

    def opened(path: Path, *_: object, **__: object) -> Full:
        path.touch()
        return Full()

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(OutputError, match=r"cannot write test_mine\.py: No space left on device"):
        write_new("test_mine.py", "x")
    assert list(folder.iterdir()) == []

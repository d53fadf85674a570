"""``init``: what it writes, and what it never touches. That each file passes is in tests/examples/test_starters.py."""

from pathlib import Path

import pytest

from pipeproof.commands.init import KINDS, STARTERS, describe, text, write_new
from pipeproof.wings.adapters.colossalai_whole import COLOSSALAI
from pipeproof.wings.adapters.deepspeed import DEEPSPEED
from pipeproof.wings.adapters.framework import Framework
from pipeproof.wings.adapters.megatron_whole import MEGATRON
from pipeproof.wings.adapters.nanotron import NANOTRON
from pipeproof.wings.adapters.torchtitan import TORCHTITAN
from pipeproof.wings.adapters.transformers_whole import TRANSFORMERS
from pipeproof.worlds.output_file import OutputError
from tests.support.typed import Typed

FRAMEWORKS = (MEGATRON, DEEPSPEED, TORCHTITAN, NANOTRON, COLOSSALAI, TRANSFORMERS)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", STARTERS)
def test_a_file_is_written_with_three_marked_places(kind: str, folder: Path, typed: Typed) -> None:
    said = typed.only(f"init {kind} test_mine.py")[0]
    assert describe(kind)[0] in said
    assert "pytest test_mine.py\n" in said
    assert (content := text(kind)) == (folder / "test_mine.py").read_text()
    assert [content.count(f'"""CHANGE {place}: ') for place in (1, 2, 3, 4)] == [1, 1, 1, 0]


@pytest.mark.parametrize("one", FRAMEWORKS, ids=lambda one: one.adapter)
def test_what_a_framework_needs_is_said(one: Framework, typed: Typed) -> None:
    kind = one.adapter.rpartition(".")[2]
    assert f"It needs {kind}: {one.install}\n" in typed.only(f"init {kind}")[0]


@pytest.mark.parametrize(
    ("words", "file", "kind"),
    [
        ("", "test_my_pipeline.py", "custom"),
        ("test_other.py", "test_other.py", "custom"),
        ("-", "", "custom"),
        ("torch -", "", "torch"),
        ("--list", "", ""),
        ("github", ".github", "github"),
        ("github -", "", "github"),
        ("github mine.yml", "mine.yml", "github"),
    ],
)
def test_kind_and_file_may_be_left_out(words: str, file: str, kind: str, folder: Path, typed: Typed) -> None:
    said, err = typed.only(f"init {words}")
    assert [one.name for one in folder.iterdir()] == ([file] if file else [])
    if kind:
        where = folder / (".github/workflows/pipeline.yml" if file == ".github" else file)
        assert text(kind) == (where.read_text() if file else said)
    else:
        assert [line.split()[0] for line in said.splitlines()] == list(KINDS)
    assert err == ""


@pytest.mark.parametrize(
    "words", ["own test_mine.py", "tprch", "own mine.py", "own no/test_mine.py", "github test_mine.py"]
)
def test_what_cannot_be_written(words: str, folder: Path, typed: Typed) -> None:
    (folder / "test_mine.py").write_text("mine")
    typed.refused(f"init {words}")
    assert [(one.name, one.read_text()) for one in folder.iterdir()] == [("test_mine.py", "mine")]


def test_folders_and_links_are_left_alone(folder: Path) -> None:
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

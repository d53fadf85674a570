"""README and the guides, followed from top to bottom: every command runs, and prints what its page shows.

A page's files are written into an empty folder, as a reader would. After a change of what commands print, run this with
``GUIDES=rewrite``: pages then show what is printed now.
"""

import os
import re
import runpy
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest

from pipeproof.commands.cli import main
from pipeproof.core.verdict import ValidationFailed
from pipeproof.whitebox import WhiteBox
from pipeproof.wings.specimens import CATALOGUE
from pipeproof.worlds.world import World
from tests.support.guides import GUIDES, PAGES, ROOT, Block, blocks, same, shown
from tests.support.sources import sources
from tests.support.sweeps import some
from tests.support.warm_start import Ended

Launch = Callable[..., Ended]
EXAMPLES = ROOT / "tests" / "examples"
README = PAGES["README.md"]
REWRITE = os.environ.get("GUIDES") == "rewrite"
# Not run here: what runs this, what test_wheel does, and examples that this session collects anyway.
ELSEWHERE = ("ci/test", "pip install ", "torchrun --nproc-per-node 2 -m pytest test_my_schedules.py", "pytest test_")

# py: of the reference, which is made from the code.
LANGUAGES = {"python", "py", "console", "text", "csv", "json", "toml"}
COMMANDS = {
    page: [
        (command, output)
        for block in blocks("console")
        if block.page == page
        for command, output in block.commands
        if not command.startswith(ELSEWHERE)
    ]
    for page in PAGES
}
FOLLOWED = [page for page in PAGES if COMMANDS[page]]
LONG = [f"validation/guides/{name}.md" for name in ("schedules", "layouts")]  # to follow


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder with the files as the pages show them, so that lines have a reader's numbers, and our tests.

    A pyproject.toml, which all commands read, is there for its own page alone.
    """
    page = getattr(request.node, "callspec", None) and request.node.callspec.params.get("page")
    for block in blocks("python", "csv", "json", "toml"):
        if block.language != "toml" or block.page == page:
            (tmp_path / block.file).write_text(block.text)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    CATALOGUE.unload(tmp_path / "my_specimens.py")


@pytest.fixture
def run(
    folder: Path, python: Launch, torchrun: Launch, kept_ranks: None, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[int, str]]:
    """Run a command of a page: our own in this process, which has ranks at hand; its status, and what it printed."""

    def launch(command: str) -> tuple[int, str]:
        first, *words = shlex.split(command)
        if first in ("pipeproof", "ci/validate", "ci/gate"):
            with as_in(folder):
                status = main([first.removeprefix("ci/"), *words] if first.startswith("ci/") else words)
            printed = capsys.readouterr()
            return status, printed.out or printed.err
        if "--nnodes" in words:
            ended = on_two_machines(python, folder, words)
        elif first == "torchrun":
            ended = torchrun(folder, *words[2:], ranks=int(words[1]))
        else:
            assert first == "python", command
            return by_itself(folder, *words), relevant(capsys.readouterr().out, folder)
        return ended.returncode, relevant(ended.stdout, folder)

    return launch


@contextmanager
def as_in(folder: Path) -> Iterator[None]:
    """Modules of ``folder`` are imported from there, and forgotten afterwards; all others stay."""
    own = {path.stem for path in folder.glob("*.py")}
    before = {name: sys.modules.pop(name) for name in own & sys.modules.keys()}
    with mock.patch.object(sys, "path", [str(folder), *sys.path]):
        try:
            yield
        finally:
            for name in own:
                sys.modules.pop(name, None)
            sys.modules.update(before)


def by_itself(folder: Path, *words: str) -> int:
    """The status of ``python WORDS``, run in this process as far as it can be: its ranks are its own."""
    with as_in(folder), mock.patch.object(sys, "argv", list(words)), mock.patch.dict(os.environ):
        del os.environ["PYTEST_CURRENT_TEST"]
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def on_two_machines(python: Launch, folder: Path, words: list[str]) -> Ended:
    """torchrun itself, once for each machine: here they are both this one."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    node = words.index("--node-rank") + 1

    def machine(rank: int) -> Ended:
        own = [*words[:node], str(rank), *words[node + 1 :]]
        return python(folder, "-m", "torch.distributed.run", *(port if word == "29500" else word for word in own))

    with ThreadPoolExecutor() as machines:
        ended, other = machines.map(machine, range(2))
    assert other.returncode == 0, other.stdout
    return ended


def relevant(output: str, folder: Path) -> str:
    """``output`` without torchrun's own warnings, and with files as observed from ``folder``."""
    lines = output.replace(f"{folder}{os.sep}", "").replace(f"{ROOT}{os.sep}", "").splitlines()
    return "\n".join(line for line in lines if not re.match(r"[WE]\d{4} |\*{5}|Setting OMP_NUM_THREADS", line)).strip()


@pytest.mark.sampled(2)
@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("page", some(FOLLOWED, left=LONG))
def test_a_page_can_be_followed(page: str, run: Callable[[str], tuple[int, str]]) -> None:
    for command, output in COMMANDS[page]:
        if "--svg" in command or "--png" in command:
            pytest.importorskip("matplotlib")  # the extra "plot"
        status, printed = run(command)
        observed = printed.strip()
        wrong = re.search(r"(?m)^(FAIL|DIFFERENT) |breaks \d+ law", observed)
        assert status == int(wrong is not None), observed
        if output:
            agree_or_rewrite(page, observed, output, after=f"$ {command}\n")
        losses = [float(loss) for loss in re.findall(r"(?m)^step.* loss (\S+)", observed)]
        assert losses[-1:] <= losses[:1], "training lowers the loss"


def agree_or_rewrite(page: str, observed: str, output: str, *, after: str) -> None:
    """Compare what was printed with what ``page`` shows, behind ``after``."""
    if REWRITE:
        path = ROOT / page
        path.write_text(path.read_text().replace(f"{after}{output}\n", f"{after}{observed}\n"))
        return
    assert same(observed, output), f"now it prints:\n{observed}"


TESTS = sorted({block.file for block in blocks("python") if "\ndef test_" in block.text})  # of all pages


@pytest.mark.sampled(2)
@pytest.mark.long
@pytest.mark.parametrize("way", ["pytest", "torchrun"])
def test_the_tests_of_all_pages_pass_in_every_way(way: str, folder: Path, python: Launch, torchrun: Launch) -> None:
    """The third way is that of ``ci/test``: these files lie beside this one, and every session here collects them."""
    assert " -m pytest -n 2 " in (ROOT / "ci" / "test").read_text()
    assert all((EXAMPLES / name).exists() for name in TESTS)
    (folder / "tests").unlink()
    words = ["-m", "pytest", "-p", "no:cacheprovider", *TESTS]
    ended = torchrun(folder, *words, ranks=4) if way == "torchrun" else python(folder, *words)
    assert f" {len(TESTS)} passed in " in ended.stdout, ended.stdout
    assert ended.returncode == 0


# What a page says to write for what, in one of its files, and the verdict that it shows.
FAULT = r"(?s)write\s`([^`]+)`\sfor\s`([^`]+)`\.(?:(?!```).)*```text\n(.*?)```"
FAULTS = [(page, *found) for page, text in PAGES.items() for found in re.findall(FAULT, text)]


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize(("page", "wrong", "right", "verdict"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_fault_is_told_as_a_page_shows(
    page: str, wrong: str, right: str, verdict: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own,) = [file for file in folder.glob("*.py") if right in file.read_text()]
    own.write_text(own.read_text().replace(right, wrong))
    (test,) = [block for block in blocks("python") if block.page == page and f'pytest "{block.file}::' in verdict]
    (name,) = re.findall(r"def (test_\w+)", test.text)
    monkeypatch.setenv("PYTEST_CURRENT_TEST", f"{test.file}::{name} (call)")
    with as_in(folder), World() as world, pytest.raises(ValidationFailed) as failed:
        getattr(import_module(Path(test.file).stem), name)(WhiteBox(world))
    agree_or_rewrite(page, str(failed.value), verdict.strip(), after="```text\n")


def test_there_are_faults_to_tell() -> None:
    assert len(FAULTS) == 3


@pytest.mark.pipeproof_ranks
def test_the_smallest_case_of_a_fuzzed_fault_is_replayed_as_a_page_shows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = folder / "test_my_pipeline_fuzzed.py"
    own.write_text(own.read_text().replace("sum(split[:rank])", "rank * split[rank]"))
    monkeypatch.setenv("PYTEST_CURRENT_TEST", f"{own.name}::test_any_case (call)")
    with as_in(folder), World() as world, pytest.raises(ValidationFailed) as failed:
        import_module(own.stem).test_any_case(WhiteBox(world))
    assert failed.value.verdict.replay == shown("--pipeproof-case")


def test_from_install_to_a_verdict_takes_few_commands_and_lines() -> None:
    own = README.partition("\n## Check a schedule")[0]
    (program,) = [block for block in blocks("python") if block.page == "README.md"]
    assert len([line for line in program.text.splitlines() if line.strip()]) <= 10
    assert 1 <= own.count("\n$ ") <= 3
    assert len(README.splitlines()) <= 130


def statements(text: str) -> str:
    """A program without what its docstring says."""
    return re.sub(r'\A"""[^"]*"""\n+', "", text)


@pytest.mark.parametrize("block", [*blocks("python")], ids=lambda block: f"{block.page}: {block.file}")
def test_every_program_is_an_example_that_runs(block: Block) -> None:
    assert statements((EXAMPLES / block.file).read_text()) == block.text


def test_every_example_has_a_line_and_those_to_read_are_short() -> None:
    listed = PAGES["validation/guides/your_step.md"].partition("\n## Examples\n")[2]
    rows = "\n".join(line for line in listed.splitlines() if line.startswith("|"))
    there = {path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith("test_")}
    assert set(re.findall(r"`(\w+\.py)`", listed)) == there
    for name in re.findall(r"`(\w+\.py)`", rows):
        assert len((EXAMPLES / name).read_text().splitlines()) <= 80, name


def test_every_example_that_runs_elsewhere_is_collected() -> None:
    for block in blocks("console"):
        for command, _ in block.commands:
            if command.startswith("pytest test_"):
                assert (EXAMPLES / command.split()[1]).is_file(), command


TEXTS = {  # all that is read with links in it
    **PAGES,
    **{name: (ROOT / name).read_text() for name in ("CHANGELOG.md", "ci/README.md", "validation/own/FINDINGS.md")},
}


def links(page: str) -> list[tuple[Path, str]]:
    """The files of this repository that ``page`` links to, with the heading in them, if one is named."""
    prose = re.sub(r"(?ms)^```.*?^```$|`[^`]*`", "", TEXTS[page])
    found = re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", prose)
    own = ROOT / page
    return [((own.parent / path).resolve() if path else own, heading) for path, heading in found if "://" not in path]


def anchors(text: str) -> list[str]:
    """The anchors of the headings of ``text``, as GitHub and the site make them."""
    titles = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?ms)^```.*?^```$", "", text))
    return [re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles]


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page: str) -> None:
    for path, heading in links(page):
        assert path.exists(), path
        if heading:
            assert heading in anchors(path.read_text())


def test_links_of_every_form_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "[a](b.md), [c\nd](e/f.md#g-h), [i](#j), ![k](l.svg), [m](https://n.o/p.md), `[q](r.md)`\n"
    text += "```py\n[s](t.md)\n```\n"
    monkeypatch.setitem(TEXTS, "x/y.md", text)
    here = ROOT / "x"
    expected = {"b.md": "", "e/f.md": "g-h", "y.md": "j", "l.svg": ""}
    assert links("x/y.md") == [(here / path, heading) for path, heading in expected.items()]
    headings = "# A page\n## Does it, with `b`?\n```py\n# no heading\n```\n"
    assert anchors(headings) == ["a-page", "does-it-with-b"]


def test_the_site_has_every_guide() -> None:
    nav = re.findall(r"(?m)^ +- guides/(\S+)$", (ROOT / "ci" / "mkdocs.yml").read_text())
    assert sorted(nav) == sorted(path.name for path in GUIDES.glob("*.md"))


def test_guides_that_code_and_changelog_name_are_there() -> None:
    texts = [TEXTS["CHANGELOG.md"], *(source.text for source in sources("pipeline", "reference", "validation", "ci"))]
    named = {name for text in texts for name in re.findall(r"guides/([\w-]+\.\w+)", text)}
    assert "extending.md" in named
    assert named <= {path.name for path in GUIDES.iterdir()}


def test_readme_leads_to_every_guide() -> None:
    assert {path for path, _ in links("README.md") if path.parent == GUIDES} >= {*GUIDES.glob("*.md")}


def test_the_scripts_that_readme_names_are_there_and_ci_runs_the_tests() -> None:
    pages = "\n".join(PAGES.values())
    assert "ci/test" in README
    assert "ci/validate" in README
    for name in set(re.findall(r"\bci/[\w.-]+\b", pages)):
        assert (ROOT / name).exists(), name
    for name in ("ci/setup", "ci/validate", "ci/test", "ci/gate"):
        assert (ROOT / name).stat().st_mode & 0o111
        assert name in pages
    assert "ci/test" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("page", ["megatron", "deepspeed", "torchtitan", "colossalai"])
def test_a_framework_is_installed_as_ci_does_and_a_wrong_step_fails_the_command(page: str) -> None:
    package = "megatron-core" if page == "megatron" else page
    text = PAGES[f"validation/guides/{page}.md"]
    (pinned,) = set(re.findall(rf"{package}==[\d.]+", (ROOT / "ci" / "frameworks").read_text()))
    lines = re.findall(r"(?m)^\$ pip install (.*)$", text)
    needed = {word for line in lines for word in line.split() if not word.startswith("-")}
    assert pinned in needed
    cure = "".join(one.read_text() for one in (ROOT / "validation" / "wings" / "adapters").glob(f"{page}*.py"))
    assert {word for word in needed if word not in cure} == set(), "the cure where it is missing"
    assert "    print(verdict)\n    sys.exit(verdict.exit_status)\n" in text


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("loss 1.2345 in 3.1 s", "loss 1.2344 in 0.2 s", True),
        ("loss 1.2345", "loss 9.8765", False),
        ("worst 1.4e-07", "worst 2.2e-07", True),
        ("worst 1.0e-10", "worst 8.5e-10", True),
        ("worst 1.0e-10", "worst 1.4e-06", False),
        ("worst 1.4e-07", "worst 1.4e-03", False),
        ("8 pass; 8 of 8", "7 pass; 8 of 8", False),
        ("8 pass", "8 pass more", False),
        ("20 pass\n1f1b 6, zb-v 14", "20 pass\ngpipe 20", True),
        ("20 pass\n1f1b 6, zb-v 14", "20 pass", False),
        ("rank step\n0 3.1 ms 20.0%", "rank step\n0 4.1 ms 29.1%", True),
        ("bubble 20.0%", "bubble 29.1%", False),
    ],
)
def test_the_comparison_can_fail(one: str, other: str, alike: bool) -> None:
    assert same(one, other) == alike


def test_only_what_a_page_brings_is_imported_anew_and_forgotten(tmp_path: Path) -> None:
    (tmp_path / "my_pipeline.py").write_text("import wave")
    before = sys.modules.get("my_pipeline")
    with as_in(tmp_path):
        assert import_module("my_pipeline") is not before
    assert sys.modules.get("my_pipeline") is before
    assert "wave" in sys.modules, "or classes that are already in use would be made twice"


def test_what_is_read_of_a_page() -> None:
    block = Block("x.md", "`a.py` and then `b.py`:", "console", "$ one --two\nsaid\n$ three\n")
    assert block.file == "b.py"
    assert block.commands == [("one --two", "said"), ("three", "")]
    assert {block.language for block in blocks("python", "console", "text", "csv", "json", "py", "toml")} == LANGUAGES

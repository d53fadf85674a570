"""What verdicts leave behind in a session of pytest, run in the three ways in which users run one."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from xml.etree import ElementTree

import pluggy
import pytest

from pipeproof.reports.session import VerdictReports, make_folder, page_name, properties
from tests.support import verdicts as shown
from tests.support.golden import golden
from tests.support.warm_start import Ended

Run = Callable[..., Ended]

TESTS = """
import pytest
import torch
from torch import nn

GIVEN = {"loss_fn": nn.functional.mse_loss, "ranks": 1}


def build():
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def step(model, microbatches, factor=1):
    losses = []
    for x, target in microbatches:
        loss = nn.functional.mse_loss(model(x), target)
        (factor * loss / len(microbatches)).backward()
        losses.append(loss.item())
    return model, losses


def doubled(model, microbatches):
    return step(model, microbatches, factor=2)


@pytest.fixture
def data(pipeproof_generator):
    return [(torch.randn(2, 4, generator=pipeproof_generator), torch.zeros(2, 4)) for _ in range(2)]


def test_right(whitebox, data):
    assert whitebox.validate(step, reference=build, microbatches=data, **GIVEN)


def test_wrong(whitebox, data):
    whitebox.validate(doubled, reference=build, microbatches=data, **GIVEN).raise_if_failed()


@pytest.mark.parametrize("name", ["a/b", "c d"])
def test_asserted(whitebox, data, name):
    assert whitebox.validate(doubled, reference=build, microbatches=data, **GIVEN)


def test_unread(whitebox, data):
    whitebox.validate(doubled, reference=build, microbatches=data, **GIVEN)


def test_expected_to_fail(whitebox, data):
    verdict = whitebox.validate(doubled, reference=build, microbatches=data, **GIVEN)
    assert verdict.outcome == "fail"


@pytest.mark.pipeproof(ranks=1, seed=5)
def test_marked(whitebox, data, pipeproof_generator):
    assert whitebox.validate(step, reference=build, microbatches=data, loss_fn=nn.functional.mse_loss)
    assert pipeproof_generator.initial_seed() == SEED


def test_without_verdicts():
    assert False, "no verdict"
""".replace("SEED", "744778980")
FAILING = ("test_wrong", "test_asserted[a/b]", "test_asserted[c d]", "test_unread")
WAYS: Mapping[str, tuple[str, ...]] = {"alone": (), "workers": ("-n", "2"), "torchrun": ()}


@pytest.fixture(scope="module", params=WAYS)
def session(
    request: pytest.FixtureRequest, python: Run, torchrun: Run, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("session")
    (folder / "test_it.py").write_text(TESTS)
    words = ("-m", "pytest", "--junitxml=junit.xml", "--pipeproof-html=out/pages", *WAYS[request.param])
    if request.param == "torchrun":
        return torchrun(folder, *words, ranks=2, GITHUB_ACTIONS="true").stdout, folder
    return python(folder, *words, GITHUB_ACTIONS="true").stdout, folder


def test_a_page_is_written_for_each_verdict_that_failed_a_test(session: tuple[str, Path]) -> None:
    said, folder = session
    names = {page_name(f"test_it.py::{name}", 1) for name in FAILING}
    assert {one.name for one in (folder / "out/pages").iterdir()} == names, said
    assert all("<html" in (folder / "out/pages" / name).read_text() for name in names)
    assert {line.rpartition("/")[2] for line in said.splitlines() if re.match(r"pipeproof: .*\.html", line)} == names


def test_the_report_says_how_each_verdict_ended(session: tuple[str, Path]) -> None:
    said, folder = session
    found = {
        case.attrib["name"]: {one.attrib["name"]: one.attrib["value"] for one in case.iter("property")}
        for case in ElementTree.parse(folder / "junit.xml").iter("testcase")
    }
    assert found["test_right"] == {"pipeproof.outcome": "pass", "pipeproof.tier": "bitwise", "pipeproof.worst": "0.0"}
    for name in (*FAILING, "test_expected_to_fail"):
        assert (found[name]["pipeproof.outcome"], found[name]["pipeproof.worst"]) == ("fail", "1.0"), said
    assert found["test_marked"]["pipeproof.outcome"] == "pass"
    assert found["test_without_verdicts"] == {}


def test_github_is_told_of_each_once(session: tuple[str, Path]) -> None:
    said, _ = session
    lines = [line for line in said.splitlines() if line.startswith("::error ")]
    titles = sorted(re.findall(r"title=pipeproof%3A test_it.py%3A%3A(.*?)::", "\n".join(lines)))
    assert titles == sorted(FAILING)
    golden(min(lines))


MARKERS = {
    "unknown": ("rank=2", "has no 'rank': expected ranks= and seed="),
    "text": ("ranks='2'", "has ranks='2': expected a whole number from 1"),
    "none": ("ranks=0", "has ranks=0: expected a whole number from 1"),
    "below": ("seed=-1", "has seed=-1: expected a whole number from 0"),
    "a truth": ("seed=True", "has seed=True: expected a whole number from 0"),
    "no name": ("2", "takes names: expected ranks= and seed=, as ranks=2"),
}


@pytest.mark.parametrize("name", MARKERS)
def test_a_marker_that_cannot_be_is_a_sentence(name: str, python: Run, tmp_path: Path) -> None:
    given, words = MARKERS[name]
    marked = f"import pytest\n\n@pytest.mark.pipeproof({given})\ndef test_it(): open('ran', 'w')\n"
    (tmp_path / "test_it.py").write_text(marked)
    ended = python(tmp_path, "-m", "pytest")
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"test_it.py::test_it: the marker pipeproof {words}" in ended.stdout
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("folder", ["/dev/null/pages", "a_file/pages", "a_file"])
def test_a_folder_that_cannot_be_is_a_sentence(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a_file").touch()
    with pytest.raises(pytest.UsageError, match=f"--pipeproof-html {folder}: .*; name a folder that can be made"):
        make_folder(folder)


def test_names_of_pages_are_plain_and_differ() -> None:
    names = [page_name(one, 1) for one in ("t.py::a[b/c]", "t.py::a[b-c]", "t.py::" + "x" * 400)]
    assert len({*names, page_name("t.py::a[b/c]", 2)}) == 4
    assert all(re.fullmatch(r"[\w.-]{1,160}\.html", name) for name in names)


def test_several_verdicts_of_a_test_are_numbered() -> None:
    found = dict(properties([shown.PASSED, shown.FAILED]))
    assert (found["pipeproof.outcome"], found["pipeproof.2.outcome"]) == ("pass", "fail")
    assert found["pipeproof.2.worst"] == shown.FAILED.worst


def test_pytest_can_leave_it_out_of_some_hooks() -> None:
    """As a plugin it is hashed, where a folder of tests has plugins of its own."""
    manager, reports = pluggy.PluginManager("pytest"), VerdictReports(None)
    manager.register(reports)
    assert reports in manager.get_plugins()
    assert {reports} == {reports}

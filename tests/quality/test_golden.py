"""Texts that are kept: what differs is observed, what the machine puts into them is not."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.support.golden import COLLECTED, Golden, masked, read, stale, write
from tests.support.sources import ROOT


def test_a_kept_text_is_compared_whole(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "x.txt"
    old = Golden(file, "test_a", rewrite=True)
    old.compare("one\ntwo\n")
    old.compare("three")
    old.keep(None)
    assert file.read_text() == "==== test_a\none\ntwo\n\n==== test_a 2\nthree\n"

    new = Golden(file, "test_a", rewrite=False)
    new.compare("one\ntwo")
    with pytest.raises(AssertionError, match=r"(?s)--- kept.*\n-three\n\+four$"):
        new.compare("four")
    with pytest.raises(AssertionError, match="has no text of test_a 3"):
        new.compare("five")
    with pytest.raises(AssertionError, match="no line matches"):
        new.compare("one", lines="two")
    with pytest.raises(AssertionError, match="looks like a head"):
        new.compare("==== one")


def test_what_a_test_no_longer_makes_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    texts = {
        f"test_a[{name}]{number}": name for name in ("x", "y 2") for number in ("", *map(" {}".format, range(2, 12)))
    }
    write(file, texts | {"test_b": ""})
    assert read(file) == texts | {"test_b": ""}
    assert [line for line in file.read_text().splitlines() if line.endswith(("]", " 2", " 10"))][:2] == [
        "==== test_a[x]",
        "==== test_a[x] 2",
    ]
    only = Golden(file, "test_a[x]", rewrite=True)
    only.compare("new")
    only.keep({"test_a[x]", "test_b"})
    assert read(file) == {"test_a[x]": "new", "test_b": ""}
    Golden(file, "test_a[x]", rewrite=True).keep({"test_a[x]"})
    assert not file.exists()


@pytest.mark.parametrize(
    ("text", "same"),
    [
        (f"{ROOT}/tests/x.py: no such file", "ROOT/tests/x.py: no such file"),
        (f"{sys.prefix}/bin/python", "PYTHON/bin/python"),
        ("/a/lib/site-packages/torch/x.py", "SITE/torch/x.py"),
        ("<A object at 0x7f00deadbeef> at 127.0.0.1:29500", "<A object at 0xADDRESS> at 127.0.0.1:PORT"),
        ("a loss at x.py:12", "a loss at x.py:#"),
        ("took 1.25 s, at most 30s or 12.0 ms", "took # s, at most #s or # ms"),
        ("2 stages, error 1.5e-07, s=3", "2 stages, error 1.5e-07, s=3"),
    ],
)
def test_what_the_machine_puts_into_a_text_is_masked(text: str, same: str) -> None:
    assert masked(text) == same


def test_folders_and_numbers_can_be_masked(tmp_path: Path) -> None:
    assert masked(f"{tmp_path}/a.json") == masked(f"{tmp_path}/a.json", [tmp_path]) == "TMP/a.json"
    assert masked("1.5 s", exact=True) == "1.5 s"
    assert masked("2 of 3, 1.5e-07 and 0.25", numbers=False) == "2 of 3, # and #"


def test_an_entry_of_no_test_is_seen(tmp_path: Path) -> None:
    module = tmp_path / "deep" / "test_x.py"
    write(tmp_path / "golden" / "deep" / "test_x.txt", {"test_a": "", "test_a 2": "", "test_b[2]": ""})
    item = SimpleNamespace(path=module, nodeid="deep/test_x.py::test_a")
    config = SimpleNamespace(args=["deep"], stash={COLLECTED: [item]})
    assert stale(cast(pytest.Config, config), tmp_path) == ["golden/deep/test_x.txt: test_b[2]"]
    config.args = ["deep/test_x.py::test_a"]
    assert stale(cast(pytest.Config, config), tmp_path) == []


def test_no_text_is_kept_of_a_test_that_is_no_more(pytestconfig: pytest.Config) -> None:
    assert stale(pytestconfig, ROOT / "tests") == [], "`GOLDEN=rewrite pytest` of the module drops it"

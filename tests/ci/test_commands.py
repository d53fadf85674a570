"""The page about the commands of this repository names them all."""

import re

from tests.support.sources import ROOT


def test_each_file_and_folder_is_named() -> None:
    page = (ROOT / "ci" / "README.md").read_text()
    there = {path.name for path in (ROOT / "ci").iterdir()} - {"README.md", "__pycache__"}
    named = {name.removeprefix("ci/").removesuffix("/") for name in re.findall(r"`([\w/.-]+)`", page)}
    assert there - named == set()
    assert {name for name in named if (ROOT / "ci" / name).exists()} == there

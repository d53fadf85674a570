"""The guide to Megatron: its programs run and print what it shows, and its table is that of the faults."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: ci/frameworks installs it")

from tests.frameworks.megatron_faults import FAULTS
from tests.support.guides import PAGES, ROOT, blocks

PAGE = "validation/guides/megatron.md"
ON_CPU = "import tests.frameworks.on_cpu\n"  # what the guide leaves to a GPU


def test_its_programs_run_and_print_what_it_shows(tmp_path: Path) -> None:
    programs = [block for block in blocks("py") if block.page == PAGE]
    for block in programs:
        (tmp_path / block.file).write_text(ON_CPU + block.text)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    command = [sys.executable, "-W", "ignore", programs[-1].file]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    (shown,) = [block.text for block in blocks("text") if block.page == PAGE]
    assert ended.stdout.splitlines()[0] == shown.strip(), ended.stdout + ended.stderr


def test_its_table_says_of_every_fault_what_the_verdict_says() -> None:
    rows = re.findall(r"(?m)^\| ([\w-]+)[^|]* \| ([\w-]+) \| ([^|]+) \|$", PAGES[PAGE])
    head, *shown = rows
    assert head == ("fault", "named", "where")
    assert shown == [(name, one.kind, "; ".join(dict.fromkeys(one.places))) for name, one in FAULTS.items()]

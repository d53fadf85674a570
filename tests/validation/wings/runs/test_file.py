"""Files of runs that are none, or that change while they are read: a sentence, and nobody waits for them."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeproof.records.record import RecordError
from pipeproof.records.record_file import read
from pipeproof.wings.runs import compare_runs
from pipeproof.wings.runs.file import RankFile
from pipeproof.wings.runs.run import WholeRun
from tests.support.long_runs import Loop


@pytest.fixture
def file(tmp_path: Path) -> Path:
    Loop().train(tmp_path / "run", range(2))
    return tmp_path / "run" / "rank-0.jsonl"


def test_nobody_waits_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-0.jsonl")
    with pytest.raises(RecordError, match=r"cannot read .*rank-0.jsonl: it is no regular file"):
        WholeRun(tmp_path)
    with pytest.raises(RecordError, match=r"cannot read .*rank-0.jsonl: it is no regular file"):
        read(tmp_path / "rank-0.jsonl")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-20]), "step 1 is not where it was; compare once more"),
        (lambda file: file.write_text(file.read_text().splitlines()[0] + "\n"), "step 1 is not where it was"),
        (lambda file: file.write_text(file.read_text().replace('{"number":1,', '{"number":7,')), "step 1 is not where"),
        (Path.unlink, "no such file"),
    ],
    ids=["torn", "cut", "another", "gone"],
)
def test_a_file_that_changes_while_it_is_read_is_said(file: Path, change: Callable[[Path], object], words: str) -> None:
    run = RankFile(file)
    change(file)
    with pytest.raises(RecordError, match=words):
        run.step(1)


def edited(change: Callable[[dict[str, Any]], object], *, line: int = 0) -> Callable[[Path], None]:
    """Change a line of a file: the header, or that of a step."""

    def edit(file: Path) -> None:
        lines = file.read_text().splitlines(keepends=True)
        data = json.loads(lines[line])
        change(data)
        file.write_text("".join([*lines[:line], json.dumps(data) + "\n", *lines[line + 1 :]]))

    return edit


UNFIT = {
    "ranks": (
        edited(lambda header: header.update(ranks=10**9)),
        "lacks ranks 1, 2, 3, 4, 5 and 999999994 more: bring",
    ),
    "losses": (edited(lambda step: step["losses"].pop(), line=2), "step 1 has 3 losses of 4 microbatches; "),
    "version": (edited(lambda header: header.update(version=9)), "is of version 9 of runs"),
    "shape": (
        edited(lambda header: header["parameters"]["2.bias"].update(shape=[3])),
        r"2.bias is float32\[8\] in .* and float32\[3\] in",
    ),
    "name": (
        edited(lambda header: header["parameters"].update(x=header["parameters"].pop("2.bias"))),
        "has no parameter 2.bias, which",
    ),
    "part": (
        edited(lambda header: header["parameters"]["2.bias"].update(bounds=[[0, 5]])),
        r"2.bias is not there once as a whole: parts \[0:5\] of \[8\]: not all",
    ),
    "line": (lambda file: file.write_text(file.read_text().replace('{"number":1,', '"1')), "byte .* is no step"),
    "gone": (
        lambda file: file.write_text("".join(file.read_text().splitlines(keepends=True)[::2])),
        "goes on from step 0, and none is",
    ),
    "weights": (
        lambda file: file.write_text(re.sub('"weights":[^]]*]', '"weights":[]', file.read_text())),
        "step 0 lacks weights",
    ),
    "twice": (
        lambda file: shutil.copy(file, file.with_name("rank-1.jsonl")),
        "rank-0.jsonl and rank-1.jsonl are both of rank 0",
    ),
    "count": (edited(lambda header: header.update(ranks="1")), "its first line has no such form"),
    "steps": (lambda file: file.write_text(file.read_text().splitlines()[0] + "\n"), "the runs have no step in common"),
    "lying": (lambda file: file.write_text(file.read_text().replace('"lying":{}', '"lying":[]')), "has no such form"),
    "addend": (
        lambda file: file.write_text(file.read_text().replace('"lying":{}', '"lying":{"2.bias":[[[0,8]],[0,999999]]}')),
        "step 0 has no such form",
    ),
    "deep": (lambda file: file.write_text("[" * 99999 + "\n"), "is no part of a run"),
    "none": (lambda file: file.unlink(), "has no run in it"),
    "other": (lambda file: file.write_text("{}\n"), "is no part of a run"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_runs_that_cannot_be_compared_are_refused_in_a_sentence(name: str, file: Path, tmp_path: Path) -> None:
    edit, words = UNFIT[name]
    Loop().train(tmp_path / "good", range(2))
    edit(file)
    with pytest.raises(RecordError, match=words):
        compare_runs(tmp_path / "good", file.parent)

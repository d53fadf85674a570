"""Files of runs that are none, or that change while they are read: a sentence, and nobody waits for them."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeproof.records.kept_run import KeptRun
from pipeproof.records.record import RecordError
from pipeproof.records.record_file import read
from pipeproof.records.run_file import RankFile
from tests.support.long_runs import Loop


@pytest.fixture
def file(tmp_path: Path) -> Path:
    Loop().train(tmp_path / "run", range(2))
    return tmp_path / "run" / "rank-0.jsonl"


def test_nobody_waits_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-0.jsonl")
    with pytest.raises(RecordError, match=r"cannot read .*rank-0.jsonl: it is no regular file"):
        KeptRun(tmp_path)
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


def test_of_many_ranks_that_are_not_there_a_few_are_named(file: Path) -> None:
    header, *steps = file.read_text().splitlines()
    file.write_text("\n".join([json.dumps({**json.loads(header), "ranks": 10**9}), *steps]) + "\n")
    with pytest.raises(RecordError, match="lacks ranks 1, 2, 3, 4, 5 and 999999994 more: bring"):
        KeptRun(file.parent)


def test_losses_that_are_not_one_for_each_microbatch_are_no_step(file: Path) -> None:
    header, *steps = file.read_text().splitlines()
    said = json.loads(steps[1])
    count = len(said["losses"])
    file.write_text("\n".join([header, steps[0], json.dumps({**said, "losses": said["losses"][1:]})]) + "\n")
    with pytest.raises(RecordError, match=f"step 1 has {count - 1} losses of {count} microbatches; "):
        RankFile(file).step(1)

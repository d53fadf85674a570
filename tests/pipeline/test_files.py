"""Files of one's own through every command: good ones in any dialect, and what is wrong with the others, never a hang.

Exit status 2 where a file cannot be read as a schedule, 1 where what it says breaks a law.
"""

import io
import os
from dataclasses import replace
from pathlib import Path

import pytest

from pipeproof.commands.cli import main
from pipeproof.pipeline.files import is_csv, read_file
from pipeproof.pipeline.program import Program, lower, program_from_csv
from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.pipeline.schedules import FAMILIES, build, virtuals
from tests.support.golden import golden

GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
PROGRAM = lower(build("1f1b", ranks=2, microbatches=2)).to_csv()
COMMANDS = {"check": ["check"], "show": ["show"], "validate": ["validate", "--schedule"]}


def told(command: str, path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit status of a command on a file, and everything it said."""
    status = main([*COMMANDS[command], str(path)])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert (out == "") == (status == 2), "what cannot be read is said on standard error, all else on standard output"
    return status, out + err


@pytest.mark.parametrize(
    "data",
    [
        GOOD.encode(),
        b"\xef\xbb\xbf" + GOOD.encode(),
        GOOD.replace("\n", "\r\n").encode(),
        GOOD.replace("\n", "\r").encode(),
        GOOD.replace("\n", ",,,\n").encode(),
        GOOD.replace("\n1", ",,\n,1").encode(),
        GOOD.replace("0F1", '"0F1" ').encode() + b"\n \n",
    ],
    ids=["plain", "byte order mark", "CRLF", "CR", "trailing commas", "ragged", "quotes and spaces"],
)
def test_however_it_was_saved(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mine.CSV"
    path.write_bytes(data)
    assert is_csv(path)
    assert read_file(path) == replace(build("1f1b", ranks=2, microbatches=2), name="mine.CSV")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_comes_back_from_a_file_in_every_format(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    schedule = build(name, ranks=2, microbatches=4, virtual=virtuals(name, looped=2))
    program = lower(schedule)
    for value in (schedule, program, program.with_waits):
        path.write_text(value.to_csv())
        found = read_file(path)
        assert (type(found), found) == (type(value), value)
        if isinstance(value, Program):
            assert program_from_csv(value.to_csv(), name=name) == value


UNREADABLE: dict[str, tuple[bytes, str]] = {
    "a wrong cell": (b"0F0,0B0\n1F0,1X0\n", "row 2, column 2: '1X0' is not an action: expected stage, kind and"),
    "a huge number": (b"0F0,0B0,0F" + b"9" * 5000, "row 1, column 3: '0F99999"),
    "a huge microbatch": (
        b"0F999999999,0B999999999",
        "no row has an action of microbatch 0, but one has of microbatch",
    ),
    "a huge stage": (b"0F0,0B0\n999999999F0,999999999B0", "no row has an action of stage 1, but one has of stage 999"),
    "a stage that is left out": (b"0F0,0B0\n2F0,2B0", "no row has an action of stage 1, but one has of stage 2"),
    "microbatches 0 and 7": (b"0F0,0F7,0B0,0B7", "no row has an action of microbatch 1, but one has of microbatch 7"),
    "a stage on two ranks": (b"0F0,0B0\n1F0,0B1,1B0", "row 2: 0B1 is stage 0, which row 1 has already"),
    "a rank with nothing to do": (b"0F0,0B0\n,,\n1F0,1B0", "row 2 has no action: a row is a rank"),
    "another separator": (b"0F0;0B0\n1F0;1B0", "row 1, column 1: '0F0;0B0' is not an action"),
    "a quote that never ends": (b'0F0,"0B0\n1F0,1B0\n', "row 1, column 2: '0B0\\n1F0,1B0' is not an action"),
    "a cell that never ends": (b"0" * 200_000, "not comma-separated text: field larger than field limit"),
    "nothing": (b"", "there is no action at all"),
    "blank lines": (b"\n \n,,\n", "row 1 has no action"),
    "no line at all": (b" \n\n", "there is no action at all"),
    "a last row with nothing to do": (b"0F0,0B0\n,,\n", "row 2 has no action"),
    "an idle slot before a wrong cell": (b"0F0,,\n1F0,,1X0", "row 2, column 3: '1X0' is not an action"),
    "a huge first stage": (b"999999999F0,999999999B0", "no row has an action of stage 0"),
    "zeros": (b"\0" * 64, "row 1, column 1: '\\x00"),
    "a picture": (
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
        "byte 0x89 at 0 is not UTF-8; save it as comma-separated text in UTF-8",
    ),
    "Latin-1": ("0F0,0B0,é".encode("latin-1"), "byte 0xe9 at 8 is not UTF-8"),
    "UTF-16": (GOOD.encode("utf-16"), "byte 0xff at 0 is not UTF-8"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_refused_in_a_sentence(
    name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, words = UNREADABLE[name]
    path = tmp_path / "mine.csv"
    path.write_bytes(data)
    status, said = told(command, path, capsys)
    assert status == 2
    assert words in said
    assert str(path) in said
    assert len(said) < 1000


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_file_is_refused_in_a_sentence(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, pipe, missing = (tmp_path / name for name in ("folder.csv", "pipe.csv", "missing.csv"))
    folder.mkdir()
    os.mkfifo(pipe)
    why = "it is no regular file (- reads standard input)"
    whole = "it is a directory (- reads standard input)"
    assert told(command, folder, capsys) == (2, f"pipeproof: cannot read {folder}: {whole}\n")
    assert told(command, pipe, capsys) == (2, f"pipeproof: cannot read {pipe}: {why}\n")
    status, said = told(command, missing, capsys)
    assert (status, "no such file" in said, f": {missing}\n" in said) == (2, True, True)


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        (GOOD, 0, "standard input keeps every law: 2 ranks"),
        ("0F0;0B0", 2, "pipeproof: standard input: row 1, column 1: '0F0;0B0' is not an action"),
    ],
)
def test_standard_input_is_read_where_it_is_asked_for(
    text: str, status: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert main(["check", "-"]) == status
    assert words in "".join(capsys.readouterr())


def test_a_file_needs_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", ""]) == 2
    golden(capsys.readouterr().err)


def test_a_file_that_no_schedule_fills_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.csv"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole, which takes no room
    with pytest.raises(ScheduleError, match="more than 512 MiB"):
        read_file(path)


LAWLESS = {
    "a forward twice": ("0F0,0F0,0B0\n1F0,1B0", "completeness: 0F0 appears 2 times, expected once", "[0F0][0F0] 0B0"),
    "a backward twice": ("0F0,0B0,0B0\n1F0,1B0", "has 2 B, 0 I and 0 W: expected one B", "0F0 [0B0][0B0]"),
    "a full backward and a split one, and none": ("0F0,0F1,0B0,0I0,0W0", "has 1 B, 1 I and 1 W", "[0B0][0I0][0W0]"),
    "a backward before its forward": ("0B0,0F0", "local-order: rank 0: 0B0 comes before 0F0", "[0B0][0F0]"),
    "orders that contradict": (
        "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0",
        "acyclic: rank 0: 0B0 waits for stage 1's input gradient of microbatch 0, which never comes",
        "rank 1 | [1F1][1B1][1F0][1B0]",
    ),
}
LAWLESS_PROGRAMS = {
    "a receive after what needs it": (
        PROGRAM.replace("1RECV_F0,1F0", "1F0,1RECV_F0"),
        "message-order: rank 1: 1F0 comes before what it needs, 1RECV_F0",
        "[1F0][1RECV_F0]",
    ),
    "a send without its wait": (
        PROGRAM.replace("0B1", "0B1,0WAIT_SEND_F0"),
        "message-order: rank 0: 0SEND_F1 is waited for 0 times, expected once",
        "[0SEND_F1]",
    ),
    "a stage beyond the last": (
        PROGRAM.replace("1B1", "1B1,1SEND_F1"),
        "messages: rank 1: 1SEND_F1 has no stage at its other end",
        "[1SEND_F1]",
    ),
    "a wait for each other on any transport": (
        "0F0,0SEND_F0,0WAIT_SEND_F0,0F1,0SEND_F1,0WAIT_SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F1,1F1,1RECV_F0,1F0,1B1,1SEND_B1,1WAIT_SEND_B1,1B0,1SEND_B0,1WAIT_SEND_B0",
        "waits for",
        "rank 0 | 0F0 [0SEND_F0]",
    ),
}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *((command, name) for command in COMMANDS for name in LAWLESS),
        *((command, name) for command in ("check", "validate") for name in LAWLESS_PROGRAMS),
    ],
)
def test_a_broken_law_is_shown_on_the_grid(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, words, drawn = (LAWLESS | LAWLESS_PROGRAMS)[name]
    path = tmp_path / "mine.csv"
    path.write_text(text)
    status, said = told(command, path, capsys)
    assert status == 1
    assert words in said
    assert drawn in said

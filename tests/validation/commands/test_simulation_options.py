"""A simulated world from a command line: what it says, what it refuses, and that a replay line is exact."""

import re
import shlex

import pytest

from pipeproof.commands.cli import main

pytestmark = pytest.mark.long

LOST = "naive r2 s2 m1 split=1,1 model=mlp plan=train specimen=message-lost seed=0"
RIGHT = ["--schedule", "1f1b", "--ranks", "2", "--microbatches", "2", "--layers", "2", "--model", "mlp"]
SIMULATED = ["--world", "simulated"]


def test_validate_runs_on_simulated_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", *RIGHT, *SIMULATED, "--transport", "nccl", "--interleavings", "2", "-v"]) == 0
    out = capsys.readouterr().out
    assert "1 pass; 1 of 1 bit for bit" in out
    assert 'seed=0" --world simulated --transport pair --interleaving 1' in out, "the last of two"


def test_ranks_may_change_at_every_function_of_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", *RIGHT, *SIMULATED, "--interleaving", "4", "--fine", "-v"]) == 0
    out = capsys.readouterr().out
    assert "1 pass; 1 of 1 bit for bit" in out
    assert "--world simulated --transport unlimited --interleaving 4 --fine\n" in out


def test_a_replay_line_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    line = ["replay", LOST, *SIMULATED, "--transport", "buffered", "--interleaving", "7"]
    for _ in range(2):
        assert main(line) == 3
        out = capsys.readouterr().out
        found = re.search(r"replay +pipeproof (.*)", out)
        assert found is not None, out
        line = shlex.split(found[1])
        seen.append(re.sub(r"\d+\.\d s", "", out))
    assert line[2:] == ["--world", "simulated", "--transport", "buffered", "--interleaving", "7"]
    assert seen[0] == seen[1]
    assert "rank 1 for 1RECV_F0 with rank 0" in seen[0]


SMALLEST = "gpipe r2 s2 m1 split=1,1 model=mlp plan=train"


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_every_interleaving_that_differs_runs(transport: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*RIGHT, *SIMULATED, "--transport", transport, "--exhaust", "-v"]
    words[words.index("1f1b")] = "1f1b,zb-h1"
    assert main(["validate", *words]) == 0
    out = capsys.readouterr().out
    assert "interleavings that differ: 2 ran, of 2 cases; there are no more" in out
    assert "--interleaving in-turn" in out


def test_what_fails_is_told_with_the_fewest_preemptions(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--exhaust", "5"], ["--interleavings", "20"]):
        assert main(["replay", LOST, *SIMULATED, *words]) == 3
        out = capsys.readouterr().out
        assert "--interleaving in-turn\n" in out, "a message that is lost is so in any order"
        assert "rank 1 for 1RECV_F0 with rank 0" in out
        assert "; it hangs with every transport\n" in out


def test_a_hang_ends_with_the_room_that_it_is_told_with(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["replay", f"{SMALLEST} specimen=both-send-first", *SIMULATED, "--transport", "nccl"]
    assert main(line) == 3
    told = re.search(
        r"; with room for ([\d,]+) bytes from one rank to another it ends, under this seed\n", capsys.readouterr().out
    )
    assert told is not None
    room = int(told[1].replace(",", ""))
    assert main([*line, "--room", str(room - 1)]) == 3
    assert f"--room {room - 1} --interleaving" in capsys.readouterr().out
    assert main([*line, "--room", str(room)]) == 0
    hidden = f"this case cannot show both-send-first, which needs --room below {room}: who sends does not wait for what"
    assert hidden in capsys.readouterr().out


def test_fuzz_draws_cases_for_simulated_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "--cases", "2", "--max-ranks", "2", "--schedule", "naive", *SIMULATED]) == 0
    assert "2 cases, 2 pass" in capsys.readouterr().out


def test_a_campaign_draws_transports_and_seeds_unless_they_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    campaign = ["fuzz", "--cases", "6", "--max-ranks", "1", "--schedule", "naive", *SIMULATED]
    assert main([*campaign, "--transport", "any"]) == 0
    assert len(re.findall(r"(\w+) \d+", capsys.readouterr().out.partition("transports: ")[2].partition(";")[0])) > 1
    assert main([*campaign, "--transport", "nccl", "--interleaving", "1"]) == 0
    assert "transports: pair 6; interleavings: one rank starved 6" in capsys.readouterr().out


def test_a_gate_runs_on_simulated_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    table = ["--schedule", "naive", "--ranks", "2", "--microbatches", "1", "--layers", "2", "--model", "mlp"]
    assert main(["gate", *table, "--cases", "0", *SIMULATED, "--interleavings", "2"]) == 0
    assert "gate PASS: 2 pass of 2 cases" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--transport", "nccl"], "--transport has no effect without --world simulated"),
        (["--interleavings", "3"], "--interleavings has no effect without --world simulated"),
        ([*SIMULATED, "--transport", "pigeon"], "unknown 'pigeon'"),
        ([*SIMULATED, "--device", "xpu"], "simulated ranks compute on cpu alone"),
        ([*SIMULATED, "--interleavings", "0"], "--interleavings"),
        ([*SIMULATED, "--interleaving", "-1"], "--interleaving"),
        ([*SIMULATED, "--interleaving", "late"], "'late': expected a seed, or in-turn and what differs from it"),
        ([*SIMULATED, "--interleaving", "in-turn", "--interleavings", "2"], "with an --interleaving that is no seed"),
        ([*SIMULATED, "--exhaust", "--interleavings", "2"], "with --exhaust, which runs them all"),
        ([*SIMULATED, "--exhaust", "0"], "--exhaust"),
        (["--exhaust"], "--exhaust has no effect without --world simulated"),
        (["--fine"], "--fine has no effect without --world simulated"),
        (["--room", "64"], "--room has no effect without --world simulated"),
        ([*SIMULATED, "--room", "64"], "--room 64: transport gloo has no room to speak of: expected one of rendezvous"),
        ([*SIMULATED, "--room", "-1", "--transport", "nccl"], "--room is -1: expected at least 0"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", *RIGHT, *words]) == 2
    assert said in capsys.readouterr().err

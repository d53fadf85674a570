"""A simulated world from a command line: what it says, what it refuses, and that a replay line is exact."""

import re
import shlex

import pytest

from tests.support.golden import golden
from tests.support.typed import Typed

pytestmark = pytest.mark.long

LOST = "naive r2 s2 m1 split=1,1 model=mlp plan=train specimen=message-lost seed=0"
RIGHT = ["--schedule", "1f1b", "--ranks", "2", "--microbatches", "2", "--layers", "2", "--model", "mlp"]
SIMULATED = ["--world", "simulated"]


NAIVE = ["--schedule", "naive", *SIMULATED]
ONCE = ["--ranks", "2", "--microbatches", "1", "--layers", "2", "--model", "mlp"]
BOTH = ["--schedule", "1f1b,zb-h1", *RIGHT[2:], *SIMULATED, "--exhaust", "-v"]
RUNS = {
    "several": ["validate", *RIGHT, *SIMULATED, "--transport", "nccl", "--interleavings", "2", "-v"],
    "all-gloo": ["validate", *BOTH, "--transport", "gloo"],
    "all-nccl": ["validate", *BOTH, "--transport", "nccl"],
    "fuzz": ["fuzz", "--cases", "2", "--max-ranks", "2", *NAIVE],
    "fuzz-given": ["fuzz", "--cases", "6", "--max-ranks", "1", *NAIVE, "--transport", "nccl", "--interleaving", "1"],
    "gate": ["gate", *NAIVE, *ONCE, "--cases", "0", "--interleavings", "2"],
}


@pytest.mark.parametrize("name", RUNS)
def test_what_is_right_is_so_on_simulated_ranks(name: str, typed: Typed) -> None:
    typed(RUNS[name], lines=r"^\d+ pass|^gate|^seed|^  replay|transports: pair|that differ")


def test_a_replay_line_is_exact(typed: Typed) -> None:
    observed = []
    line = ["replay", LOST, *SIMULATED, "--transport", "buffered", "--interleaving", "7"]
    for _ in range(2):
        out = typed.only(line, 3)[0]
        found = re.search(r"replay +pipeproof (.*)", out)
        assert found is not None, out
        line = shlex.split(found[1])
        observed.append(re.sub(r"\d+\.\d s", "", out))
    assert line[2:] == ["--world", "simulated", "--transport", "buffered", "--interleaving", "7"]
    assert observed[0] == observed[1]
    golden(observed[0], lines="^HANG")


SMALLEST = "gpipe r2 s2 m1 split=1,1 model=mlp plan=train"


def test_what_fails_is_told_with_the_fewest_preemptions(typed: Typed) -> None:
    for words in (["--exhaust", "5"], ["--interleavings", "20"]):
        typed(["replay", LOST, *SIMULATED, *words], 3, lines="^HANG|^  replay")


def test_a_hang_ends_with_enough_room(typed: Typed) -> None:
    line = ["replay", f"{SMALLEST} specimen=both-send-first", *SIMULATED, "--transport", "nccl"]
    (told,) = re.findall(r"; with room for ([\d,]+) bytes from one rank to another it ends,", typed.only(line, 3)[0])
    room = int(told.replace(",", ""))
    assert f"--room {room - 1} --interleaving" in typed.only([*line, "--room", str(room - 1)], 3)[0]
    hidden = f"this case cannot show both-send-first, which needs --room below {room}: who sends does not wait for what"
    assert hidden in typed.only([*line, "--room", str(room)])[0]


def test_a_campaign_draws_transports_unless_they_are_given(typed: Typed) -> None:
    out = typed.only(["fuzz", "--cases", "6", "--max-ranks", "1", *NAIVE, "--transport", "any"])[0]
    assert len(re.findall(r"(\w+) \d+", out.partition("transports: ")[2].partition(";")[0])) > 1


@pytest.mark.parametrize(
    "line",
    [
        "--transport nccl",
        "--interleavings 3",
        "--world simulated --transport pigeon",
        "--world simulated --device xpu",
        "--world simulated --interleavings 0",
        "--world simulated --interleaving -1",
        "--world simulated --interleaving late",
        "--world simulated --interleaving in-turn --interleavings 2",
        "--world simulated --exhaust --interleavings 2",
        "--world simulated --exhaust 0",
        "--exhaust",
        "--room 64",
        "--world simulated --room 64",
        "--world simulated --room -1 --transport nccl",
    ],
)
def test_what_makes_no_sense_is_refused(line: str, typed: Typed) -> None:
    typed.refused(["validate", *RIGHT, *shlex.split(line)])

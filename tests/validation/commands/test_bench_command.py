"""``bench`` as a user types it, on ranks and on some that only pretend."""

import json
import math
import re
import shlex
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeproof.cases.timings import FEWEST, Turn
from pipeproof.commands.campaign import Setting
from pipeproof.commands.cli import main
from pipeproof.worlds.rank_report import Ending, RankFailed, RankReport
from tests.support.golden import golden
from tests.support.json_schema import documented

DECODER = {"schedule": "1f1b", "pp": 1, "virtual": 1, "microbatches": 2, "split": [4], "model": "decoder"}
MLP = {**DECODER, "pp": 2, "split": [1, 1], "model": "mlp"}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, data in {
        "one": DECODER,
        "dp": {**DECODER, "dp": 2, "microbatches": 1},
        "mlp": MLP,
        "gpipe": {**MLP, "schedule": "gpipe"},
        "torch": {**MLP, "runtime": "torch"},
        "planted": {**MLP, "specimen": "layernorm-zero"},
        "large": {**DECODER, "tp": 32},
        "bf16": {**DECODER, "dtype": "bf16"},
        "here": {**MLP, "device": "cpu"},
        "there": {**DECODER, "device": "cuda"},
        "job": {**MLP, "model": "llama-3-8b"},
    }.items():
        Path(f"{name}.json").write_text(json.dumps({"format": "pipeproof/config", "version": 1, **data}))


@pytest.mark.pipeproof_ranks
def test_configs_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "one.json", "one.json", "dp.json", "job.json", "--rounds", "3", "--json", "x.json"]) == 0
    out = capsys.readouterr().out
    note, head, first, *lines = out.splitlines()
    golden(note)
    assert head.split() == ["config", "ranks", "step", "spread", "ratio", "memory", "runs"]
    golden(" ".join(re.sub(r"[\d.]+( ms|%| MiB)", r"#\1", first).split()))
    (compared,) = (line for line in lines if re.match(r"dp\.json(:| takes) ", line))
    ((least, most),) = re.findall(r"([\d.]+) to ([\d.]+) in single rounds$", compared)
    assert float(least) <= float(most)
    others = [line.partition(" has other work: ")[0] for line in lines if "other work" in line]
    assert others == ["job.json"], "dp.json computes what one.json does"
    golden(out, lines="rounds each|say little")
    data = documented(Path("x.json").read_text())
    assert (data["status"], data["rounds"]) == (0, 3)
    assert [one["runs"] for one in data["timings"][:3]] == ["stack one-device"] * 2 + ["stack ddp=2"]
    # Every rank of a case knows the losses; of a stack, each of dp's those of its own microbatch.
    for one, ranks, losses in zip(data["timings"], (1, 1, 2, 2), (2, 2, 2, 4), strict=True):
        assert len(one["rounds"]) == 3
        assert min(one["rounds"]) > 0
        assert len(one["bytes"]) == ranks
        assert min(one["bytes"]) > 0
        assert one["losses"] == losses * (1 + 3 * FEWEST)
        assert one["strange"] == []
    one, other, *_ = data["timings"]
    assert one["bytes"] == pytest.approx(other["bytes"], rel=1e-3), "memory is counted, not sampled"


class Pretended:
    """A world whose ranks give one answer after the other."""

    def __init__(self, answers: Sequence[Any]) -> None:
        self.answers = list(answers)

    def run(self, *_: object, **__: object) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def pretending(answers: Sequence[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def world(_: Setting) -> Any:
        yield Pretended(answers)

    monkeypatch.setattr(Setting, "world", world)


def rounds(*seconds: float, loss: float = 1.0) -> list[list[Turn]]:
    """Of a config in turns with itself: each takes these, the other as long."""
    counted = [Turn((), (loss,), 1 << 20), Turn((), (), 1 << 19)]
    return [counted, counted] + [[Turn((one,), (loss,)), Turn((one,), ())] for one in seconds]


def test_no_difference_is_called_one_that_noise_explains(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretending(rounds(1.0, 1.1, 1.2, 1.1, 1.1, 1.2), monkeypatch)
    assert main(["bench", "mlp.json", "gpipe.json", "--rounds", "3"]) == 0
    out = capsys.readouterr().out
    golden(out)


def test_a_difference_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pretending(rounds(1.0, 2.0, 9.0, 18.0, 1.1, 2.2), monkeypatch)
    assert main(["bench", "mlp.json", "gpipe.json", "--rounds", "3", "-q"]) == 0
    out = capsys.readouterr().out
    golden(out)


def test_a_loss_that_is_not_finite_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pretending(rounds(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, loss=math.nan), monkeypatch)
    assert main(["bench", "mlp.json", "gpipe.json", "--rounds", "3", "--json", "x.json"]) == 1
    golden(capsys.readouterr().out)
    assert documented(Path("x.json").read_text())["timings"][0]["strange"] == ["nan"] * 4


@pytest.mark.parametrize("whole", [0, 1])
def test_ranks_that_fail_end_it_without_a_verdict(
    whole: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = RankFailed([RankReport(0, Ending.STUCK, "did not finish within 120 s")], None)
    pretending([*rounds(*(1.0, 1.0) * whole, 1.0), failure], monkeypatch)
    assert main(["bench", "mlp.json", "gpipe.json", "--json", "x.json"]) == 3
    out = capsys.readouterr().out
    golden(out)
    data = documented(Path("x.json").read_text())
    assert (data["rounds"], [len(one["rounds"]) for one in data["timings"]]) == (whole, [whole] * 2)


@pytest.mark.parametrize(
    "line",
    [
        "bench",
        "bench nowhere.json",
        "bench mlp.json --rounds 2",
        "bench torch.json",
        "bench planted.json",
        "bench mlp.json large.json",
        "bench mlp.json bf16.json",
        "bench there.json",
        "bench here.json there.json",
        "bench mlp.json --json /no/such/folder/x",
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretending([], monkeypatch)
    try:
        status = main(shlex.split(line))
    except SystemExit as error:
        status = int(error.code or 0)
    out, err = capsys.readouterr()
    assert (status, out) == (2, ""), err
    golden(err)

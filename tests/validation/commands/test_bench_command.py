"""``bench`` as a user types it, on ranks and on some that only pretend."""

import json
import math
import re
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeproof.commands.campaign import Setting
from pipeproof.commands.cli import main
from pipeproof.own.timings import FEWEST, Turn
from pipeproof.worlds.rank_report import Ending, RankFailed, RankReport
from tests.support.golden import golden
from tests.support.json_schema import documented
from tests.support.typed import Typed

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


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
def test_configs_take_turns(typed: Typed) -> None:
    assert (
        main(
            ["validate", "--bench", "one.json", "one.json", "dp.json", "job.json", "--rounds", "3", "--json", "x.json"]
        )
        == 0
    )
    out = typed.said()
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


@pytest.mark.parametrize(
    ("seconds", "loss", "more", "status"),
    [
        ((1.0, 1.1, 1.2, 1.1, 1.1, 1.2), 1.0, "", 0),
        ((1.0, 2.0, 9.0, 18.0, 1.1, 2.2), 1.0, "-q", 0),
        ((1.0,) * 6, math.nan, "", 1),
    ],
    ids=["noise", "difference", "not finite"],
)
def test_what_is_said_of_two(
    seconds: Sequence[float], loss: float, more: str, status: int, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretending(rounds(*seconds, loss=loss), monkeypatch)
    typed(f"validate --bench mlp.json gpipe.json --rounds 3 --json x.json {more}", status)
    strange = documented(Path("x.json").read_text())["timings"][0]["strange"]
    assert strange == (["nan"] * 4 if status else [])


@pytest.mark.parametrize("whole", [0, 1])
def test_ranks_that_fail_end_it_without_a_verdict(whole: int, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = RankFailed([RankReport(0, Ending.STUCK, "did not finish within 120 s")], None)
    pretending([*rounds(*(1.0, 1.0) * whole, 1.0), failure], monkeypatch)
    typed(["validate", "--bench", "mlp.json", "gpipe.json", "--json", "x.json"], 3)
    data = documented(Path("x.json").read_text())
    assert (data["rounds"], [len(one["rounds"]) for one in data["timings"]]) == (whole, [whole] * 2)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "nowhere.json",
        "mlp.json --rounds 2",
        "torch.json",
        "planted.json",
        "mlp.json large.json",
        "mlp.json bf16.json",
        "there.json",
        "here.json there.json",
        "mlp.json --json /no/such/folder/x",
    ],
)
def test_what_cannot_be_timed(line: str, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    pretending([], monkeypatch)
    typed.refused(f"validate --bench {line}")

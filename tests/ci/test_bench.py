"""What ci/bench computes from what it measures, and that its instruments measure what they should."""

import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import bench_held
import bench_main
import bench_proof
import bench_ranks
import bench_scale
import bench_sleep
import bench_sleeper
import bench_table
import pytest
import torch
from bench_order import chain, out_of_order
from bench_sleeper import Sleeper, Sleeps
from bench_table import Row, Target
from bench_variants import schedule_of
from torch import Tensor, nn

from pipeproof.pipeline import Kind, build
from pipeproof.pipeline.schedules import FAMILIES
from pipeproof.pipeline.stage import ModuleStage
from tests.support.golden import golden

PREDICTED = {"a": 1.0, "b": 2.0, "c": 2.0, "d": 3.0}


@pytest.mark.parametrize(
    ("measured", "pairs"),
    [
        ({"a": 10, "b": 19, "c": 18, "d": 20}, []),
        ({"a": 10, "b": 18, "c": 19, "d": 20}, []),  # what is predicted equal comes anyhow
        ({"a": 10, "b": 21, "c": 18, "d": 20}, [("b", "d")]),
        ({"a": 18, "b": 19, "c": 18, "d": 20}, [("a", "c")]),  # a tie is not an order
    ],
)
def test_an_order_that_was_not_predicted_names_the_pairs(
    measured: dict[str, float], pairs: list[tuple[str, str]]
) -> None:
    assert out_of_order(measured, PREDICTED) == pairs


def test_the_row_of_the_order_says_yes_or_which() -> None:
    for measured, more, met in (({"a": 5.0, "b": 6.0}, "", True), ({"a": 6.0, "b": 5.0}, "; quiet", False)):
        row = bench_sleep.order("order", {"a": 1.0, "b": 2.0}, measured, more)
        assert row.targets[0].met is met
        golden(row.note)
    golden(chain(PREDICTED | {"a": 4.0}))


def test_a_table_has_a_column_for_each_variant() -> None:
    rows = [Row("one", {"ours": 1.5}, [Target("ours/x", 0.5, 1)], "why"), Row("two", {"ours": 12.25, "torch": 3})]
    golden(bench_table.table(rows))


def test_a_target_can_be_missed() -> None:
    assert not Target("x", 1.2, 1.1).met
    golden(str(Target("x", 1.2, 1.1)))
    assert not Target("x", 19, 20, least=True).met
    assert bench_table.ratio([2, 9, 4], [1, 1, 1]) == 4


def test_growth_is_the_exponent_of_the_cost() -> None:
    sizes = [1e5, 2e5, 4e5]
    assert bench_scale.exponent([(size, 3 * size) for size in sizes]) == pytest.approx(1)
    assert bench_scale.exponent([(size, size**2) for size in sizes]) == pytest.approx(2)


@pytest.mark.long
def test_scale_is_measured_point_by_point() -> None:
    rows = bench_scale.measure(ranks=4, rounds=1)
    assert [row.name for row in rows] == ["1f1b P=M=4 V=1", "interleaved P=M=4 V=2"]
    golden("\n".join(row.note for row in rows))
    for row in rows:
        steps = ("build", "check", "simulate", "lower", "transports")
        assert row.medians["total s"] == pytest.approx(sum(row.medians[step] for step in steps))
        assert 0 < row.medians["peak GB"] < 0.2, "torch, which this process has loaded, is not in it"


@pytest.mark.long
def test_a_proof_is_measured_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_proof, "MESHES", ("dp=2,pp={}",))
    (row,) = bench_proof.measure(ranks=2, rounds=1)
    assert row.name == "dp=2,pp=2"
    golden(row.note)
    assert [target.met for target in row.targets] == [True, True]
    assert 0 < row.medians["peak GB"] < 0.3, "torch, which this process has loaded, is not in it"


def test_units_are_shared_by_a_ranks_stages() -> None:
    made = {
        name: build(name, ranks=4, microbatches=32, virtual=2 if name == "interleaved" else None) for name in FAMILIES
    }
    paper = {name: bench_sleep.simulated_s(schedule) * 1e3 for name, schedule in made.items()}
    assert paper["1f1b"] == pytest.approx(35 * 15)
    assert paper["interleaved"] == pytest.approx(32 * 15 + 3 * 7.5)
    assert paper["zb-h1"] == pytest.approx(32 * 15 + 3 * 5)
    assert paper["zb-v"] == pytest.approx(32 * 15 + 3 * 2.5)


def test_durations_as_measured_move_the_makespan() -> None:
    schedule = build("zb-h1", ranks=2, microbatches=4)
    even = bench_sleep.as_measured_s(schedule, dict.fromkeys("FIW", bench_sleeper.UNIT_S))
    assert even == pytest.approx(bench_sleep.simulated_s(schedule))
    assert bench_sleep.as_measured_s(schedule, {"F": 1.0, "I": 1.0, "W": 0.5}) == pytest.approx(4 * 2.5 + 1.5)


def test_the_naive_schedule_tells_what_a_message_takes() -> None:
    naive, lasted = build("naive", ranks=4, microbatches=3), {"F": 1.0, "B": 2.0}
    wall = 3 * 4 * 3 + 18 * 0.25  # every action and every one of the 2 M (P - 1) messages, one after another
    latency = bench_sleep.latency_s(naive, wall, lasted)
    assert latency == pytest.approx(0.25)
    assert bench_sleep.as_measured_s(naive, lasted, latency) == pytest.approx(wall)
    assert bench_sleep.latency_s(naive, 1.0, lasted) == 0, "no message is there before it was sent"


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Sleeps as this thread asks for them; none is slept. Under torchrun another thread watches the ranks."""
    seconds: list[float] = []
    sleep, this_thread = time.sleep, threading.get_ident()

    def ask(duration_s: float) -> None:
        (seconds.append if threading.get_ident() == this_thread else sleep)(duration_s)

    monkeypatch.setattr(time, "sleep", ask)
    return seconds


def test_a_sleeper_sleeps_once_in_each_of_f_i_and_w(slept: list[float]) -> None:
    stage, x = ModuleStage(Sleeper(Sleeps(1.0, 2.0)), 0, splits=True), torch.ones(2, requires_grad=True)
    stage.forward(0, (x,), None)
    assert slept == [1.0]
    stage.backward_input(0, (torch.ones(2),))
    assert slept == [1.0, 2.0]
    stage.backward_weight(0)
    assert slept == [1.0, 2.0, 2.0]
    assert not stage.undeferred
    assert Sleeps(5.0, 4.0).shortened(Sleeps(1.0, 0.5)) == Sleeps(4.0, 3.5), "by what comes on top"


def test_both_splits_put_the_same_sleep_in_each_half(slept: list[float]) -> None:
    assert set(bench_sleeper.halves(Sleeps(1.0, 2.0), repeats=1)) == {"our I", "our W", "torch's I", "torch's W"}
    assert slept == [1.0, 2.0, 2.0] * 2


def test_a_half_that_sleeps_for_both_is_noticed() -> None:
    bench_sleeper.assert_lasted({"I": 5.4e-3, "W": 5.1e-3, Kind.BACKWARD.value: 10.3e-3}, 5e-3)
    with pytest.raises(AssertionError, match=r"I took 10\.20 ms: expected about 5\.00 ms"):
        bench_sleeper.assert_lasted({"I": 10.2e-3, "W": 0.2e-3}, 5e-3)
    with pytest.raises(AssertionError, match=r"W took 0\.20 ms"):
        bench_sleeper.assert_lasted({"W": 0.2e-3}, 5e-3)


def test_held_memory_is_counted_to_the_byte() -> None:
    def step(module: nn.Module, x: Tensor, gradient: Tensor, kept: bool) -> Tensor | None:
        let_go = x.detach() * 2
        return let_go + 1 if kept else None

    for kept in (True, False):
        assert bench_held.held_bytes(partial(step, kept=kept), nn.Identity(), (1000, 64)) == kept * 1000 * 64 * 4


def test_what_we_hold_between_i_and_w_is_what_the_weights_need() -> None:
    """The GELU's output and what arrives at the first linear: the input and the output's gradient were there before."""
    module = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    held = {name: bench_held.held_bytes(step, module, (100, 64)) for name, step in bench_held.STEPS.items()}
    assert held["ours"] == 2 * 100 * 64 * 4
    assert held["ours"] < held["torch"]


def test_the_help_names_every_part(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for word, status in (("--help", "0"), ("z", "2")):
        monkeypatch.setattr(sys, "argv", ["bench", word])
        with pytest.raises(SystemExit, match=status):
            bench_main.main()
    said = capsys.readouterr()
    assert all(f"  {name:2}  {part.title}" in said.out for name, part in bench_main.PARTS.items())
    golden(said.err, lines="error: ")


def test_ranks_that_take_what_is_simulated_are_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(ranks: int, *_: object) -> list[dict[str, Any]]:
        made = {name: schedule_of(name, ranks, bench_sleep.MICROBATCHES) for name in FAMILIES}
        paper = {f"{name} ours": bench_sleep.simulated_s(schedule) for name, schedule in made.items()}
        paper |= {f"{name} torch": 0.6 for name in ("zb-h1", "1f1b")}
        unit = {name: bench_sleep.unit_s(schedule) for name, schedule in made.items()}
        lasted = {name: dict.fromkeys("FIW", unit[name]) | {"B": 2 * unit[name]} for name in made}
        turns = {"spans": {name: [[0.0, wall]] * 5 for name, wall in paper.items()}, "foreign": [0.0] * 5}
        return [{"turns": turns, "lasted": lasted}] * ranks

    monkeypatch.setattr(bench_sleep, "on_ranks", lambda ranks, job, *args: taken(*args))
    monkeypatch.setattr(bench_sleep, "excess", lambda: Sleeps(0.0, 0.0))
    monkeypatch.setattr(bench_sleep, "halves", lambda sleeps: {})
    rows = {row.name: row for row in bench_sleep.measure(ranks=4, rounds=5)}
    assert [*rows] == [*FAMILIES, "order", "order, as measured", "zb-h1 to 1f1b"]
    assert [target.value for target in rows["zb-h1"].targets] == pytest.approx([1.0, 0.825])
    golden("\n".join(rows[name].note for name in ("order", "order, as measured")), exact=True)


def process(proc: Path, pid: int, own: int, *, ended_children: int = 0) -> None:
    """A process that used so many ticks, half of them for the system, as its ``stat`` file says it."""
    (proc / str(pid)).mkdir(exist_ok=True)
    ticks = [own - own // 2, own // 2, ended_children, 0]
    (proc / str(pid) / "stat").write_text(f"{pid} (a (b) c) S {'1 ' * 10}{' '.join(map(str, ticks))} 20 0 1")


def test_the_load_of_others_is_without_the_ranks_and_counts_what_has_ended(tmp_path: Path) -> None:
    second = os.sysconf("SC_CLK_TCK")
    for pid in (11, 12, 13, 14):
        process(tmp_path, pid, second)
    before = bench_ranks.process_seconds(but={11, 12}, proc=tmp_path)
    for rank in (11, 12):
        process(tmp_path, rank, 9 * second)
    process(tmp_path, 13, 2 * second, ended_children=3 * second)  # one more of its own, and 14 used two before it ended
    (tmp_path / "14" / "stat").unlink()
    assert bench_ranks.process_seconds(but={11, 12}, proc=tmp_path) - before == pytest.approx(1 + 2)
    assert bench_ranks.process_seconds(proc=tmp_path / "nowhere") == 0


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system does not say what processes use")
def test_what_a_process_used_is_what_it_says_itself() -> None:
    own, began = Path("/proc/self"), time.process_time()
    observed = bench_ranks._seconds_of(own)
    while time.process_time() - began < 0.2:
        pass
    assert bench_ranks._seconds_of(own) - observed == pytest.approx(time.process_time() - began, abs=0.05)

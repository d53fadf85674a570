"""What is said of a schedule on paper."""

from pathlib import Path

from pipeproof.commands.schedule_commands import show
from pipeproof.pipeline import Times, build
from pipeproof.reports.drawings import Paths

SCHEDULE = build("zb-h1", ranks=4, microbatches=8)


def test_times_of_ones_own_stretch_the_grid() -> None:
    text = show(SCHEDULE, Times(1, 2, 1), Paths())
    assert "makespan 38 (T_F = 1, T_I = 2, T_W = 1 per stage, T_B = T_I + T_W = 3, no latency)" in text
    assert "0I0 0I0" in text


def test_a_grid_has_whole_units_and_says_what_has_any(tmp_path: Path) -> None:
    text = show(SCHEDULE, Times(1, 1.5, 1), Paths(trace=str(tmp_path / "x.json")))
    assert "which are not whole units; --svg or --png draws it)" in text
    assert "makespan 32.5 (T_F = 1, T_I = 1.5" in text
    assert (tmp_path / "x.json").exists()

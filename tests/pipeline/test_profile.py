"""The table of where the time went."""

from pipeproof.pipeline.profile import Profile, beside, profile_table


def test_a_line_per_rank_with_shares() -> None:
    table = profile_table([Profile(0, 0.1, 0.05, 0.01, 0.02), Profile(1, 0.1, 0.1, 0.0, 0.0)])
    assert table.splitlines()[1].split() == ["0", "100.0", "ms", "50.0", "ms", "50.0%", "10.0", "ms", "10.0%", "20.0",
                                             "ms", "20.0%", "20.0", "ms", "20.0%"]  # fmt: skip
    assert "100.0%" in table.splitlines()[2]


def test_other_is_what_is_left() -> None:
    assert abs(Profile(0, 1.0, 0.5, 0.2, 0.1).other_s - 0.2) < 1e-12


def test_measured_beside_simulated_is_two_lines_per_rank() -> None:
    measured = [Profile(0, 0.1, 0.05, 0.01, 0.04), Profile(1, 0.1, 0.02, 0.0, 0.08)]
    rows = [line.split() for line in beside(measured, [Profile(0, 0.08, 0.06, 0.0, 0.02)] * 2).splitlines()]
    assert rows[0] == ["rank", "makespan", "compute", "communication", "idle"]
    assert [row[0] for row in rows[1:]] == ["0", "simulated", "1", "simulated"]
    assert rows[1][2:7] == ["100.0", "ms", "50.0", "ms", "50.0%"]
    assert rows[2][1:6] == ["80.0", "ms", "60.0", "ms", "75.0%"]

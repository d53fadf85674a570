"""The table of where the time went."""

from pipeline.profile import Profile, profile_table


def test_a_line_per_rank_with_shares() -> None:
    table = profile_table([Profile(0, 0.1, 0.05, 0.01, 0.02), Profile(1, 0.1, 0.1, 0.0, 0.0)])
    assert table.splitlines()[1].split() == ["0", "100.0", "ms", "50.0", "ms", "50.0%", "10.0", "ms", "10.0%", "20.0",
                                             "ms", "20.0%", "20.0", "ms", "20.0%"]  # fmt: skip
    assert "100.0%" in table.splitlines()[2]


def test_other_is_what_is_left() -> None:
    assert abs(Profile(0, 1.0, 0.5, 0.2, 0.1).other_s - 0.2) < 1e-12

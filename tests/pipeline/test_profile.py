"""Where the time went, in numbers."""

from pipeproof.pipeline.profile import Profile


def test_other_is_what_is_left() -> None:
    assert abs(Profile(0, 1.0, 0.5, 0.2, 0.1).other_s - 0.2) < 1e-12

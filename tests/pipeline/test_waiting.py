"""The note of what a rank waits for."""

import pytest

from pipeproof.pipeline.waiting import current, waiting


def test_notes_nest_and_are_gone_after() -> None:
    assert current() is None
    with waiting("outer"):
        with waiting(17):
            assert current() == "17"
        assert current() == "outer"
    assert current() is None


def test_a_note_is_gone_after_an_error() -> None:
    with pytest.raises(RuntimeError), waiting("x"):
        raise RuntimeError
    assert current() is None

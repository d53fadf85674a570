"""Ranks and processors: who shares is told, and a crowd before it starts."""

import pytest

from pipeproof.worlds.processors import crowded, shared
from tests.support.golden import golden


def test_who_shares_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert shared(2) == ""
    golden(shared(4))
    assert crowded(16) == ""
    golden(crowded(64))
    monkeypatch.setattr("os.cpu_count", lambda: None)
    golden(shared(2))


def test_ranks_of_a_launcher_are_there_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("pipeproof.worlds.processors.under_torchrun", lambda: True)
    assert crowded(64) == ""

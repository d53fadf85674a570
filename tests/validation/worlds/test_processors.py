"""Ranks and processors: who shares is told, and a crowd before it starts."""

import pytest

from pipeproof.worlds.processors import crowded, shared


def test_who_shares_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert shared(2) == ""
    assert shared(4) == "4 ranks share 2 processors here"
    assert crowded(16) == ""
    assert crowded(64) == "64 ranks share 2 processors here: this takes long"
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert shared(2) == "2 ranks share 1 processor here"


def test_ranks_of_a_launcher_are_there_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("pipeproof.worlds.processors.under_torchrun", lambda: True)
    assert crowded(64) == ""

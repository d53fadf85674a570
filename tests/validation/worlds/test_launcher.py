"""Who of a launcher's ranks speaks."""

import pytest

from validation.worlds.launcher import reports


def test_rank_0_of_torchrun_reports_and_no_other(monkeypatch: pytest.MonkeyPatch, rank_1: None) -> None:
    assert not reports()
    monkeypatch.setenv("RANK", "0")
    assert reports()


def test_a_rank_that_some_program_left_behind_silences_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, text)
    assert reports()

"""Who of a launcher's ranks speaks, what a worker is told of its own place, and who shares a processor."""

import pytest

from pipeproof.worlds.launcher import Seat, describe_sharing, reports, warn_of_crowd
from tests.support.golden import golden

SEAT = Seat(rank=2, ranks=4, local_rank=0, local_ranks=2, device="cpu", store="file:///x", folder="/y")


def test_rank_0_of_torchrun_reports_and_no_other(monkeypatch: pytest.MonkeyPatch, rank_1: None) -> None:
    assert not reports()
    monkeypatch.setenv("RANK", "0")
    assert reports()


def test_a_rank_that_some_program_left_behind_silences_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, text)
    assert reports()


def test_the_environment_names_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "ROLE_RANK", "GROUP_RANK", "RANK"):
        monkeypatch.setenv(name, "9")
    monkeypatch.setenv("MINE", "kept")
    environment = SEAT.full_environment()
    assert {name: environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")} == {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
    }
    assert environment["MINE"] == "kept"
    assert not {name for name in environment if name.startswith(("TORCHELASTIC_", "MASTER_", "ROLE_", "GROUP_RANK"))}


def test_who_shares_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert describe_sharing(2) == ""
    golden(describe_sharing(4))
    assert warn_of_crowd(16) == ""
    golden(warn_of_crowd(64))
    monkeypatch.setattr("os.cpu_count", lambda: None)
    golden(describe_sharing(2))


def test_ranks_of_a_launcher_are_there_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("pipeproof.worlds.launcher.under_torchrun", lambda: True)
    assert warn_of_crowd(64) == ""

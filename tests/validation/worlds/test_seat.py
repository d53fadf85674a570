"""A worker's environment says which rank it is, and nothing of the launcher of whoever started it."""

import pytest

from validation.worlds.seat import Seat

SEAT = Seat(rank=2, ranks=4, local_rank=0, local_ranks=2, device="cpu", store="file:///x", folder="/y")


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

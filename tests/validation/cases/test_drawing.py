"""Draws are their seed's alone: an edit of the user's code changes none."""

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from pipeproof.cases.drawing import by_seed_alone

providers = pytest.importorskip("hypothesis.internal.conjecture.providers", reason="it reads no code")


def draws() -> list[list[int]]:
    drawn = []

    @seed(1)
    @settings(max_examples=100, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(st.lists(st.integers(0, 1000), min_size=5))
    def campaign(numbers: list[int]) -> None:
        drawn.append(numbers)

    campaign()
    return drawn


def put_into_code(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """``number`` is all that Hypothesis finds in the code of loaded modules."""
    found = providers.Constants(integers=providers.SortedSet([number]))
    monkeypatch.setattr(providers, "_get_local_constants", lambda: found)
    monkeypatch.setattr(providers, "CONSTANTS_CACHE", providers.LRUCache(16))


def test_a_seed_draws_the_same_whatever_stands_in_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    put_into_code(monkeypatch, 123)
    before = by_seed_alone()(draws)()
    put_into_code(monkeypatch, 456)
    assert by_seed_alone()(draws)() == before


def test_without_that_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    put_into_code(monkeypatch, 123)
    before = draws()
    put_into_code(monkeypatch, 456)
    assert draws() != before


def test_afterwards_hypothesis_draws_as_it_did() -> None:
    before = draws()
    by_seed_alone()(draws)()
    assert draws() == before

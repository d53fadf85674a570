"""Drawing and shrinking: a campaign is its seed and its budget, and ends early where it is told to."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from pipeproof.worlds.draws import by_seed_alone, draw

NUMBERS = st.integers(0, 1000)


def tried(attempt: Callable[[int], bool | None], *, budget: int = 50, seed_: int = 0) -> tuple[bool | None, list[int]]:
    """Whether the smallest failed again, and the numbers that a campaign tried."""
    numbers = list[int]()

    def count(number: int) -> bool | None:
        numbers.append(number)
        return attempt(number)

    return draw(NUMBERS, count, budget=budget, seed_=seed_), numbers


def test_a_campaign_is_its_seed_and_its_budget() -> None:
    first, again, other = tried(lambda _: True), tried(lambda _: True), tried(lambda _: True, seed_=1)
    assert first == again != other
    assert (first[0], len(first[1])) == (None, 50)


def test_a_failure_shrinks_and_the_smallest_is_the_last() -> None:
    ending, numbers = tried(lambda number: number < 17)
    assert (ending, numbers[-1]) == (True, 17)


def test_one_that_does_not_fail_again_is_told() -> None:
    failed = list[int]()

    def once(number: int) -> bool:
        if failed or number < 17:
            return True
        failed.append(number)
        return False

    assert tried(once)[0] is False


@pytest.mark.parametrize("most", [0, 3])
def test_nothing_is_tried_after_the_end(most: int) -> None:
    numbers = list[int]()
    ending, found = tried(lambda number: numbers.append(number) or (None if len(numbers) > most else True))
    assert (ending, len(found)) == (None, most + 1)


def test_an_end_while_it_shrinks_keeps_the_failure() -> None:
    numbers = list[int]()

    def attempt(number: int) -> bool | None:
        numbers.append(number)
        return None if len(numbers) > 10 and number < 100 else number < 17

    assert tried(attempt)[0] is False


def test_an_error_ends_it_and_is_raised_as_it_is() -> None:
    numbers = list[int]()

    def attempt(number: int) -> bool:
        numbers.append(number)
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$") as raised:
        draw(NUMBERS, attempt, budget=50, seed_=0)
    assert len(numbers) == 1
    assert not getattr(raised.value, "__notes__", [])


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
    providers = pytest.importorskip("hypothesis.internal.conjecture.providers", reason="it reads no code")
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

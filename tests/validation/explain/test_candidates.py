"""Which number another is."""

import pytest

from pipeproof.explain.candidates import Candidate, find_candidate, is_near, multiples, round_candidates
from tests.support.golden import golden


@pytest.mark.parametrize(
    ("one", "other", "noise", "same"),
    [
        (1024.0, 1024.0, 0.0, True),
        (1024.5, 1024.0, 1e-3, True),  # coarse types round
        (1024.5, 1024.0, 0.0, False),
        (512.0, 1024.0, 1e-3, False),
        (-1024.0, 1024.0, 1e-3, False),
        (None, 1024.0, 1e-3, False),
        (float("nan"), 1024.0, 1e-3, False),
    ],
)
def test_numbers_are_near_up_to_rounding(one: float | None, other: float, noise: float, same: bool) -> None:
    assert is_near(one, other, noise) is same


def test_a_number_is_the_first_candidate_that_it_may_be() -> None:
    right = 1.2345
    candidates = [*multiples(right, (1, 2, 2, 8)), *round_candidates(right), Candidate("twice", 2 * right)]
    named = {value: find_candidate(value, candidates) for value in (2 * right, right / 8, 1.234375, right, 3.0)}
    golden("\n".join(f"{value:.6g}: {one.words if one else 'nothing known'}" for value, one in named.items()))

"""Draws: Hypothesis draws and shrinks cases in the controller; ranks only execute what they are given."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.internal.conjecture import data

# Hypothesis ends shrinking after 300 s, on each rank of torchrun by a clock of its own: a campaign ends it before.
SHRINK_S = 240.0


class _NotAPass(Exception):
    """Tells Hypothesis of a failure."""


def draw(
    strategy: st.SearchStrategy[Any], attempt: Callable[[Any], bool | None], *, budget: int, seed_: int
) -> bool | None:
    """Let ``attempt`` try ``budget`` cases that are drawn from ``seed_``, up to the first for which it is false.

    It then tries smaller ones, as long as these fail, too, and the smallest once more at the end. The same seed and
    budget give the same cases. Where ``attempt`` returns None, or raises, nothing is tried after that. Returns whether
    the smallest failed again; None where no case failed.
    """
    stopped, errors = False, list[Exception]()

    @by_seed_alone()
    @seed(seed_)
    @settings(
        max_examples=budget,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(strategy)
    def campaign(case: Any) -> None:
        nonlocal stopped
        if stopped:
            return
        passed: bool | None = None
        try:
            passed = attempt(case)
        except Exception as error:  # of whatever type: no smaller case is wanted that raises it
            errors.append(error)
        stopped = passed is None
        if passed is False:
            raise _NotAPass

    repeated: bool | None = None
    try:
        campaign()
    except (_NotAPass, Flaky) as failure:
        repeated = isinstance(failure, _NotAPass)
    if errors:
        raise errors[0]
    return repeated


_PROVIDER, _OF_CODE = "HypothesisProvider", "_maybe_draw_constant"  # by the latter it draws what code has


@contextmanager
def by_seed_alone() -> Iterator[None]:
    """Within, Hypothesis does not read the code that is loaded while it draws.

    It takes numbers from there, so that after an edit, or beside another module, a seed would draw other cases. It
    reads for two seconds, too, and keeps what it found in a folder of its own, in the user's. Versions that do not are
    left as they are.
    """
    provider = getattr(data, _PROVIDER, None)
    if not hasattr(provider, _OF_CODE):
        yield
        return
    with patch.object(provider, _OF_CODE, lambda *_, **__: None):
        yield

"""Draws that are their seed's alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from hypothesis.internal.conjecture import data

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

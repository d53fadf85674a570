"""What to do next: a hint for every kind of cause."""

from dataclasses import replace

import pytest

from pipeproof.judging.cause import KINDS, Cause
from pipeproof.judging.measured import Measured, Ran
from pipeproof.judging.verdict import Verdict
from pipeproof.reports.page.hints import HINTS, hint

VERDICT = Verdict("c", "fail", "none", (), measured=Measured(ran=Ran(1, 8, (0, 1, 1, 0), ((), ()))))


def test_every_kind_of_cause_has_a_hint() -> None:
    assert HINTS.keys() == KINDS.keys()
    assert all(text.endswith((".", "?")) and len(text) > 30 for text in HINTS.values())
    assert len(set(HINTS.values())) == len(HINTS)


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (8.0, "8 = the number of microbatches: is the loss, or its gradient, divided by it?"),
        (0.125, "1/8, and 8 = the number of microbatches: is anything divided twice by it?"),
        (2.0, "2 = the number of ranks"),
        (4.0, "4 = the number of stages"),
        (3.0, "Look for a division"),
        (None, "Look for a division"),
    ],
)
def test_a_factor_is_said_to_be_what_it_equals(factor: float | None, said: str) -> None:
    assert hint(Cause("scale", factor=factor), VERDICT).startswith(said)


def test_a_factor_of_nothing_known_is_not_explained() -> None:
    assert hint(Cause("scale", factor=8.0), replace(VERDICT, measured=Measured())) == HINTS["scale"]
    assert hint(Cause("dropped", factor=8.0), VERDICT) == HINTS["dropped"]

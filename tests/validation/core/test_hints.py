"""What to do next: a hint for every kind of cause."""

from dataclasses import replace

import pytest

from pipeproof.core.cause import Cause
from pipeproof.core.hints import HINTS, hints
from pipeproof.core.measured import Measured, Ran
from pipeproof.core.verdict import Verdict

VERDICT = Verdict("c", "fail", "none", (), measured=Measured(ran=Ran(1, 8, (0, 1, 1, 0), ((), ()))))


def test_every_kind_of_cause_has_a_hint() -> None:
    assert all(text.endswith((".", "?")) and len(text) > 30 for text in HINTS.values())
    assert len(set(HINTS.values())) == len(HINTS)


@pytest.mark.parametrize(("factor", "several"), [(2.0, 1), (4.0, 1), (8.0, 2)])
def test_a_factor_of_some_microbatches_is_no_number_of_ranks_or_stages(factor: float, several: int) -> None:
    verdict = replace(VERDICT, causes=(Cause("scale", factor=factor, microbatches=(3,)),))
    assert len(verdict.next) == several


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
    verdict = replace(VERDICT, causes=(Cause("scale", factor=factor), Cause("scale", factor=7.0)))
    *factors, general = verdict.next
    assert " ".join(verdict.next).startswith(said)
    assert general == HINTS["scale"]
    assert f"  next      {verdict.next[0]}" in verdict.details.splitlines()
    assert verdict.as_dict()["next"] == [*factors, general]


def test_a_factor_of_nothing_known_is_not_explained() -> None:
    assert hints([Cause("scale", factor=8.0)], Measured()) == [HINTS["scale"]]
    assert hints([Cause("dropped", factor=8.0), Cause("mode")], VERDICT.measured) == [HINTS["dropped"], HINTS["mode"]]

"""The thresholds of the judge stand in one place, and the guide says what they allow."""

import re
from pathlib import Path

import pytest

from pipeproof.core.limits import BF16, FP16, FP32, FP64, TF32, Precision
from tests.support.sources import ROOT

GUIDE = Path(ROOT, "validation", "guides", "how_it_works.md").read_text()
COLUMNS = ("fp32", "bf16, fp16", "autocast, TF32", "fp64")


def cell(row: str, column: str) -> str:
    """What the guide's second table says there."""
    found = re.search(rf"^\| {row} \|(.*)\|$", GUIDE, re.M)
    return found[1].split("|")[COLUMNS.index(column)].strip()


@pytest.mark.parametrize(
    ("column", "precision"), [("fp32", FP32), ("bf16, fp16", BF16), ("bf16, fp16", FP16), ("fp64", FP64)]
)
def test_the_guide_says_what_each_type_allows(column: str, precision: Precision) -> None:
    for row in ("factor", "least", "most"):
        size, _, units = cell(row, column).partition(" ")
        assert float(size) * (precision.unit if units else 1.0) == getattr(precision, row), row


@pytest.mark.parametrize("narrow", [BF16, TF32])
def test_what_is_computed_in_a_narrow_type_alone_has_less_room(narrow: Precision) -> None:
    assert float(cell("factor", "autocast, TF32")) == narrow.factor
    assert float(cell("least", "autocast, TF32")) == FP32.most
    assert float(cell("most", "autocast, TF32").split()[0]) * narrow.unit == narrow.least

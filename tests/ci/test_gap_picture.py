"""The picture of tolerances: a panel per dtype, a line per fault."""

import importlib.util
import re

import pytest
from gap_picture import gap_picture
from gaps import Gap, Row
from least_faults import FAULTS

needs_matplotlib = pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs the extra 'plot'")


def row(dtype: str, count: int, *, without: str = "") -> Row:
    gaps = {fault.name: None if fault.name == without else Gap(0.1 / count, 1e-7, "fail", 0, 1) for fault in FAULTS}
    return Row("mlp", dtype, count, 1e-7, 2e-7, gaps)


@pytest.mark.long
@needs_matplotlib
def test_a_picture_has_a_panel_per_dtype_and_names_floor_and_faults() -> None:
    svg = gap_picture(
        [row(dtype, count, without="sum bf16" * (dtype == "bf16")) for dtype in ("bf16", "fp32") for count in (2, 8)]
    )
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg.decode())
    assert {"fp32", "bf16", "2", "8", "microbatches", "floor, all models", *(fault.name for fault in FAULTS)} <= set(
        texts
    )
    assert texts.count("drop") == 1  # one legend for all panels


@pytest.mark.long
@needs_matplotlib
def test_equal_rows_are_equal_bytes_and_a_fault_that_is_none_has_no_line() -> None:
    one = gap_picture([row("fp32", 2), row("fp32", 8)])
    assert one == gap_picture([row("fp32", 2), row("fp32", 8)])
    assert b"sum bf16" in one
    assert b"sum bf16" not in gap_picture([row("fp32", 2, without="sum bf16"), row("fp32", 8, without="sum bf16")])

"""The page about tolerances: what a cell says, and that the page that is kept says what is measured."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from gap_page import cell, in_words, page
from gaps import Gap, Row, measured
from least_faults import FAULTS

from pipeproof.own.case import DTYPES, MODELS
from tests.support.golden import golden
from tests.support.guides import GUIDES

KEPT = Path(__file__).parents[2] / "ci" / "rounding" / "TOLERANCE.md"


def row(dtype: str, gap: Gap | None) -> Row:
    return Row("mlp", dtype, 8, 0.0, 2e-7, {fault.name: gap for fault in FAULTS})


def test_a_cell_says_effect_gap_what_tier_b_says_and_what_bits_do_not() -> None:
    assert cell(Gap(1e-3, 1e-7, "fail", 0, 6)) == "1.0e-03 (+4.0)"
    assert cell(Gap(1e-5, 1e-7, "unknown", 0, 6)) == "1.0e-05 (+2.0)?"
    assert cell(Gap(1e-5, 1e-2, "pass", 2, 6)) == "1.0e-05 (-3.0)! =2/6"
    assert cell(Gap(0.0, 1e-2, "pass", 1, 1)) == "0 (-inf)! =1/1"
    assert cell(None) == "-"


def test_what_is_hidden_is_said_in_words() -> None:
    first, *_ = in_words([row("bf16", Gap(1e-5, 1e-2, "pass", 2, 6)), row("bf16", Gap(1e-1, 1e-2, "fail", 0, 6))])
    golden(first)
    assert list(in_words([row("bf16", None)])) == []


def test_a_page_has_every_dtype_its_command_and_its_picture() -> None:
    text = page([row("fp32", None), row("bf16", Gap(1e-1, 1e-2, "fail", 0, 6))], command="pipeproof x", picture="a.svg")
    golden(text)


def kept() -> Iterator[tuple[str, list[str]]]:
    """The rows of the page that is kept, with their dtype."""
    dtype = ""
    for line in KEPT.read_text().splitlines():
        dtype = line.removeprefix("## ") if line.startswith("## ") else dtype
        cells = [part.strip() for part in line.strip("|").split("|")]
        if dtype in DTYPES and len(cells) == 4 + len(FAULTS) and cells[1].isdigit():
            yield dtype, cells


def test_the_page_that_is_kept_has_every_model_dtype_and_number_of_microbatches() -> None:
    shown = {(dtype, cells[0], int(cells[1])) for dtype, cells in kept()}
    assert shown == {(dtype, model, count) for dtype in DTYPES for model in MODELS for count in (2, 4, 8, 16, 32)}
    assert (KEPT.parent / "tolerance.svg").read_text().count("<svg") == 1


def test_the_guide_says_what_the_page_says() -> None:
    def found(dtype: str, fault: str) -> str:
        part = KEPT.read_text().split(f"\n## {dtype}\n")[1]
        return next(line for line in part.splitlines() if line.startswith(f"- *{fault}*"))

    def gaps(dtype: str, fault: str) -> list[float]:
        return [float(one) for one in re.findall(r"[-+]\S+", found(dtype, fault).partition(" decades")[0])]

    guide = " ".join((GUIDES / "trust.md").read_text().split())
    token = found("bf16", "token weight")
    assert (gaps("fp32", "LayerNorm drop")[0], gaps("fp32", "token weight")[0]) == (4.8, 1.4)
    assert (gaps("bf16", "token weight"), gaps("bf16", "LayerNorm drop")[0]) == ([-3.4, -1.8], 0.1)
    for words in ("lies 4.8 decades above", "lies 1.4 above", "lies 1.8 to 3.4 decades *below*", "(0.1 decades)"):
        assert words in guide
    unknown = re.search(r"unknown in (\d+ of \d+ rows)", found("fp32", "token weight"))
    assert f"is *unknown* in {unknown[1]}" in guide
    passed, unseen = re.search(r"pass in (\d+ of \d+ rows)", token), re.search(r"(\d+ of \d+) variants", token)
    assert f"{passed[1]} let it pass" in guide
    assert f"{unseen[1]} such faults change no bit" in guide


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("model", "count"), [("mlp", 2), ("mlp", 32), ("dropout", 4)])
def test_the_rows_of_the_page_that_is_kept_can_be_measured_again(dtype: str, model: str, count: int) -> None:
    """Another processor rounds otherwise: floors to a factor of 3, gaps to half a decade.

    So effects are, too: each is computed in fp64, but rounding chooses the variant and the tensor whose it is.
    """
    (shown,) = [cells for found, cells in kept() if (found, cells[:2]) == (dtype, [model, str(count)])]
    again = measured(model, dtype=dtype, count=count)
    for text, floor in zip(shown[2:4], (again.permutation, again.rounding), strict=True):
        assert abs(math.log10(float(text) / floor)) < 0.5 if floor else text == "0"
    for text, fault in zip(shown[4:], FAULTS, strict=True):
        gap = again.gaps[fault.name]
        number = re.match(r"([\d.e+-]+) \(([-+.\d]+)\)([?!]?)", text)
        assert (number is None) == (gap is None)
        if number and gap:
            assert float(number[2]) == pytest.approx(gap.decades, abs=0.5), fault.name
            assert abs(math.log10(float(number[1]) / gap.effect)) < 0.5, fault.name

"""``ci/tolerance``: gaps are measured, what cannot be seen is said, and its page and picture say what was measured."""

import importlib.util
import math
import re
from collections.abc import Iterator
from pathlib import Path

import gaps
import pytest
import torch
from gap_page import cell, in_words, page
from gap_picture import gap_picture
from gap_survey import main
from gaps import Gap, Row, measured
from least_faults import FAULTS, LeastFault, Step, Total

from pipeproof.core.tolerance import error
from pipeproof.own.case import DTYPES, MODELS
from pipeproof.reference.data import Shapes, microbatches
from pipeproof.reference.step import Reference
from tests.support.golden import golden
from tests.support.guides import GUIDES


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {dtype: measured("mlp", dtype=dtype, count=4) for dtype in ("fp32", "bf16", "fp64")}


@pytest.mark.long
def test_floors_follow_the_dtype_and_effects_do_not(rows: dict[str, Row]) -> None:
    units = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp64": 2.0**-53}
    for dtype, row in rows.items():
        assert units[dtype] / 2 < min(row.permutation, row.rounding)
        assert max(row.permutation, row.rounding) < 32 * units[dtype]
        for fault in ("divisor", "drop", "LayerNorm drop"):
            assert row.gaps[fault].effect == pytest.approx(rows["fp64"].gaps[fault].effect, rel=0.5)


def test_fp32_tells_every_fault_from_rounding_and_bf16_does_not(rows: dict[str, Row]) -> None:
    for row in (rows["fp32"], rows["fp64"]):
        assert all(found.decades > 1 and found.outcome != "pass" for found in row.gaps.values())
    hidden = rows["bf16"].gaps["token weight"]
    assert hidden.decades < -1
    assert hidden.outcome == "pass"
    assert rows["bf16"].gaps["sum bf16"] is rows["bf16"].gaps["boundary bf16"] is None
    assert rows["bf16"].gaps["drop"].outcome == "fail"


def test_a_model_without_layer_norms_has_no_such_fault() -> None:
    row = measured("batchnorm", dtype="fp32", count=2)
    assert row.gaps["LayerNorm drop"] is None
    assert row.gaps["drop"] is not None


def test_a_fault_that_changes_nothing_is_unseen_by_bits_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(step: Step) -> Iterator[Total]:
        yield {site: None if gradient is None else gradient.clone() for site, gradient in step.right.items()}

    monkeypatch.setattr(gaps, "FAULTS", (LeastFault("nothing", "nothing is wrong", same),))
    nothing = measured("mlp", dtype="fp32", count=2).gaps["nothing"]
    assert (nothing.effect, nothing.outcome, nothing.unseen, nothing.variants) == (0.0, "pass", 1, 1)
    assert nothing.decades == -math.inf


def test_the_hardest_variant_counts_and_the_easiest_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two variants: one gradient off by a tenth and another by a hundredth; and all off by 5e-5."""

    def two(step: Step) -> Iterator[Total]:
        right = {site: gradient for site, gradient in step.right.items() if gradient is not None}
        first, second, *_ = right
        yield {**step.right, first: right[first] * 1.1, second: right[second] * 1.01}
        yield {site: gradient * 1.00005 for site, gradient in right.items()}

    monkeypatch.setattr(gaps, "FAULTS", (LeastFault("two", "two variants", two),))
    row = measured("mlp", dtype="fp32", count=2)
    found = row.gaps["two"]
    assert found.effect == pytest.approx(5e-5, rel=1e-3)
    assert found.floor <= max(row.permutation, row.rounding)
    assert (found.outcome, found.unseen, found.variants) == ("unknown", 0, 2)


def test_fp64_and_fp32_references_tell_the_same_of_bf16() -> None:
    """The floor of bf16 is measured against fp64; against an fp32 reference it is the same to a percent."""
    batches = microbatches("mlp", count=4, shapes=Shapes(), seed=0)
    narrow = gaps._step("mlp", "bf16", [batch.cast(torch.bfloat16) for batch in batches], 0)
    wide = gaps._widened(gaps._step("mlp", "bf16", narrow.batches, 0))
    single = gaps._step("mlp", "bf16", [batch.cast(torch.float32) for batch in narrow.batches], 0)
    float32 = Step(
        Reference(single.reference.model.float(), owner=single.owner, recipe=single.recipe),
        single.owner,
        single.batches,
        single.recipe,
    )
    for site, gradient in narrow.right.items():
        against = [error(gradient, other) for step in (wide, float32) if (other := step.right[site]) is not None]
        assert against[0] == pytest.approx(against[1], rel=0.01)


needs_matplotlib = pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs the extra 'plot'")
KEPT = Path(__file__).parents[2] / "ci" / "rounding" / "TOLERANCE.md"


def row(dtype: str, gap: Gap | None) -> Row:
    return Row("mlp", dtype, 8, 0.0, 2e-7, {fault.name: gap for fault in FAULTS})


def test_a_cell_says_effect_gap_what_tier_b_says_and_what_bits_do_not() -> None:
    seen, hidden, doubtful = (
        Gap(1e-3, 1e-7, "fail", 0, 6),
        Gap(1e-5, 1e-2, "pass", 2, 6),
        Gap(1e-5, 1e-7, "unknown", 0, 6),
    )
    golden("\n".join(map(cell, (seen, doubtful, hidden, Gap(0.0, 1e-2, "pass", 1, 1), None))))


def test_a_page_has_every_dtype_its_command_and_its_picture() -> None:
    seen, hidden = row("bf16", Gap(1e-1, 1e-2, "fail", 0, 6)), row("bf16", Gap(1e-5, 1e-2, "pass", 2, 6))
    golden(page([row("fp32", None), seen], command="pipeproof x", picture="a.svg"))
    golden(next(iter(in_words([hidden, seen]))))
    assert list(in_words([row("bf16", None)])) == []


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


def point(dtype: str, count: int, *, without: str = "") -> Row:
    gaps = {fault.name: None if fault.name == without else Gap(0.1 / count, 1e-7, "fail", 0, 1) for fault in FAULTS}
    return Row("mlp", dtype, count, 1e-7, 2e-7, gaps)


@pytest.mark.long
@needs_matplotlib
def test_a_picture_has_a_panel_per_dtype_and_names_floor_and_faults() -> None:
    svg = gap_picture(
        [point(dtype, count, without="sum bf16" * (dtype == "bf16")) for dtype in ("bf16", "fp32") for count in (2, 8)]
    )
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg.decode())
    assert {"fp32", "bf16", "2", "8", "microbatches", "floor, all models", *(fault.name for fault in FAULTS)} <= set(
        texts
    )
    assert texts.count("drop") == 1  # one legend for all panels


@pytest.mark.long
@needs_matplotlib
def test_equal_rows_are_equal_bytes_and_a_fault_that_is_none_has_no_line() -> None:
    one = gap_picture([point("fp32", 2), point("fp32", 8)])
    assert one == gap_picture([point("fp32", 2), point("fp32", 8)])
    assert b"sum bf16" in one
    assert b"sum bf16" not in gap_picture([point("fp32", 2, without="sum bf16"), point("fp32", 8, without="sum bf16")])


SMALL = ["--model", "mlp", "--dtype", "fp32", "--microbatches", "2"]


def test_a_survey_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    out = capsys.readouterr().out
    golden(out, lines="^Made by")
    assert "- *drop*: +" in out


@pytest.mark.long
@needs_matplotlib
def test_a_page_and_its_picture_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    markdown, svg = tmp_path / "a.md", tmp_path / "b.svg"
    assert main([*SMALL, "--markdown", str(markdown), "--svg", str(svg)]) == 0
    assert capsys.readouterr().out == ""
    assert "(b.svg)" in markdown.read_text()
    assert svg.read_bytes().startswith(b"<?xml")


BAD = ("--microbatches 4,1", "--microbatches 4,x", "--dtype fp8", "--model lstm", "--markdown /no/such/folder/x.md")


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_a_sentence(line: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        main(line.split())
    golden(str(refused.value))

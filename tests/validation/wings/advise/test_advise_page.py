"""Advice as a page: the picture's bars are the numbers, and nobody's name becomes markup."""

import re
from dataclasses import replace
from html import unescape

import pytest

from pipeproof.wings.advise.cluster import GIB
from pipeproof.wings.advise.page import advice_page
from tests.support.advised import advised
from tests.support.golden import golden
from tests.support.page_text import PageText

PARTS = ("weights", "gradients", "optimizer", "activations")
BAR = re.compile(r'<rect x="([\d.]+)" y="(\d+)" width="([\d.]+)" height="13" class="(\w+) (before|after)">')


@pytest.mark.long
def test_bars_are_as_long_as_what_is_held() -> None:
    advice = advised()
    shown = advice_page(advice)
    steps = [step for step in advice.steps if step.choice is not None]
    rows: dict[str, dict[str, float]] = {}
    for x, y, width, part, when in BAR.findall(shown):
        if when == "after":
            rows.setdefault(y, {})[part] = float(width)
        assert 190 <= float(x) <= float(x) + float(width) <= 750.2, "nothing leaves the picture"
    assert len(rows) == len(steps)
    for step, bars in zip(steps, rows.values(), strict=True):
        held = step.choice.footprint
        assert tuple(bars) == PARTS
        for part, width in bars.items():
            assert width / sum(bars.values()) == pytest.approx(getattr(held, part) / held.total, abs=0.001)
        if held.total <= 80 * GIB:
            assert sum(bars.values()) == pytest.approx(560 * held.total / (1.6 * 80 * GIB), abs=0.3)
        else:
            assert 350 < sum(bars.values()) <= 560.3


@pytest.mark.long
def test_each_layout_is_told_in_sentences() -> None:
    advice = advised()
    shown = advice_page(advice)
    for step in advice.steps:
        assert f">{step.name}</th>" in shown
        assert step.reason in unescape(shown)
    for number, choice in enumerate(advice.best, 1):
        assert f"<h2>{number}. {choice.layout.words}</h2>" in shown
        assert f"{choice.time.bubble / choice.time.total:.1%} of a step" in shown or choice.layout.pp == 1
        assert f"{choice.time.utilization(advice.cluster):.1%} of the devices" in shown
    assert len(advice.best) == 3
    golden(PageText(shown).lines, lines="the fullest device|of the devices")


def test_where_nothing_fits_it_says_so() -> None:
    shown = advice_page(advised("llama-3-405b", 8))
    assert ">nothing fits</span>" in shown
    assert "Copy the line" not in shown
    assert "<h2>1." not in shown


def test_names_are_text() -> None:
    evil = "</script><script>alert('x')</script>&"
    shown = advice_page(replace(advised("llama-3-405b", 8), asked=(evil,), said=evil, line=evil))
    assert "<script>alert" not in shown
    assert "http" not in shown

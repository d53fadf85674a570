"""Pages in a real browser: nothing is fetched or complained of, nothing overlaps, all can be read and reached."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeproof.reports.gate_reports import CaseResult
from pipeproof.reports.page.page import campaign, page
from pipeproof.wings.advise.page import advice_page
from tests.support.advised import advised
from tests.support.verdicts import BARE, FAILED, PASSED, large

playwright = pytest.importorskip(
    "playwright.sync_api", reason="pages are not observed in a browser: playwright is missing"
)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="pages are not observed in a browser: chromium is missing")
OPTIONS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"
ENTRIES = [
    CaseResult(FAILED),
    CaseResult(PASSED),
    CaseResult(BARE),
    CaseResult(FAILED, "planted"),
]
PAGES = {
    "fail": lambda: page(FAILED),
    "pass": lambda: page(PASSED),
    "unknown": lambda: page(BARE),
    "campaign": lambda: campaign(ENTRIES, said="four cases", left_out={"dualpipe": "it needs more ranks"}),
    "large": lambda: page(large()),
    "advice": lambda: advice_page(advised()),
}
Opened = Callable[..., Any]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, made in PAGES.items():
        (folder / f"{name}.html").write_text(made(), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in PAGES}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as client:
        started = client.chromium.launch(executable_path=CHROMIUM, args=OPTIONS.split())
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any, files: dict[str, Path]) -> Iterator[Opened]:
    """Opens a page by its name; what it complains of, or asks for, fails the test in the end."""
    contexts, complaints = [], []

    def open_page(name: str, *, width: int = 1280, scheme: str = "light", script: bool = True) -> Any:
        size = {"width": width, "height": 900}
        context = browser.new_context(color_scheme=scheme, viewport=size, java_script_enabled=script)
        contexts.append(context)
        shown = context.new_page()
        shown.on("console", lambda message: complaints.append(message.text))
        shown.on("pageerror", lambda error: complaints.append(str(error)))
        shown.on("request", lambda one: None if one.url.startswith(("file:", "data:")) else complaints.append(one.url))
        shown.goto(files[name].as_uri())
        return shown

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


OVERLAPS = """() => {
  const boxes = (selector, root) => [...root.querySelectorAll(selector)].map((one) => one.getBoundingClientRect());
  const before = (a, b) => a.right <= b.left + 0.5 || a.bottom <= b.top + 0.5;
  const apart = (a, b) => before(a, b) || before(b, a);
  const groups = [boxes("section", document), ...[...document.querySelectorAll(".row")].map((row) => boxes(".c", row))];
  return groups.flatMap((all) => all.slice(1).filter((one, k) => !apart(all[k], one))).length;
}"""


@pytest.mark.parametrize("name", ["fail", "pass", "unknown", "campaign", "advice"])
def test_nothing_overlaps_and_nothing_is_wider_than_the_window(opened: Opened, name: str) -> None:
    shown = opened(name)
    for width in (360, 1280, 3840):
        shown.set_viewport_size({"width": width, "height": 900})
        assert shown.evaluate("document.documentElement.scrollWidth") <= width
        assert shown.evaluate(OVERLAPS) == 0
        assert shown.evaluate("parseFloat(getComputedStyle(document.body).fontSize)") >= 15


CONTRAST = """() => {
  const numbers = (text) => {
    const found = text.match(/[\\d.]+/g).map(Number), unit = text.startsWith("color(") ? 255 : 1;
    return [found[0] * unit, found[1] * unit, found[2] * unit, found[3] ?? 1];
  };
  const linear = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const ground = (one) => {
    for (; one; one = one.parentElement) {
      const found = numbers(getComputedStyle(one).backgroundColor);
      if (found[3] > 0.99) return found;
    }
    return [255, 255, 255];
  };
  const poor = new Set();
  for (const one of document.querySelectorAll("body *:not(script):not(svg *)")) {
    if (![...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim())) continue;
    const [a, b] = [light(numbers(getComputedStyle(one).color)), light(ground(one))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.add(`${one.tagName}.${one.className}: ${ratio.toFixed(2)}`);
  }
  return [...poor];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast_on_every_colour(opened: Opened, scheme: str) -> None:
    shown = opened("fail", scheme=scheme)
    assert shown.evaluate(CONTRAST) == []
    right, wrong = ["x", *(f"a{k}" for k in range(4))], [f"w{k}" for k in range(5)]
    colours = [f"c {state} {step}" for state in ("right", "culprit", "through") for step in right]
    colours += [f"c {state} {step}" for state in ("wrong", "culprit", "consequence") for step in wrong]
    recolour = "(all) => document.querySelectorAll('.c').forEach((cell, k) => cell.className = all[k] ?? 'c')"
    for k in range(0, len(colours), 8):
        shown.evaluate(recolour, colours[k : k + 8])
        assert shown.evaluate(CONTRAST) == []


def test_a_cell_tells_when_it_is_pointed_at_and_by_the_keyboard(opened: Opened) -> None:
    shown = opened("fail")
    told = shown.locator(".details")
    assert "1F0: the fault is here" in told.inner_text()
    assert shown.locator(".arrows path.shown").count() == 2
    shown.locator(".c", has_text="0F1").hover()
    assert "0F1: agrees" in told.inner_text()
    assert shown.locator(".arrows path.shown").count() == 0
    shown.locator(".c", has_text="1F0").focus()
    for key, action in (
        ("ArrowRight", "1B0"),
        ("ArrowUp", "0B0"),
        ("Home", "0F0"),
        ("ArrowLeft", "0F0"),
        ("End", "0B1"),
    ):
        shown.keyboard.press(key)
        assert shown.evaluate("document.activeElement.textContent") == action
        assert told.inner_text().startswith(action)
    assert shown.locator('.c[tabindex="0"]').count() == 1


def test_the_replay_line_is_copied(opened: Opened) -> None:
    shown = opened("fail")
    shown.get_by_role("button", name="Copy the replay line").click()
    shown.wait_for_function("['Copied', 'Selected'].includes(document.querySelector('[data-copy]').textContent)")


def test_without_a_script_all_is_there_to_read(opened: Opened) -> None:
    shown = opened("fail", script=False)
    assert shown.get_by_role("heading", level=1).inner_text().endswith("a message arrived as another.")
    assert shown.get_by_role("gridcell").count() == 8
    assert "microbatch 1's" in shown.get_by_role("table", name="The fault, tensor by tensor").inner_text()


def test_a_campaign_is_sorted_and_leads_to_its_cases(opened: Opened) -> None:
    shown = opened("campaign")
    first = shown.get_by_role("table", name="Every case; choose a heading to sort").locator("tbody tr").first
    assert FAILED.config in first.inner_text()
    shown.get_by_role("button", name="compared").click()
    shown.get_by_role("button", name="compared").click()
    assert BARE.config in first.inner_text()
    first.get_by_role("link").click()
    assert shown.evaluate("document.querySelector(':target').innerText").startswith("UNKNOWN")


def test_10_000_cells_and_1_000_parameters_stay_smooth(opened: Opened) -> None:
    shown = opened("large")
    assert shown.locator(".c").count() == 16 * 312 * 2
    pointed = """async () => {
      const cells = [...document.querySelectorAll(".c")].filter((_, k) => k % 400 === 0);
      const scroll = document.querySelector(".scroll"), began = performance.now();
      for (const cell of cells) {
        scroll.scrollLeft = cell.offsetLeft;
        cell.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
        await new Promise(requestAnimationFrame);
      }
      return (performance.now() - began) / cells.length;
    }"""
    took = min(shown.evaluate(pointed) for _ in range(3))
    assert took < 100, f"{took:.0f} ms from one cell to the next"

"""README and the guides, as tests read them: their blocks, and whether a command prints what they show."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeproof.pipeline.schedules import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
ROUNDING = 1.2e-7  # the spacing of fp32 numbers
GUIDES = ROOT / "validation" / "guides"
PAGES: Mapping[str, str] = {
    str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "README.md", *sorted(GUIDES.glob("*.md")))
}


@dataclass(frozen=True)
class Block:
    """A fenced block. ``above`` is the line of text before it."""

    page: str
    above: str
    language: str
    text: str

    @property
    def file(self) -> str:
        """The file that the block is: the last name in the line above."""
        names = re.findall(r"`([\w./-]+\.(?:py|csv|json|toml))`", self.above)
        assert names, f"{self.page}: no file is named above {self.text[:80]!r}"
        return str(names[-1])

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Each command with the output that is shown; empty where none is."""
        parts = (part.partition("\n") for part in self.text.split("$ ")[1:])
        return [(command, output.strip()) for command, _, output in parts]


def blocks(*languages: str) -> Iterator[Block]:
    """All blocks in these languages, page by page."""
    for page, text in PAGES.items():
        for above, language, inside in re.findall(r"(?ms)^([^\n]*)\n+```(\w+)\n(.*?)^```$", text):
            if language in languages:
                yield Block(page, above, language, inside)


def shown(words: str) -> str:
    """The one text block that has ``words``."""
    (found,) = [block.text for block in blocks("text") if words in block.text]
    return found.strip()


def steady(text: str) -> list[str]:
    """The words of ``text``, with times and rates blanked, which differ from run to run."""
    text = re.sub(r"\d+\.\d+ ?(s|ms|cases/s)\b", r"# \1", text)
    # Which schedules a seed draws, and how often, differs between versions of Hypothesis.
    text = re.sub(rf"(?m)^(({'|'.join(FAMILIES)}) \d+(, |$))+$", "# how often each schedule", text)
    # Processors decide how many bits agree in another order of additions, and how far off a wrong gradient is.
    text = re.sub(r"\b(\d+) compared, (?!0 |\1 )\d+ bit for bit", r"\1 compared, # bit for bit", text)
    text = re.sub(r"(relative error) \d+(\.\d+)?\b(?!e)", r"\1 #", text)
    if re.search(r"(?m)^rank +(step|makespan)", text):  # the table of a profile: times and their shares
        text = re.sub(r"\d+\.\d%", "#%", text)
    return text.split()


def same(observed: str, expected: str) -> bool:
    """Whether two outputs say the same; measured numbers need only be close.

    Machines round differently. The text that models learn from comes with Python and differs between versions.
    """
    ours, theirs = steady(observed), steady(expected)
    return len(ours) == len(theirs) and all(map(_close, ours, theirs))


def _close(one: str, other: str) -> bool:
    """Equal words; or errors (``5.9e-07``) up to a factor of 4, or numbers of 3 decimals and more up to a quarter.

    Errors under ``ROUNDING`` are all alike: how far under it a norm comes out is the processor's luck.
    """
    if one == other:
        return True
    for number, most, nothing in ((r"(\d\.\de[-+]\d\d)", 4, ROUNDING), (r"(\d+\.\d{3,})", 1.25, 0)):
        pieces, others = re.split(number, one), re.split(number, other)
        if len(pieces) > 1 and pieces[::2] == others[::2]:
            pairs = zip(map(float, pieces[1::2]), map(float, others[1::2]), strict=True)
            return all(max(pair) <= max(nothing, most * min(pair)) for pair in pairs)
    return False

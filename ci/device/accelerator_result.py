"""What `ci/accelerator` found: a row for each thing that was tried, parts, and the whole as Markdown and JSON."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

_SHOWN = 40  # rows of a table; of longer ones, those that a reader must see
_GOOD = ("pass", "caught", "measured")


@dataclass(frozen=True)
class Row:
    """One thing that was tried: what, how it went, and what else is known of it, by column.

    ``wrong``: a right schedule that failed, or a planted fault that passed.
    """

    what: str
    outcome: str
    cells: Mapping[str, str] = field(default_factory=dict)
    wrong: bool = False


@dataclass(frozen=True)
class PartResult:
    """How a part went. ``ended`` is "running", "done", "not run", "cut off" or "broken"; ``reason`` says why.

    ``log``: the last lines that a part printed that broke.
    """

    name: str
    title: str
    ended: str = "running"
    reason: str = ""
    seconds: float = 0.0
    rows: Sequence[Row] = ()
    log: Sequence[str] = ()

    @property
    def wrong(self) -> int:
        """How many rows are wrong."""
        return sum(row.wrong for row in self.rows)

    @property
    def told(self) -> str:
        """How it went, in a few words: a count of each outcome."""
        counts = Counter(row.outcome for row in self.rows)
        found = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        how = f"{self.ended}: {self.reason}" if self.reason else self.ended
        return f"{how}; {found}" if found else how


@dataclass(frozen=True)
class Result:
    """All of it. ``machine``: what computed, by name."""

    machine: Mapping[str, str]
    parts: Sequence[PartResult] = ()

    @property
    def status(self) -> int:
        """1 where anything is wrong, or a part broke: then nobody knows what it would have shown; else 0."""
        return 1 if any(part.wrong or part.ended == "broken" for part in self.parts) else 0

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        parts = [{**asdict(part), "wrong": part.wrong} for part in self.parts]
        return {
            "format": "pipeproof/accelerator",
            "version": 1,
            "machine": {**self.machine},
            "status": self.status,
            "parts": parts,
        }

    def markdown(self) -> str:
        """A table of all parts, and one of each part's rows."""
        machine = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        overview = _table(("part", "what", "how it went", "time"), [_overview(part) for part in self.parts])
        sections = [section(part) for part in self.parts if part.rows]
        return "\n\n".join([f"# {machine}", *([overview] if self.parts else []), *sections]) + "\n"


def _overview(part: PartResult) -> tuple[str, ...]:
    return part.name, part.title, part.told, f"{part.seconds:.0f} s"


def section(part: PartResult) -> str:
    """The rows of one part under a heading; of a long table, those that are not as they should be."""
    shown = part.rows if len(part.rows) <= _SHOWN else [row for row in part.rows if row.outcome not in _GOOD]
    left_out = len(part.rows) - len(shown)
    columns = list(dict.fromkeys(column for row in shown for column in row.cells))
    lines = [(row.what, row.outcome, *(row.cells.get(column, "") for column in columns)) for row in shown]
    parts = [f"## {part.title}"]
    if shown:
        parts.append(_table(("what", "how it went", *columns), lines))
    if left_out:
        parts.append(f"{left_out} others are as they should be.")
    return "\n\n".join(parts)


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def merged(rows: Sequence[Row]) -> list[Row]:
    """The last row of each name, where the first stood: one that goes on is told again and again."""
    return list({row.what: row for row in rows}.values())


def failing(part: PartResult) -> Iterator[str]:
    """A line for each row that is wrong."""
    yield from (f"{part.name}: {row.what}: {row.outcome}" for row in part.rows if row.wrong)
